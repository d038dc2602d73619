"""Picking a token for each row: argmax, or a draw keyed by (request seed, position, token).

Legend: M rows, V vocabulary, S sequences. A draw never depends on slot, tree or round: the token at position p of a
request is argmax over tokens t of logit(t) / temperature + gumbel(seed, p, t), so speculation cannot change it.
Filters come in this order: temperature, top-k, top-p (renormalised after top-k), min-p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree_compile.ir.graph import Op, TensorType
from ddtree_compile.ir.ops.record import OpRecord, table
from ddtree_compile.ir.philox import philox

NUCLEUS_TOP_K = 1024  # top-p below 1 without a smaller top-k looks at this many tokens, on every executor


def gumbel(seed: int, position: int, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise for token ids [n] at a position, fp32.

    Word t % 4 of Philox4x32-10 with the seed's two halves as key and (t / 4, position, 0, 0) as counter, its upper 24
    bits taken as a uniform number in (0, 1).
    """
    tokens = tokens.long()
    groups, index = (tokens // 4).unique(return_inverse=True)
    words = torch.stack(philox(torch.tensor(seed), groups, position), dim=1)
    uniform = ((words[index, tokens % 4] >> 8).double() + 0.5) * 2.0**-24
    return -(-uniform.log()).log().float()


def argmax(scores: Tensor) -> int:
    """The index of the largest of scores [n], the lowest one on a tie."""
    return int((scores == scores.max()).nonzero()[0, 0])


def candidates(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Token ids that the filters leave of scaled logits [V], the best first; ties go to the lower id."""
    vocabulary = logits.shape[0]
    limit = top_k if top_k > 0 else vocabulary
    if top_p < 1.0:
        limit = min(limit, NUCLEUS_TOP_K)
    if limit >= vocabulary and top_p >= 1.0:
        ids = torch.arange(vocabulary)
    else:
        limit = min(limit, vocabulary)
        best = (logits >= logits.topk(limit).values[-1]).nonzero()[:, 0]
        ids = best[logits[best].sort(descending=True, stable=True).indices[:limit]]
    if top_p < 1.0:
        mass = logits[ids].softmax(0).cumsum(0)
        ids = ids[: int((mass < top_p).sum()) + 1]
    if min_p > 0.0:
        scores = logits[ids]
        ids = ids[scores >= scores.max() + torch.tensor(min_p).log()]
    return ids


def draw(logits: Tensor, temperature: float, seed: int, position: int, ids: Tensor) -> int:
    """One of `ids`, distributed as softmax(logits / temperature) over them; the argmax at temperature 0."""
    if temperature <= 0.0:
        return argmax(logits)
    return int(ids[argmax(logits[ids] / temperature + gumbel(seed, position, ids))])


def pick_greedy(logits: Tensor, row_sequence: Tensor) -> Tensor:
    """logits [M, V], row_sequence [M]: the largest logit's id of each valid row, int32 [M], -1 elsewhere."""
    picks = torch.full((logits.shape[0],), -1, dtype=torch.int32)
    for row, sequence in enumerate(row_sequence.tolist()):
        if sequence >= 0:
            picks[row] = argmax(logits[row])
    return picks


def pick_sample(
    logits: Tensor, row_sequence: Tensor, row_position: Tensor, temperature: Tensor, seed: Tensor
) -> Tensor:
    """As `pick_greedy`, drawn from softmax(logits / temperature) for the position after the row's.

    row_position [M]; temperature and seed [S] (temperature 0 is greedy).
    """
    every = torch.arange(logits.shape[1])
    picks = torch.full((logits.shape[0],), -1, dtype=torch.int32)
    for row, s in enumerate(row_sequence.tolist()):
        if s >= 0:
            place = int(row_position[row]) + 1
            picks[row] = draw(logits[row], float(temperature[s]), int(seed[s]), place, every)
    return picks


def pick_filter(
    logits: Tensor, row_sequence: Tensor, row_position: Tensor, temperature: Tensor, seed: Tensor, top_k: Tensor,
    top_p: Tensor, min_p: Tensor,
) -> Tensor:  # fmt: skip
    """As `pick_sample`, among the tokens that top_k, top_p and min_p [S] leave (0, 1 and 0 leave all)."""
    picks = torch.full((logits.shape[0],), -1, dtype=torch.int32)
    for row, s in enumerate(row_sequence.tolist()):
        if s < 0:
            continue
        heat = float(temperature[s])
        place = int(row_position[row]) + 1
        kept = torch.empty(0)
        if heat > 0.0:
            kept = candidates(logits[row] / heat, int(top_k[s]), float(top_p[s]), float(min_p[s]))
        picks[row] = draw(logits[row], heat, int(seed[s]), place, kept)
    return picks


def _picks(op: Op) -> tuple[TensorType, ...]:
    return (TensorType((op.args[0].shape[0],), "i32"),)


PICK = table(
    OpRecord("pick_greedy", pick_greedy, _picks, tolerance=0.0),
    OpRecord("pick_sample", pick_sample, _picks, tolerance=1e-5),
    OpRecord("pick_filter", pick_filter, _picks, tolerance=1e-5),
)
