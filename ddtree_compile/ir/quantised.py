"""A weight as int4 codes and scales, before any layout: what a recipe yields for a quantised linear.

N output features, K inputs; every `group` inputs share a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Quantised:
    """`codes` int8 [..., N, K] in -8 .. 7 and `scales` [..., N, K / group] in bf16 or f32."""

    codes: torch.Tensor
    scales: torch.Tensor
    group: int

    def __post_init__(self) -> None:
        *lead, k = self.codes.shape
        if k % self.group:
            raise ValueError(f"{k} inputs are not a multiple of the group size {self.group}")
        expected = (*lead, k // self.group)
        if tuple(self.scales.shape) != expected:
            raise ValueError(f"scales have shape {tuple(self.scales.shape)}, expected {expected}")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    def dequantise(self) -> torch.Tensor:
        """Codes times scales in the scales' dtype: one product a weight, rounded once, as in compressed-tensors."""
        scales = self.scales.unsqueeze(-1)
        codes = self.codes.view(*self.scales.shape, self.group).to(scales.dtype)
        return (codes * scales).view(self.codes.shape)

    def cut(self, dim: int, start: int, stop: int) -> Quantised:
        """[start, stop) along `dim`; along K only whole groups (ValueError otherwise)."""
        last = dim in (-1, self.codes.dim() - 1)
        if last and (start % self.group or stop % self.group):
            raise ValueError(f"cannot cut inputs {start} to {stop}: scales cover groups of {self.group}")
        scale = self.group if last else 1
        return Quantised(
            self.codes.narrow(dim, start, stop - start).contiguous(),
            self.scales.narrow(dim, start // scale, (stop - start) // scale).contiguous(),
            self.group,
        )

    def view(self, shape: tuple[int, ...]) -> Quantised:
        """Reshaped, row-major; the inputs must stay the last dimension (ValueError otherwise)."""
        if shape[-1] != self.shape[-1]:
            raise ValueError(f"cannot view {self.shape} as {shape}: the last dimension holds the groups")
        scales = self.scales.reshape(*shape[:-1], self.scales.shape[-1])
        return Quantised(self.codes.reshape(shape), scales, self.group)

    @staticmethod
    def cat(parts: Sequence[Quantised], dim: int) -> Quantised:
        """The parts side by side along `dim`; ValueError when their groups differ."""
        group = _one_group(parts)
        codes, scales = [part.codes for part in parts], [part.scales for part in parts]
        return Quantised(torch.cat(codes, dim), torch.cat(scales, dim), group)

    @staticmethod
    def stack(parts: Sequence[Quantised]) -> Quantised:
        """The parts along a new first dimension; ValueError when their groups differ."""
        group = _one_group(parts)
        codes, scales = [part.codes for part in parts], [part.scales for part in parts]
        return Quantised(torch.stack(codes), torch.stack(scales), group)


def quantise(dense: torch.Tensor, group: int) -> Quantised:
    """Symmetric int4 of a dense [..., N, K]: scale = absmax / 7.5 of a group, in bf16; codes rounded and clamped.

    compressed-tensors' quantiser. A group of zeros gets scale 1. The work is done one [N, K] matrix at a time.
    """
    *lead, n, k = dense.shape
    if k % group:
        raise ValueError(f"{k} inputs are not a multiple of the group size {group}")
    codes = torch.empty(dense.shape, dtype=torch.int8, device=dense.device)
    scales = torch.empty((*lead, n, k // group), dtype=torch.bfloat16, device=dense.device)
    matrices = zip(dense.reshape(-1, n, k), codes.view(-1, n, k), scales.view(-1, n, k // group), strict=True)
    for matrix, code, scale in matrices:
        groups = matrix.to(torch.float32).view(n, k // group, group)
        absmax = groups.abs().amax(-1)
        scale.copy_(torch.where(absmax == 0, 1.0, absmax / 7.5))
        code.copy_((groups / scale.to(torch.float32).unsqueeze(-1)).round().clamp(-8, 7).view(n, k))
    return Quantised(codes, scales, group)


def _one_group(parts: Sequence[Quantised]) -> int:
    groups = {part.group for part in parts}
    if len(groups) != 1:
        raise ValueError(f"parts with group sizes {sorted(groups)} cannot be joined")
    return groups.pop()
