"""Triton kernels of modelkit, one file an operation; importing this folder imports no Triton.

Each kernel's meaning is defined by plain PyTorch beside its owner: `DensePlan.attend` for `tree_attention`,
`KVCache.commit` for `commit_rows`, `Reference.top_candidates`. Import the module of a kernel only where it is used.
"""
