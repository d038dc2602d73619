"""Mixture of experts. Legend: R rows, E experts, k experts a row, K inputs, N outputs, D width."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from ddtree_compile.ir.graph import Op, TensorType
from ddtree_compile.ir.ops.record import Facts, OpRecord, table
from ddtree_compile.ir.ops.rowwise import ROWS, sigmoid


def route(
    logits: Tensor, bias: Tensor, row_sequence: Tensor, *, top_k: int, normalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The k experts of each row and their weights, as DeepSeek-V3 chooses them ("noaux_tc", one group).

    logits [R, E] fp32; the choice is by sigmoid(logits) + bias [E], the weights are of the unbiased scores, divided
    by their sum when `normalise`, times `scale`. Ties go to the lower id. ids int32 [R, k], -1 in a row that
    row_sequence [>=R] says is not valid; weights fp32 [R, k].
    """
    scores = sigmoid(logits)
    ids = (scores + bias.float()).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if normalise:
        total = weights[:, 0]
        for i in range(1, top_k):
            total = total + weights[:, i]
        weights = weights / (total[:, None] + 1e-20)
    valid = row_sequence[: logits.shape[0], None] >= 0
    return torch.where(valid, ids, -1).int(), torch.where(valid, weights * scale, 0.0)


def expert_linear(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Each row by the experts it is routed to: x [R, K] or [R, k, K], ids [R, k], w [E, N, K]: [R, k, N].

    An id of -1 gives zeros.
    """
    flat = ids.flatten()
    sizes = torch.bincount(flat + 1, minlength=w.shape[0] + 1).tolist()
    order = flat.argsort(stable=True)[sizes[0] :]
    used = [(expert, size) for expert, size in enumerate(sizes[1:]) if size]
    starts = list(accumulate((-(-size // ROWS) * ROWS for _, size in used), initial=0))
    # Where each routed row lies among blocks of `ROWS` rows, an expert's own beginning a new one.
    places = torch.tensor([start + i for start, (_, size) in zip(starts, used, strict=False) for i in range(size)])
    inputs = x.flatten(0, 1)[order] if x.dim() == 3 else x[order // ids.shape[1]]
    blocks = torch.zeros(starts[-1], x.shape[-1])
    made = torch.empty(starts[-1], w.shape[1])
    out = torch.zeros(*ids.shape, w.shape[1])
    if not used:
        return out
    blocks[places] = inputs.float()
    for (expert, _), start, stop in zip(used, starts, starts[1:], strict=False):
        by = w[expert].float().t()
        for at in range(start, stop, ROWS):
            torch.mm(blocks[at : at + ROWS], by, out=made[at : at + ROWS])
    out.view(-1, w.shape[1])[order] = made[places]
    return out


def combine(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of a row's experts, in the order of ids: x [R, k, D], ids, weights [R, k]: [R, D]."""
    out = torch.zeros(x.shape[0], x.shape[2])
    for slot in range(x.shape[1]):
        out = out + torch.where(ids[:, slot, None] >= 0, x[:, slot].float() * weights[:, slot, None], 0.0)
    return out


def _route_shape(op: Op) -> tuple[TensorType, ...]:
    top_k = op.attr("top_k")
    assert isinstance(top_k, int)
    shape = (op.args[0].shape[0], top_k)
    return TensorType(shape, "i32"), TensorType(shape, "f32")


def _expert_shape(op: Op) -> tuple[TensorType, ...]:
    x, ids, w = op.args
    return (TensorType((*ids.shape, w.shape[1]), x.dtype),)


def _combine_shape(op: Op) -> tuple[TensorType, ...]:
    x = op.args[0]
    return (TensorType((x.shape[0], x.shape[2]), x.dtype),)


def _expert_flops(op: Op, facts: Facts) -> float:
    _, ids, w = op.args
    return 2.0 * ids.type.numel * w.shape[1] * w.shape[2]


def _touched(op: Op, facts: Facts) -> float:
    """The part of the experts that a live row is routed to."""
    _, ids, w = op.args
    rows, top_k = ids.shape
    return facts.distinct_experts(rows, top_k, w.shape[0]) / w.shape[0]


MOE = table(
    OpRecord("route", route, _route_shape, tolerance=1e-5),
    OpRecord("expert_linear", expert_linear, _expert_shape, flops=_expert_flops, weight_share=_touched),
    OpRecord("combine", combine, _combine_shape),
)
