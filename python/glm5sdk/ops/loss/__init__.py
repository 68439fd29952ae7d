"""Losses that read the vocabulary in blocks."""
