"""Mends Triton's interpreter; imported by test files that run themselves in it as scripts."""

from typing import Any


def patch() -> None:
    """NumPy 2.4 refuses int() of the one-element arrays in which Triton 3.6 keeps its scalars."""
    from triton.runtime import interpreter

    own = getattr(interpreter, "_patch_lang_tensor", None)
    if own is None:
        return

    def patched(tensor: Any, *rest: Any) -> None:
        own(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched
