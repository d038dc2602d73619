"""MLA absorbed: attention over the latent keys themselves, the key and value projections folded into q and o.

    q . (W_uk c) = (W_uk^T q) . c        sum p (W_uv c) = W_uv (sum p c)

Few rows then read a cache of 576 values a token instead of unfolding every key. On a GPU a prefill chunk of
`UNFOLD_ROWS` rows or more keeps the definition: unfolding costs rows-independent work and makes the scores three times
cheaper. On a CPU every segment is absorbed, since there a prompt's bits must not depend on how it was cut into chunks.
The pass changes the order of rounding, so it is one of the lossy ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ddtree_compile.ir.graph import Attr, Graph, Op, Value
from ddtree_compile.ir.ops import OPS
from ddtree_compile.spec import CompileSpec

UNFOLD_ROWS = 512


def absorb(graph: Graph, spec: CompileSpec) -> Graph:
    """Replace each MLA op, but for long chunks on a GPU."""
    limit = math.inf if spec.machine.gpu == "cpu" else UNFOLD_ROWS
    made_by = {out.name: op for op in graph.ops for out in op.outs}
    ops: list[Op] = []
    for op in graph.ops:
        if op.kind == "mla_tree" or (op.kind == "mla_causal" and op.args[0].shape[0] < limit):
            ops += _absorbed(op, made_by)
        else:
            ops.append(op)
    return graph.with_ops(tuple(ops))


@dataclass
class _Writer:
    """Adds ops in the place of `op`, named and scoped like it."""

    op: Op
    ops: list[Op] = field(default_factory=list[Op])

    def add(self, kind: str, *args: Value, outs: tuple[str | Value, ...], **attrs: Attr) -> tuple[Value, ...]:
        """An op whose outs get the names `outs`, or are the values given."""
        like = self.op.outs[0]
        bare = Op(kind, args, (), tuple(sorted(attrs.items())), self.op.scope)
        prefix = like.name.rpartition(".")[0]
        made = tuple(
            replace(like, name=f"{prefix}.{out}", type=type_) if isinstance(out, str) else out
            for out, type_ in zip(outs, OPS[kind].shape(bare), strict=True)
        )
        self.ops.append(replace(bare, outs=made))
        return made


def _absorbed(op: Op, made_by: dict[str, Op]) -> list[Op]:
    """The absorbed form of an MLA op."""
    writer = _Writer(op)
    if op.kind == "mla_tree":
        q, cache, record, w_uk, w_uv, *where = op.args
        kind, keys = "attend_tree", (cache, cache, record, record)
    else:
        q, cache, w_uk, w_uv, *where = op.args
        kind, keys = "attend_causal", (cache, cache)
    content, turned = _halves(writer, q, w_uk.shape[1], made_by)
    (latent,) = writer.add("head_linear", content, w_uk, outs=("q_latent",), transpose=True)
    (query,) = writer.add("cat", latent, turned, outs=("q_absorbed",))
    attrs = {"scale": op.attr("scale"), "v_dim": w_uk.shape[2], "splits": op.attr("splits")}
    partial = writer.add(kind, query, *keys, *where, outs=("part", "lse"), **attrs)
    (attended,) = writer.add("merge", *partial, outs=("o_latent",), dtype=q.dtype)
    writer.add("head_linear", attended, w_uv, outs=op.outs)
    return writer.ops


def _halves(writer: _Writer, q: Value, width: int, made_by: dict[str, Op]) -> tuple[Value, Value]:
    """q [R, H, d + r] as content [R, H, d] and turned part: what was joined to make it, or cuts."""
    maker = made_by.get(q.name)
    if maker is not None and maker.kind == "cat" and maker.args[0].shape[-1] == width and len(maker.args) == 2:
        return maker.args[0], maker.args[1]
    (content,) = writer.add("cut", q, outs=("q_content",), start=0, stop=width)
    (turned,) = writer.add("cut", q, outs=("q_turned",), start=width, stop=q.shape[-1])
    return content, turned
