"""Torch-free foundations: errors, environment settings, dtype names, logging."""
