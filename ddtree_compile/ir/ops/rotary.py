"""Rotary position embedding, plain and YaRN (arXiv 2309.00071), in both pairings."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ddtree_compile.ir.ops.record import OpRecord, same_as, table


@lru_cache(maxsize=32)
def inverse_frequencies(
    dim: int, theta: float, factor: float, original_max: int, beta_fast: float, beta_slow: float
) -> Tensor:
    """Radians a position for each of dim/2 pairs, fp32.

    With `factor` > 1, YaRN: pairs that turn more than `beta_fast` times within `original_max` positions keep their
    frequency, those that turn less than `beta_slow` times are divided by `factor`, a linear ramp lies between.
    """
    plain = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if factor == 1.0:
        return plain

    def pair_turning(times: float) -> float:
        return dim * math.log(original_max / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(beta_fast)), 0)
    high = min(math.ceil(pair_turning(beta_slow)), dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return (plain / factor) * ramp + plain * (1 - ramp)


def rope(
    x: Tensor,
    positions: Tensor,
    *,
    theta: float,
    interleaved: bool,
    factor: float,
    original_max: int,
    beta_fast: float,
    beta_slow: float,
    amplitude: float,
) -> Tensor:
    """x [R, ..., d] turned by positions [R]. `interleaved`: pairs (0,1),(2,3).. are turned, and the result is laid
    out in halves (all first members, then all second ones), as transformers does; otherwise pairs are (i, i+d/2)."""
    frequencies = inverse_frequencies(x.shape[-1], theta, factor, original_max, beta_fast, beta_slow)
    angles = positions.float()[:, None] * frequencies
    angles = angles.reshape(x.shape[0], *[1] * (x.dim() - 2), -1)
    cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
    x = x.float()
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


ROTARY = table(OpRecord("rope", rope, same_as(0)))
