"""Clients side by side on a GPU, each step a CUDA graph."""
