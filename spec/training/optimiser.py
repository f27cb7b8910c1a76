"""How weights move: the learning rate over a run, and Muon or AdamW for the matrices. Vectors always get AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .config import OptimiserConfig

# A quintic iteration that drives singular values towards 1, fast rather than exactly (Muon, Jordan et al., 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MOMENTUM = 0.95
# An orthogonal matrix times this and the root of its longer side moves entries as AdamW does at the same rate
# (arXiv 2502.16982, section 2.2).
ADAMW_SIZE = 0.2


def learning_rate(config: OptimiserConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to 0 behind the last step."""
    warm = math.ceil(config.warmup * config.steps)
    if step < warm:
        return config.learning_rate * (step + 1) / warm
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(config.steps - warm, 1)))


def make_optimisers(model: nn.Module, config: OptimiserConfig, device: torch.device) -> list[torch.optim.Optimizer]:
    """Optimisers of all parameters, each of one of them; set the rate of their groups before each step."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors: dict[str, Any] = {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}
    adamw: dict[str, Any] = {"lr": config.learning_rate, "betas": (0.9, 0.95), "fused": device.type == "cuda"}
    if config.optimiser == "adamw":
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, vectors]
        return [torch.optim.AdamW(groups, **adamw)]
    muon = Muon(matrices, lr=config.learning_rate, weight_decay=config.weight_decay)
    return [muon, torch.optim.AdamW([vectors], **adamw)]


def orthogonalised(matrices: Tensor) -> Tensor:
    """bf16 [N, A, B], A at most B: about the nearest matrices with orthonormal rows."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` with Nesterov momentum and AdamW's size of steps, all matrices of one shape at once.

    A drafter has dozens of small matrices; one after another they would cost hundreds of launches a step.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            gradients = [p.grad for p in params]
            for p in params:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            momenta = [self.state[p]["momentum"] for p in params]
            torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            wide = [m.T if m.shape[0] > m.shape[1] else m for m in torch._foreach_lerp(gradients, momenta, MOMENTUM)]
            for shape in dict.fromkeys(m.shape for m in wide):
                same = [index for index, m in enumerate(wide) if m.shape == shape]
                moves = orthogonalised(torch.stack([wide[index] for index in same])).float()
                size = group["lr"] * ADAMW_SIZE * math.sqrt(max(shape))
                moved = [params[index] for index in same]
                turned = [move if move.shape == p.shape else move.T for move, p in zip(moves, moved, strict=True)]
                torch._foreach_add_(moved, turned, alpha=-size)
