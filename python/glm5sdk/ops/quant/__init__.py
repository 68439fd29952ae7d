"""Quantisation of activations, and the rotation that goes before it."""
