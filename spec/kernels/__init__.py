"""Triton kernels of spec, one file an operation; importing this folder imports no Triton.

Each kernel's meaning is defined by plain PyTorch beside its owner: `BestFirst.build` for `best_first_tree`. Import the
module of a kernel only where it is used.
"""
