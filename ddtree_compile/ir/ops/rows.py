"""Which rows a segment works on: token ids, positions and validity, from STATE and IO.

Legend: S sequences, B1 = largest budget + 1 nodes (the root is node 0), R rows of this segment, M rows of the largest
segment, W words of ancestor bits, C rows of a prefill chunk, L1 = horizon + 1. A row that is not valid has
row_sequence -1, token 0 and position 0: it attends to nothing, is routed nowhere, writes nothing, is never picked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree_compile.ir.graph import Op, TensorType
from ddtree_compile.ir.ops.record import OpRecord, table


def _int(op: Op, name: str) -> int:
    value = op.attr(name)
    assert isinstance(value, int)
    return value


def _padded(rows: Tensor, count: int, fill: int) -> Tensor:
    out = torch.full((count,), fill, dtype=torch.int32)
    out[: rows.shape[0]] = rows
    return out


def block_rows(root: Tensor, length: Tensor, active: Tensor, *, block: int, mask: int) -> tuple[Tensor, Tensor]:
    """The drafter's block of each sequence: its root, then masks. ids and positions int32 [S * block]."""
    ids = torch.full((root.shape[0], block), mask, dtype=torch.int32)
    ids[:, 0] = root
    positions = length[:, None] + torch.arange(block, dtype=torch.int32)
    live = active[:, None] > 0
    return torch.where(live, ids, 0).flatten(), torch.where(live, positions, 0).flatten()


def draft_rows(x: Tensor, *, block: int) -> Tensor:
    """The rows of a block that predict a token: all but the anchor's. x [S * block, D]: [S * (block - 1), D]."""
    return x.reshape(-1, block, x.shape[1])[:, 1:].reshape(-1, x.shape[1])


