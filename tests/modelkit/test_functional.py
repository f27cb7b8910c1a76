"""Small operations against their definition."""

import pytest
import torch

from modelkit import functional


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_linear_is_the_layer_on_every_processor(tiles, bias, rows, monkeypatch):
    monkeypatch.setattr(functional, "TILES", tiles)
    layer = torch.nn.Linear(7, 5, bias=bias).double()
    x = torch.randn(rows, 7, dtype=torch.float64)
    expected = x @ layer.weight.T + (layer.bias if bias else 0)
    torch.testing.assert_close(functional.linear(x, layer), expected)
