"""Triton kernels of our own for bf16 on a GPU, which `fednca.engine.fused` calls; importing one needs triton."""
