"""Walking the picked path and committing it to STATE.

Legend: S sequences, B1 nodes, M rows, L1 = horizon + 1, T cache slots, N stop tokens. The last emitted token of a
sequence is its root: known, not yet run through the target. A path of n rows emits n tokens, one picked at each.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from ddtree_compile.ir.graph import Op, TensorType
from ddtree_compile.ir.ops.record import OpRecord, table

STOPS = 16  # stop tokens a sequence


class Finish(IntEnum):
    """Why a sequence ended, as the device says it."""

    NONE = 0
    STOP = 1  # a stop token was emitted
    LIMIT = 2  # as many tokens as asked for
    CONTEXT = 3  # the cache is full


def _verdict(emitted: list[int], remaining: int, stops: set[int], length: int, slots: int) -> Finish:
    """Whether a sequence is over after `emitted`, with `length` tokens committed."""
    if emitted[-1] in stops:
        return Finish.STOP
    if len(emitted) >= remaining:
        return Finish.LIMIT
    return Finish.CONTEXT if length >= slots else Finish.NONE


def walk(
    picks: Tensor, tokens: Tensor, parents: Tensor, row_sequence: Tensor, nodes: Tensor, length: Tensor, active: Tensor,
    remaining: Tensor, stops: Tensor, *, width: int, slots: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Follow the picks down the tree: from the root, to the child whose token was picked, while there is one.

    picks, row_sequence [M], tokens, parents [S, B1], nodes [1] (rows a sequence), length, active, remaining [S],
    stops [S, N] (-1: none). Ends early at a stop token and after `remaining` tokens. Gives path_rows [S, width] (-1
    past the end), accepted [S] (rows on the path), emitted [S, width] (the tokens picked there), finish [S].
    """
    sequences, count = length.shape[0], int(nodes)
    path_rows = torch.full((sequences, width), -1, dtype=torch.int32)
    emitted = torch.full((sequences, width), -1, dtype=torch.int32)
    accepted = torch.zeros(sequences, dtype=torch.int32)
    finish = torch.zeros(sequences, dtype=torch.int32)
    for s in range(sequences):
        if not active[s]:
            continue
        children = {
            (int(parents[s, n]), int(tokens[s, n])): n for n in range(1, count) if row_sequence[s * count + n] >= 0
        }
        ends = set(stops[s].tolist()) - {-1}
        path, said = [0], [int(picks[s * count])]
        while said[-1] not in ends and len(said) < int(remaining[s]) and (path[-1], said[-1]) in children:
            path.append(children[path[-1], said[-1]])
            said.append(int(picks[s * count + path[-1]]))
        path_rows[s, : len(path)] = torch.tensor(path, dtype=torch.int32) + s * count
        emitted[s, : len(said)] = torch.tensor(said, dtype=torch.int32)
        accepted[s] = len(path)
        finish[s] = _verdict(said, int(remaining[s]), ends, int(length[s]) + len(path), slots)
    return path_rows, accepted, emitted, finish


def commit_rows(path_rows: Tensor, accepted: Tensor, length: Tensor, tree: Tensor, cache: Tensor) -> tuple[()]:
    """Copy the accepted rows of tree [M, G, d] into cache [S, T, G, d], at the positions after `length`.

    path_rows [S, L1], accepted, length [S].
    """
    for s, count in enumerate(accepted.tolist()):
        start = int(length[s])
        cache[s, start : start + count] = tree[path_rows[s, :count].long()]
    return ()


def advance(
    accepted: Tensor, emitted: Tensor, length: Tensor, root: Tensor, remaining: Tensor, active: Tensor, finish: Tensor
) -> tuple[()]:
    """Move on: length += accepted, remaining -= accepted, root = the last emitted token; a finished sequence rests.

    accepted, length, root, remaining, active, finish [S], emitted [S, L1].
    """
    for s, count in enumerate(accepted.tolist()):
        if count:
            root[s] = emitted[s, count - 1]
    length += accepted
    remaining -= accepted
    active *= (finish == Finish.NONE).int()
    return ()


def seat(
    picks: Tensor, slot: Tensor, start: Tensor, count: Tensor, stops: Tensor, length: Tensor, root: Tensor,
    remaining: Tensor, active: Tensor, *, width: int, slots: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """After the last prefill chunk: the sequence's length, its first token as the root, and whether it is over.

    picks [M] (row 0), slot, start, count [1], stops [S, N], length, root, remaining, active [S]. Gives accepted [S],
    emitted [S, width] and finish [S] as `walk` does, with one token for this sequence and none for the others.
    """
    s, token = int(slot), int(picks[0])
    accepted = torch.zeros_like(length)
    finish = torch.zeros_like(length)
    emitted = torch.full((length.shape[0], width), -1, dtype=torch.int32)
    length[s] = start + count
    finish[s] = _verdict([token], int(remaining[s]), set(stops[s].tolist()) - {-1}, int(length[s]), slots)
    accepted[s], emitted[s, 0] = 1, token
    root[s] = token
    remaining[s] -= 1
    active[s] = int(finish[s] == Finish.NONE)
    return accepted, emitted, finish


def _report(sequences: int, width: int) -> tuple[TensorType, ...]:
    each = TensorType((sequences,), "i32")
    return each, TensorType((sequences, width), "i32"), each


def _width(op: Op) -> int:
    width = op.attr("width")
    assert isinstance(width, int)
    return width


def _walk_shape(op: Op) -> tuple[TensorType, ...]:
    sequences = op.args[5].shape[0]
    return (TensorType((sequences, _width(op)), "i32"), *_report(sequences, _width(op)))


COMMIT = table(
    OpRecord("walk", walk, _walk_shape, tolerance=0.0),
    OpRecord("commit_rows", commit_rows, lambda op: (), writes=(4,), tolerance=0.0),
    OpRecord("advance", advance, lambda op: (), writes=(2, 3, 4, 5), tolerance=0.0),
    OpRecord("seat", seat, lambda op: _report(op.args[5].shape[0], _width(op)), writes=(5, 6, 7, 8), tolerance=0.0),
)
