"""Triton kernels of our own for a GPU, most of them for bf16; importing one needs triton."""
