"""Attention over a cache and a tree, in the order of positions.

Legend: S sequences, R rows, H query heads, G key heads (H a multiple of G), T cache slots, d key width, e value
width, P partial results. MLA's latent cache is a cache of G = 1 whose values are the first e features of its keys.

A row's keys are laid out by position and taken `KEYS` at a time, every product of one fixed shape: the bits of a row
do not depend on whether a key came from the cache or from the tree, nor on the rows beside it. The `attend_*` ops
give P partial results over equal ranges of positions with their log-sum-exp; `merge` joins them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree_compile.ir.graph import Op, TensorType
from ddtree_compile.ir.ops.record import Facts, OpRecord, table
from ddtree_compile.ir.ops.rowwise import matmul, matmul_each

KEYS = 64


@dataclass(frozen=True)
class Block:
    """`KEYS` consecutive positions: one set of keys for all rows, or one for each row (their own tree paths).

    k [1 or rows, KEYS, d] and v [1 or rows, KEYS, e + 1], whose last column is 1, so that it sums the weights.
    """

    k: Tensor
    v: Tensor

    def scores(self, q: Tensor) -> Tensor:
        """q [rows, share, d] against the block: [rows * share, KEYS]."""
        if len(self.k) == 1:
            return matmul(q.flatten(0, 1), self.k[0])
        return matmul_each(q, self.k.transpose(1, 2)).flatten(0, 1)

    def total(self, weights: Tensor, rows: int) -> Tensor:
        """weights [rows * share, KEYS] over the block's values, and their sum in a last column: [.., e + 1]."""
        if len(self.v) == 1:
            return matmul(weights.contiguous(), self.v[0].t())
        return matmul_each(weights.reshape(rows, -1, KEYS), self.v).flatten(0, 1)


def _blank(rows: int, count: int, d: int, e: int) -> tuple[Tensor, Tensor]:
    """k and v of `count` positions, zero. They are always filled by copying, so that strides and alignment, by which a
    BLAS may choose its kernel, are the same wherever the keys came from."""
    v = torch.zeros(rows, count, e + 1)
    v[..., e] = 1.0
    return torch.zeros(rows, count, d), v


def _cut(k: Tensor, v: Tensor) -> list[Block]:
    """k and v of whole blocks, as blocks."""
    return [Block(k[:, at : at + KEYS], v[:, at : at + KEYS]) for at in range(0, k.shape[1], KEYS)]


def _shared(*parts: tuple[Tensor, Tensor]) -> list[Block]:
    """Keys [n, d] and values [n, e] that all rows share, one part after another, zeros past the end."""
    count = _blocks(sum(len(k) for k, _ in parts)) * KEYS
    k, v = _blank(1, count, parts[0][0].shape[1], parts[0][1].shape[1])
    at = 0
    for keys, values in parts:
        k[0, at : at + len(keys)] = keys
        v[0, at : at + len(keys), :-1] = values
        at += len(keys)
    return _cut(k, v)


def _own(cached: tuple[Tensor, Tensor], tree: tuple[Tensor, Tensor], paths: list[list[int]]) -> list[Block]:
    """For each path: the cached keys [n, d] and values [n, e], then those of the path's rows of `tree`."""
    start, longest = len(cached[0]), max(map(len, paths))
    k, v = _blank(len(paths), _blocks(start + longest) * KEYS, cached[0].shape[1], cached[1].shape[1])
    nothing = len(tree[0])
    rows = torch.tensor([path + [nothing] * (longest - len(path)) for path in paths])
    k[:, :start], v[:, :start, :-1] = cached
    for into, of in ((k, tree[0]), (v[..., :-1], tree[1])):
        into[:, start : start + longest] = torch.cat([of, of.new_zeros(1, of.shape[1])])[rows]
    return _cut(k, v)


