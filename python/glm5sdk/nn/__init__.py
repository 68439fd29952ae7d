"""Modules of the GLM-5 family: parameters with Hugging Face names around ops; no arithmetic of their own."""
