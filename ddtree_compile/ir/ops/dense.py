"""Dense ops on rows. Legend: R rows, K inputs, N outputs, V vocabulary, D width, H heads, d head width."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree_compile.ir.graph import Op, TensorType
from ddtree_compile.ir.ops.record import Facts, OpRecord, ShapeRule, same_as, table
from ddtree_compile.ir.ops.rowwise import matmul, matmul_each, per_row, sigmoid


def embed(ids: Tensor, rows: Tensor) -> Tensor:
    """rows [V, D] looked up by ids [R]: [R, D]."""
    return rows.index_select(0, ids.long())


def linear(x: Tensor, w: Tensor, *, dtype: str = "") -> Tensor:
    """x [..., K] times w [N, K] transposed: [..., N], in `dtype` when given, otherwise in x's."""
    return matmul(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[0])


def rms_norm(x: Tensor, gain: Tensor, *, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension."""
    rows = per_row(x)
    scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (rows * scale)[: x.numel() // x.shape[-1]].reshape(x.shape) * gain.float()


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, of one shape."""
    return a.float() + b.float()


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, element by element; silu(x) = x * sigmoid(x)."""
    return gate.float() * sigmoid(gate) * up.float()


def cut(x: Tensor, *, start: int, stop: int) -> Tensor:
    """x [..., start:stop]."""
    return x[..., start:stop]


def cat(*parts: Tensor) -> Tensor:
    """The parts side by side along the last dimension."""
    return torch.cat(parts, dim=-1)


def heads(x: Tensor, *, heads: int) -> Tensor:
    """x [R, H*d] seen as [R, H, d]."""
    return x.reshape(x.shape[0], heads, -1)


def flat(x: Tensor) -> Tensor:
    """x [R, H, d] seen as [R, H*d]."""
    return x.reshape(x.shape[0], -1)


def keep(x: Tensor) -> Tensor:
    """x as it is, in another space: how a target layer's hidden state is tapped for the drafter."""
    return x


def head_linear(x: Tensor, w: Tensor, *, transpose: bool = False) -> Tensor:
    """Each head by its own matrix: x [R, H, K] times w [H, N, K] transposed, or w [H, K, N] with `transpose`."""
    by = w.float() if transpose else w.float().transpose(1, 2)
    return matmul_each(x.transpose(0, 1), by).transpose(0, 1)


def _linear_shape(op: Op) -> tuple[TensorType, ...]:
    x, w = op.args
    dtype = dict(op.attrs).get("dtype") or x.dtype
    return (TensorType((*x.shape[:-1], w.shape[0]), str(dtype)),)


def _cut_shape(op: Op) -> tuple[TensorType, ...]:
    start, stop = op.attr("start"), op.attr("stop")
    assert isinstance(start, int) and isinstance(stop, int)
    return (TensorType((*op.args[0].shape[:-1], stop - start), op.args[0].dtype),)


def _cat_shape(op: Op) -> tuple[TensorType, ...]:
    first = op.args[0]
    return (TensorType((*first.shape[:-1], sum(a.shape[-1] for a in op.args)), first.dtype),)


def _heads_shape(op: Op) -> tuple[TensorType, ...]:
    rows, width = op.args[0].shape
    count = op.attr("heads")
    assert isinstance(count, int)
    return (TensorType((rows, count, width // count), op.args[0].dtype),)


def _flat_shape(op: Op) -> tuple[TensorType, ...]:
    rows, *rest = op.args[0].shape
    width = 1
    for size in rest:
        width *= size
    return (TensorType((rows, width), op.args[0].dtype),)


def _head_linear_shape(op: Op) -> tuple[TensorType, ...]:
    x, w = op.args
    width = w.shape[2] if dict(op.attrs).get("transpose") else w.shape[1]
    return (TensorType((*x.shape[:2], width), x.dtype),)


def _product_flops(op: Op, facts: Facts) -> float:
    x, w = op.args
    return 2.0 * x.type.numel * (w.type.numel / w.shape[-1])


def _head_flops(op: Op, facts: Facts) -> float:
    x, w = op.args
    return 2.0 * x.shape[0] * w.type.numel


def _looked_up(op: Op, facts: Facts) -> float:
    ids, rows = op.args
    return min(1.0, ids.type.numel / rows.shape[0])


_embed_shape: ShapeRule = lambda op: (TensorType((*op.args[0].shape, op.args[1].shape[1]), op.args[1].dtype),)  # noqa: E731

DENSE = table(
    OpRecord("embed", embed, _embed_shape, weight_share=_looked_up, tolerance=0.0),
    OpRecord("linear", linear, _linear_shape, flops=_product_flops),
    OpRecord("head_linear", head_linear, _head_linear_shape, flops=_head_flops),
    OpRecord("rms_norm", rms_norm, same_as(0)),
    OpRecord("add", add, same_as(0)),
    OpRecord("swiglu", swiglu, same_as(0)),
    OpRecord("cut", cut, _cut_shape, tolerance=0.0),
    OpRecord("cat", cat, _cat_shape, tolerance=0.0),
    OpRecord("heads", heads, _heads_shape, tolerance=0.0),
    OpRecord("flat", flat, _flat_shape, tolerance=0.0),
    OpRecord("keep", keep, same_as(0), tolerance=0.0),
)
