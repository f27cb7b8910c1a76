"""Optimisers: the rate over a run, Muon against PyTorch's, and which parameters get what."""

import pytest

torch = pytest.importorskip("torch")

from spec.training.config import OptimiserConfig  # noqa: E402
from spec.training.optimiser import Muon, learning_rate, make_optimisers, orthogonalised  # noqa: E402


def test_the_learning_rate():
    config = OptimiserConfig(steps=100, warmup=0.1, learning_rate=1.0)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0 and rates[55] == pytest.approx(0.5) and 0 < rates[99] < 0.001
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_muon_is_pytorchs_whatever_the_shapes():
    generator = torch.Generator().manual_seed(1)
    shapes = [(8, 8), (4, 12), (12, 4), (8, 8), (4, 12)]
    ours = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    muon = Muon(ours, lr=0.02, weight_decay=0.1)
    known = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        muon.step()
        known.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)  # products in bf16, of other orders


def test_orthogonalised():
    matrices = torch.randn(3, 6, 20, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalised(matrices).float())
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.5
    assert float(torch.linalg.svdvals(matrices).min()) > 1.5


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_parameter_has_one_optimiser_and_vectors_do_not_decay(name):
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6))
    config = OptimiserConfig(steps=1, optimiser=name, weight_decay=0.5)
    groups = [group for o in make_optimisers(model, config, torch.device("cpu")) for group in o.param_groups]
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(id(p) for p in model.parameters())
    for group in groups:
        assert {p.dim() > 1 for p in group["params"]} == {group["weight_decay"] == 0.5}
