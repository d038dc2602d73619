"""Philox4x32-10 in torch: 128 random bits from a 64-bit key and a 128-bit counter, the same on every machine.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Products are formed from 16-bit limbs, so that
nothing leaves int64.
"""

from __future__ import annotations

from typing import Final

import torch

_MASK: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(
    seed: torch.Tensor,
    c0: torch.Tensor | int,
    c1: torch.Tensor | int = 0,
    c2: torch.Tensor | int = 0,
    c3: torch.Tensor | int = 0,
) -> Words:
    """Four words, each int64 holding a uint32, of the broadcast shape of the arguments.

    `seed` is int64: its low 32 bits are key word 0, its high ones key word 1. The counter words are int64 tensors or
    ints; only their low 32 bits count.
    """
    words = [torch.as_tensor(c, dtype=torch.int64, device=seed.device) & _MASK for c in (c0, c1, c2, c3)]
    x0, x1, x2, x3 = torch.broadcast_tensors(*words)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], x0)
        high1, low1 = _multiply(_MULTIPLIERS[1], x2)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return x0, x1, x2, x3


def _multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low) 32 bits of the 64-bit product of two uint32."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    upper = high + (low >> 16)
    return upper >> 16, ((upper & 0xFFFF) << 16) | (low & 0xFFFF)
