"""Gumbel noise out of counters: a function of (seed, position, token id, stream), with no state anywhere.

The 32-bit integers are the same on every device, rank and PyTorch version; the logarithms after them are not, to the
last bit. Everything is int64 arithmetic that never overflows, with multipliers below 2^31 and masks from a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Two independent 32-bit lanes make the key of a row; the constants are digits of pi.
LANES = (0x243F6A88, 0x13198A2E)
# Of `mix`, from C. Wellons' and T. Ronnberg's hash search: xorshift-multiply of two rounds.
FACTORS = (0x21F0AAAD, 0x735A2D97)


def mix(x: Tensor, low_bits: Tensor) -> Tensor:
    """A bijection of 0..2^32 - 1 in which every input bit changes every output bit half of the time.

    Source: the constants of C. Wellons' and T. Ronnberg's hash search, xorshift-multiply of two rounds.
    """
    x = x ^ (x >> 16)
    x = (x * FACTORS[0]) & low_bits
    x = x ^ (x >> 15)
    x = (x * FACTORS[1]) & low_bits
    return x ^ (x >> 15)


def noise_bits(
    seed: Tensor, position: Tensor, vocab_size: int, low_bits: Tensor, stream: int | Tensor = 0, first: int = 0
) -> Tensor:
    """32 random bits for each row and token id.

    Args:
        seed: int64 [R], 0..2^63 - 1.
        position: int64 [R], absolute position of the token to be emitted, below 2^32.
        vocab_size: V, ids that noise is wanted for.
        low_bits: int64 [], 2^32 - 1.
        stream: another number, 0..2^32 - 1, is other noise; one for all rows or int64 [R].
        first: the lowest of those ids.

    Returns:
        int64 [R, V], 0..2^32 - 1.
    """
    one, two = row_keys(seed, position, low_bits, stream).unbind(-1)
    token = torch.arange(first, first + vocab_size, device=seed.device)
    return mix(mix(token ^ one[:, None], low_bits) ^ two[:, None], low_bits)


def row_keys(seed: Tensor, position: Tensor, low_bits: Tensor, stream: int | Tensor = 0) -> Tensor:
    """What a row's noise depends on, int64 [R, 2] of 32 bits each; arguments as in `noise_bits`."""
    first, second = (torch.full_like(seed, lane) for lane in LANES)
    for word in (seed & low_bits, seed >> 32, position & low_bits, stream):
        first, second = mix(first ^ word, low_bits), mix(second ^ word, low_bits)
    return torch.stack([first, second], -1)


def uniform_noise(
    seed: Tensor, position: Tensor, vocab_size: int, low_bits: Tensor, stream: int | Tensor = 0, first: int = 0
) -> Tensor:
    """Uniform noise fp32 [R, V], never 0 and never 1; arguments as in `noise_bits`."""
    bits = noise_bits(seed, position, vocab_size, low_bits, stream, first)
    return ((bits.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)


def gumbel_noise(
    seed: Tensor, position: Tensor, vocab_size: int, low_bits: Tensor, stream: int | Tensor = 0, first: int = 0
) -> Tensor:
    """Standard Gumbel noise fp32 [R, V]; arguments as in `noise_bits`.

    The largest values decide, and they come from the smallest uniforms, where fp32 is finest: -log(-log(u)) with u near
    1 would have lost them at a large vocabulary.
    """
    return -torch.log(-torch.log1p(-uniform_noise(seed, position, vocab_size, low_bits, stream, first)))
