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
    w = w.float().t()
    blocks = pad_rows(x.float()).split(ROWS)
    return torch.cat([torch.mm(block, w) for block in blocks])[:rows]


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in fp32. torch's own takes another path for the elements that do not fill a vector, so that an
    element's bits would depend on its place; its `exp` does not."""
    return 1.0 / (1.0 + (-x.float()).exp())


def pad_rows(x: Tensor) -> Tensor:
    """x [M, ...] with zero rows up to a multiple of `ROWS` (at least one block), contiguous."""
    missing = -x.shape[0] % ROWS if x.shape[0] else ROWS
    if not missing:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def per_row(x: Tensor) -> Tensor:
    """x [..., K] as fp32 [M, K] for a reduction along K, padded like `matmul`'s rows."""
    return pad_rows(x.float().reshape(-1, x.shape[-1]))
