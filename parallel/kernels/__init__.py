"""Triton kernels that talk to other GPUs. Import the module of a kernel only where it is used."""