def node_rows(
    tokens: Tensor, depths: Tensor, bits: Tensor, length: Tensor, active: Tensor, *, nodes: int, rows: int, slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The first `nodes` nodes of each sequence's tree as rows sequence * nodes + node.

    tokens, depths [S, B1], bits [S, B1, W], length, active [S]. Gives ids [R], positions [R], bits [R, W] for this
    segment, and for the later ones row_sequence and row_position [M = rows] and the number of rows a sequence [1].
    A row is valid when its sequence is active, its node exists and its position is a cache slot (below `slots`).
    """
    sequences = length.shape[0]
    positions = length[:, None] + depths[:, :nodes]
    valid = (active[:, None] > 0) & (positions < slots) & (bits[:, :nodes] != 0).any(-1)
    sequence = torch.where(valid, torch.arange(sequences, dtype=torch.int32)[:, None], -1)
    positions = torch.where(valid, positions, 0).flatten()
    return (
        torch.where(valid, tokens[:, :nodes], 0).flatten(),
        positions,
        bits[:, :nodes].flatten(0, 1),
        _padded(sequence.flatten(), rows, -1),
        _padded(positions, rows, 0),
        torch.tensor([nodes], dtype=torch.int32),
    )


def root_rows(
    root: Tensor, length: Tensor, active: Tensor, *, rows: int, slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One row a sequence, its root: what `node_rows` gives for a tree of one node. root, length, active [S]."""
    tokens, bits = root[:, None], torch.ones(root.shape[0], 1, 1, dtype=torch.int32)
    return node_rows(tokens, torch.zeros_like(tokens), bits, length, active, nodes=1, rows=rows, slots=slots)


def chunk_rows(tokens: Tensor, slot: Tensor, start: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A prefill chunk: tokens [C] at positions start.. of sequence `slot`, the first `count` of them valid.

    ids, positions and row_sequence, int32 [C].
    """
    index = torch.arange(tokens.shape[0], dtype=torch.int32)
    valid = index < count
    return (
        torch.where(valid, tokens, 0),
        torch.where(valid, start + index, 0),
        torch.where(valid, slot, -1).expand_as(index),
    )


def last_row(x: Tensor, count: Tensor) -> Tensor:
    """The last valid row of a chunk: x [C, D], count [1]: [1, D]."""
    return x[int(count) - 1 : int(count)]


def chunk_pick(slot: Tensor, start: Tensor, count: Tensor, *, rows: int) -> tuple[Tensor, Tensor]:
    """Rows for the pick after a prefill: row 0 is the chunk's last. row_sequence and row_position [M = rows]."""
    return _padded(slot, rows, -1), _padded(start + count - 1, rows, 0)


def write_chunk(x: Tensor, cache: Tensor, positions: Tensor, row_sequence: Tensor) -> tuple[()]:
    """Valid rows of x [C, G, d] into cache [S, T, G, d] at their sequence and position."""
    valid = row_sequence[: x.shape[0]] >= 0
    cache[row_sequence[: x.shape[0]][valid].long(), positions[valid].long()] = x[valid].to(cache.dtype)
    return ()


def gather_rows(x: Tensor, path_rows: Tensor) -> Tensor:
    """Rows of x [M, D] named by path_rows [S, L1]: [S * L1, D], zeros where it says -1."""
    rows = path_rows.flatten().long()
    return torch.where(rows[:, None] >= 0, x[rows.clamp(min=0)].float(), 0.0)


def path_positions(length: Tensor, accepted: Tensor, *, width: int) -> tuple[Tensor, Tensor]:
    """Where an accepted path goes: positions and row_sequence int32 [S * width], valid for the first accepted[s]."""
    index = torch.arange(width, dtype=torch.int32)
    valid = index < accepted[:, None]
    sequence = torch.arange(length.shape[0], dtype=torch.int32)[:, None]
    return (
        torch.where(valid, length[:, None] + index, 0).flatten(),
        torch.where(valid, sequence, -1).flatten(),
    )


def _types(dtype: str, *shapes: tuple[int, ...]) -> tuple[TensorType, ...]:
    return tuple(TensorType(shape, dtype) for shape in shapes)


def _block_shape(op: Op) -> tuple[TensorType, ...]:
    rows = (op.args[0].shape[0] * _int(op, "block"),)
    return _types("i32", rows, rows)


def _draft_shape(op: Op) -> tuple[TensorType, ...]:
    rows, width = op.args[0].shape
    block = _int(op, "block")
    return (TensorType((rows // block * (block - 1), width), op.args[0].dtype),)


def _node_types(sequences: int, nodes: int, words: int, rows: int) -> tuple[TensorType, ...]:
    here = sequences * nodes
    return _types("i32", (here,), (here,), (here, words), (rows,), (rows,), (1,))


def _chunk_shape(op: Op) -> tuple[TensorType, ...]:
    return _types("i32", *[op.args[0].shape] * 3)


def _last_shape(op: Op) -> tuple[TensorType, ...]:
    return (TensorType((1, op.args[0].shape[1]), op.args[0].dtype),)


def _gather_shape(op: Op) -> tuple[TensorType, ...]:
    x, path = op.args
    return (TensorType((path.type.numel, x.shape[1]), x.dtype),)


def _path_shape(op: Op) -> tuple[TensorType, ...]:
    return _types("i32", *[(op.args[0].shape[0] * _int(op, "width"),)] * 2)


ROWS_TABLE = table(
    OpRecord("block_rows", block_rows, _block_shape, tolerance=0.0),
    OpRecord("draft_rows", draft_rows, _draft_shape, tolerance=0.0),
    OpRecord(
        "node_rows",
        node_rows,
        lambda op: _node_types(op.args[0].shape[0], _int(op, "nodes"), op.args[2].shape[2], _int(op, "rows")),
        tolerance=0.0,
    ),
    OpRecord(
        "root_rows", root_rows, lambda op: _node_types(op.args[0].shape[0], 1, 1, _int(op, "rows")), tolerance=0.0
    ),
    OpRecord("chunk_rows", chunk_rows, _chunk_shape, tolerance=0.0),
    OpRecord("last_row", last_row, _last_shape, tolerance=0.0),
    OpRecord("chunk_pick", chunk_pick, lambda op: _types("i32", *[(_int(op, "rows"),)] * 2), tolerance=0.0),
    OpRecord("write_chunk", write_chunk, lambda op: (), writes=(1,), tolerance=0.0),
    OpRecord("gather_rows", gather_rows, _gather_shape, tolerance=0.0),
    OpRecord("path_positions", path_positions, _path_shape, tolerance=0.0),
)
