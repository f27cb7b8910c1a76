"""Values between two steps that are compiled by themselves: kept at fixed addresses, which captured graphs know."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn


class Held(nn.Module):
    """A dataclass of tensors, kept at fixed addresses between two steps.

    Args:
        value: gives shapes and dtypes; fields that are no tensors are kept as they are, dataclasses inside too.
    """

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.kind = type(value)
        self.fixed: dict[str, Any] = {}
        self.tensors: list[str] = []
        self.inner: list[str] = []
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            if isinstance(part, Tensor):
                buffer = torch.empty(part.shape, dtype=part.dtype, device=part.device)
                self.register_buffer(field.name, buffer, persistent=False)
                self.tensors.append(field.name)
            elif dataclasses.is_dataclass(part):
                self.add_module(field.name, Held(part))
                self.inner.append(field.name)
            else:
                self.fixed[field.name] = part
        self.put(value)

    def put(self, value: Any) -> None:
        """Copy a value of the same shapes in."""
        for name in self.tensors:
            getattr(self, name).copy_(getattr(value, name))
        for name in self.inner:
            getattr(self, name).put(getattr(value, name))

    def get(self) -> Any:
        """The value; its tensors are the buffers."""
        held = {name: getattr(self, name) for name in self.tensors}
        inner = {name: getattr(self, name).get() for name in self.inner}
        return self.kind(**held, **inner, **self.fixed)
