"""Triton kernels of sampling, one file an operation; importing this folder imports no Triton.

Each kernel's meaning is defined by plain PyTorch beside its owner: `Gumbel.noisy` and argmax for `choose_tokens`,
`Gumbel.perturb` for `perturb_logits`. Import the module of a kernel only where it is used.
"""
