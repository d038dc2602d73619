"""Row invariance on a CPU: every product is made of calls of one fixed shape.

A BLAS may choose another kernel, and so another order of summation, for another number of rows. Here rows are taken
`ROWS` at a time, the last block padded with zeros, so that a row's bits do not depend on what stands beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 16


def matmul(x: Tensor, w: Tensor) -> Tensor:
    """x [M, K] times w [N, K] transposed, fp32 [M, N], `ROWS` rows a call."""
    rows = x.shape[0]
    x, w = pad_rows(x.float()), w.float().t()
    if x.shape[0] == ROWS:
        return torch.mm(x, w)[:rows]
    out = x.new_empty(x.shape[0], w.shape[1])
    for start in range(0, x.shape[0], ROWS):
        torch.mm(x[start : start + ROWS], w, out=out[start : start + ROWS])
    return out[:rows]


def matmul_each(x: Tensor, w: Tensor) -> Tensor:
    """x [B, M, K] by matrices of their own, w fp32 [B, K, N]: fp32 [B, M, N], in the same calls as `matmul`'s."""
    count, rows, _ = x.shape
    padded = max(1, -(-rows // ROWS)) * ROWS
    blocks = x.new_zeros(count, padded, x.shape[2], dtype=torch.float32)
    blocks[:, :rows] = x
    out = blocks.new_empty(count, padded, w.shape[2])
    parts = (blocks.view(count, -1, ROWS, x.shape[2]), out.view(count, -1, ROWS, w.shape[2]))
    for i in range(padded // ROWS):
        for block, by, into in zip(parts[0][:, i].unbind(), w.unbind(), parts[1][:, i].unbind(), strict=True):
            torch.mm(block, by, out=into)
    return out[:, :rows]


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in fp32. torch's own takes another path for the elements that do not fill a vector, so that an
    element's bits would depend on its place; its `exp` does not."""
    return 1.0 / (1.0 + (-x.float()).exp())


def pad_rows(x: Tensor) -> Tensor:
    """x [M, ...] with zero rows up to a multiple of `ROWS` (at least one block), contiguous."""
    rows = x.shape[0]
    padded = max(1, -(-rows // ROWS)) * ROWS
    if padded == rows:
        return x.contiguous()
    out = x.new_zeros(padded, *x.shape[1:])
    out[:rows] = x
    return out


def per_row(x: Tensor) -> Tensor:
    """x [..., K] as fp32 [M, K] for a reduction along K, padded like `matmul`'s rows."""
    return pad_rows(x.float().reshape(-1, x.shape[-1]))