def _blocks(count: int) -> int:
    return -(-count // KEYS)


def _attend(q: Tensor, blocks: list[Block], seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [rows, share, d] over `blocks`; seen [rows, blocks * KEYS]. The normalised sum [rows * share, e] and its
    log-sum-exp [rows * share]; 0 and -inf where nothing is seen."""
    rows, share, _ = q.shape
    width = blocks[0].v.shape[2] - 1
    scores = torch.cat([block.scores(q) for block in blocks], dim=1) * scale
    scores = scores.masked_fill(~seen.repeat_interleave(share, 0), -torch.inf)
    top = scores.amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weights = (scores - top).exp()
    total = torch.zeros(rows * share, width + 1)
    for block, part in zip(blocks, weights.split(KEYS, dim=1), strict=True):
        total = total + block.total(part, rows)
    mass = total[:, width:]
    out = torch.where(mass > 0, total[:, :width] / mass, 0.0)
    return out, (top + mass.log())[:, 0]


def _partials(
    q: Tensor, by_group: list[list[Block]], seen: Tensor, scale: float, v_dim: int, splits: int, slots: int
) -> tuple[Tensor, Tensor]:
    """All heads of q [rows, H, d], in `splits` ranges of a cache of `slots`: part [rows, P, H, e], lse [rows, P, H]."""
    rows, count, _ = q.shape
    part = torch.zeros(rows, splits, count, v_dim)
    lse = torch.full((rows, splits, count), -torch.inf)
    share = count // len(by_group)
    span = -(-_blocks(slots) // splits)
    for group, blocks in enumerate(by_group):
        own = slice(group * share, (group + 1) * share)
        for split in range(splits):
            here = blocks[split * span : (split + 1) * span] if split < splits - 1 else blocks[split * span :]
            if not here:
                continue
            first = split * span * KEYS
            out, mass = _attend(
                q[:, own].float(), here, seen[:, first : first + len(here) * KEYS], scale
            )  # fmt: skip
            part[:, split, own] = out.reshape(rows, share, v_dim)
            lse[:, split, own] = mass.reshape(rows, share)
    return part, lse


def ancestors(bits: Tensor) -> list[int]:
    """The nodes set in one row of ancestor bits (int32 words, lowest bit first): root first, itself last."""
    words = [int(word) & 0xFFFFFFFF for word in bits.tolist()]
    return [32 * i + j for i, word in enumerate(words) for j in range(32) if word >> j & 1]


def _rows_of(row_sequence: Tensor, rows: int) -> dict[int, list[int]]:
    """Valid rows by sequence (an invalid one says -1)."""
    found: dict[int, list[int]] = {}
    for row, sequence in enumerate(row_sequence[:rows].tolist()):
        if sequence >= 0:
            found.setdefault(sequence, []).append(row)
    return found


def _empty(q: Tensor, splits: int, v_dim: int) -> tuple[Tensor, Tensor]:
    rows, count, _ = q.shape
    return torch.zeros(rows, splits, count, v_dim), torch.full((rows, splits, count), -torch.inf)


def attend_tree(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k_tree: Tensor, v_tree: Tensor, length: Tensor, row_sequence: Tensor,
    bits: Tensor, *, scale: float, v_dim: int, splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tree rows over their sequence's committed keys, then their ancestors' and their own, root first.

    q [R, H, d], k_cache [S, T, G, d], v_cache [S, T, G, >=e], k_tree [R, G, d], v_tree [R, G, >=e], length [S],
    row_sequence [>=R] (-1: not valid), bits [R, words]: part [R, P, H, e] and lse [R, P, H], fp32.
    """
    part, lse = _empty(q, splits, v_dim)
    nodes = q.shape[0] // k_cache.shape[0]
    for sequence, rows in _rows_of(row_sequence, q.shape[0]).items():
        start = int(length[sequence])
        whole = start // KEYS * KEYS
        paths = [[sequence * nodes + node for node in ancestors(bits[row])] for row in rows]
        by_group: list[list[Block]] = []
        for group in range(k_cache.shape[2]):
            k, v = k_cache[sequence, :start, group], v_cache[sequence, :start, group, :v_dim]
            tree = (k_tree[:, group], v_tree[:, group, :v_dim])
            by_group.append(_shared((k[:whole], v[:whole])) + _own((k[whole:], v[whole:]), tree, paths))
        lengths = torch.tensor([start + len(path) for path in paths])
        seen = torch.arange(len(by_group[0]) * KEYS) < lengths[:, None]
        part[rows], lse[rows] = _partials(q[rows], by_group, seen, scale, v_dim, splits, k_cache.shape[1])
    return part, lse


def attend_causal(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, row_sequence: Tensor, *, scale: float, v_dim: int,
    splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Prefill rows over their sequence's cache up to and with their own positions [R], already written."""
    part, lse = _empty(q, splits, v_dim)
    for sequence, rows in _rows_of(row_sequence, q.shape[0]).items():
        last = positions[rows].long()
        length = int(last.max()) + 1
        by_group = [
            _shared((k_cache[sequence, :length, group], v_cache[sequence, :length, group, :v_dim]))
            for group in range(k_cache.shape[2])
        ]
        seen = torch.arange(_blocks(length) * KEYS) <= last[:, None]
        part[rows], lse[rows] = _partials(q[rows], by_group, seen, scale, v_dim, splits, k_cache.shape[1])
    return part, lse


def attend_block(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k_block: Tensor, v_block: Tensor, length: Tensor, active: Tensor, *,
    scale: float, causal: bool, window: int, splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The drafter's block over its context, then over itself (both ways unless `causal`).

    q [R, H, d] and k_block, v_block [R, G, d] with R = S * block; caches [S, T, G, d]; length, active [S]. With
    `window` > 0 a row at position p sees context positions > p - window only.
    """
    v_dim = v_cache.shape[3]
    part, lse = _empty(q, splits, v_dim)
    block = q.shape[0] // k_cache.shape[0]
    for sequence in range(k_cache.shape[0]):
        if not active[sequence]:
            continue
        start = int(length[sequence])
        rows = slice(sequence * block, (sequence + 1) * block)
        count = _blocks(start + block)
        by_group = [
            _shared(
                (k_cache[sequence, :start, group], v_cache[sequence, :start, group]),
                (k_block[rows, group], v_block[rows, group]),
            )
            for group in range(k_cache.shape[2])
        ]
        own = start + torch.arange(block)[:, None]
        key = torch.arange(count * KEYS)
        seen = (key <= own) if causal else (key < start + block).expand(block, -1)
        if window:
            seen = seen & ((key > own - window) | (key >= start))
        part[rows], lse[rows] = _partials(q[rows], by_group, seen, scale, v_dim, splits, k_cache.shape[1] + block)
    return part, lse


def merge(part: Tensor, lse: Tensor, *, dtype: str) -> Tensor:
    """Partial results [R, P, H, e] with log-sum-exps [R, P, H] joined: [R, H, e]; 0 where nothing was seen."""
    top = lse.amax(dim=1, keepdim=True)
    weights = torch.where(lse > -torch.inf, (lse - top).exp(), 0.0)
    out = torch.zeros_like(part[:, 0])
    mass = torch.zeros_like(lse[:, 0])
    for split in range(part.shape[1]):
        out = out + part[:, split] * weights[:, split, :, None]
        mass = mass + weights[:, split]
    return torch.where(mass[..., None] > 0, out / mass[..., None], 0.0)


def _expanded(latent: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Latent keys [n, c + r] unfolded to each head's own: k [n, H, d + r], v [n, H, e]."""
    width = w_uk.shape[2]
    content, turned = latent[:, :width].contiguous(), latent[:, width:].float()
    k = torch.stack([torch.cat([matmul(content, w), turned], dim=1) for w in w_uk], dim=1)
    return k, torch.stack([matmul(content, w) for w in w_uv], dim=1)


def mla_tree(
    q: Tensor, cache: Tensor, tree: Tensor, w_uk: Tensor, w_uv: Tensor, length: Tensor, row_sequence: Tensor,
    bits: Tensor, *, scale: float, splits: int,
) -> Tensor:  # fmt: skip
    """MLA as it is defined, tree rows: latent keys are unfolded by w_uk [H, d, c] and w_uv [H, e, c], then attended.

    q [R, H, d + r], cache [S, T, 1, c + r], tree [R, 1, c + r]: [R, H, e]. The absorb pass turns it into
    attention over the latent keys themselves.
    """
    slots = int(length.max()) + 1
    k_cache, v_cache = zip(*(_expanded(one[:slots, 0], w_uk, w_uv) for one in cache.float()), strict=True)
    k_tree, v_tree = _expanded(tree[:, 0].float(), w_uk, w_uv)
    part, lse = attend_tree(
        q, torch.stack(k_cache), torch.stack(v_cache), k_tree, v_tree, length, row_sequence, bits,
        scale=scale, v_dim=w_uv.shape[1], splits=1,
    )  # fmt: skip
    return merge(part, lse, dtype="")


def mla_causal(
    q: Tensor, cache: Tensor, w_uk: Tensor, w_uv: Tensor, positions: Tensor, row_sequence: Tensor, *, scale: float,
    splits: int,
) -> Tensor:  # fmt: skip
    """MLA as it is defined, prefill rows of one sequence: see `mla_tree`."""
    out = torch.zeros(*q.shape[:2], w_uv.shape[1])
    for sequence, rows in _rows_of(row_sequence, q.shape[0]).items():
        length = int(positions[rows].max()) + 1
        k, v = _expanded(cache[sequence, :length, 0].float(), w_uk, w_uv)
        own = torch.zeros(len(rows), dtype=torch.int32)
        part, lse = attend_causal(
            q[rows], k[None], v[None], positions[rows], own, scale=scale, v_dim=w_uv.shape[1], splits=1
        )
        out[rows] = merge(part, lse, dtype="")
    return out


def _partial_shapes(op: Op) -> tuple[TensorType, ...]:
    rows, count, _ = op.args[0].shape
    attrs = dict(op.attrs)
    splits = int(str(attrs["splits"]))
    v_dim = int(str(attrs.get("v_dim", op.args[2].shape[3])))
    return TensorType((rows, splits, count, v_dim), "f32"), TensorType((rows, splits, count), "f32")


def _mla_shape(op: Op, w_uv: int) -> tuple[TensorType, ...]:
    rows, count, _ = op.args[0].shape
    return (TensorType((rows, count, op.args[w_uv].shape[1]), op.args[0].dtype),)


def _merge_shape(op: Op) -> tuple[TensorType, ...]:
    rows, _, count, v_dim = op.args[0].shape
    return (TensorType((rows, count, v_dim), str(op.attr("dtype"))),)


def _kv_bytes(op: Op, facts: Facts) -> float:
    """K/V of the committed tokens of the live sequences, once; a latent cache is one tensor, read once."""
    caches = {arg.name: arg for arg in op.args if arg.space == "state" and len(arg.shape) == 4}
    slot = sum(cache.type.nbytes / (cache.shape[0] * cache.shape[1]) for cache in caches.values())
    window = int(str(dict(op.attrs).get("window", 0)))
    context = min(facts.context, window) if window else facts.context
    return facts.live * context * slot


def _attend_flops(op: Op, facts: Facts) -> float:
    rows, count, d = op.args[0].shape
    v_dim = _partial_shapes(op)[0].shape[3]
    live = rows * facts.live / op.args[1].shape[0]
    return 2.0 * live * count * facts.context * (d + v_dim)


def _causal_flops(op: Op, facts: Facts) -> float:
    rows, count, d = op.args[0].shape
    return 2.0 * rows * count * (facts.context + rows / 2) * (d + _partial_shapes(op)[0].shape[3])


def _mla_flops(w_uk: int, causal: bool):  # noqa: ANN202 - a rule made for one argument position
    def flops(op: Op, facts: Facts) -> float:
        """The cheaper of unfolding every key and of absorbing the unfolding into the queries."""
        rows, count, d = op.args[0].shape
        uk, uv = op.args[w_uk], op.args[w_uk + 1]
        live = float(rows) if causal else rows * facts.live / op.args[1].shape[0]
        keys = facts.context + (rows / 2 if causal else 0)
        latent = op.args[1].shape[3]
        unfold = 2.0 * facts.context * (uk.type.numel + uv.type.numel) + 2.0 * live * count * keys * (d + uv.shape[1])
        absorb = 2.0 * live * (uk.type.numel + uv.type.numel) + 2.0 * live * count * keys * (latent + uk.shape[2])
        return min(unfold, absorb)

    return flops


ATTENTION = table(
    OpRecord("attend_tree", attend_tree, _partial_shapes, flops=_attend_flops, cache_bytes=_kv_bytes),
    OpRecord("attend_causal", attend_causal, _partial_shapes, flops=_causal_flops, cache_bytes=_kv_bytes),
    OpRecord("attend_block", attend_block, _partial_shapes, flops=_attend_flops, cache_bytes=_kv_bytes),
    OpRecord("merge", merge, _merge_shape),
    OpRecord("mla_tree", mla_tree, lambda op: _mla_shape(op, 4), flops=_mla_flops(3, False), cache_bytes=_kv_bytes),
    OpRecord("mla_causal", mla_causal, lambda op: _mla_shape(op, 3), flops=_mla_flops(2, True), cache_bytes=_kv_bytes),
)
