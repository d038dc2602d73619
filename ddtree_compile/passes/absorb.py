"""MLA absorbed: attention over the latent keys themselves, the key and value projections folded into q and o.

    q . (W_uk c) = (W_uk^T q) . c        sum p (W_uv c) = W_uv (sum p c)

Few rows then read a cache of 576 values a token instead of unfolding every key. A prefill chunk of `UNFOLD_ROWS` rows
or more keeps the definition: unfolding costs rows-independent work and makes the scores three times cheaper. The pass
changes the order of rounding, so it is one of the lossy ones.
"""

from __future__ import annotations

from dataclasses import replace

from ddtree_compile.ir.graph import Attr, Graph, Op, TensorType, Value
from ddtree_compile.ir.ops import OPS
from ddtree_compile.spec import CompileSpec

UNFOLD_ROWS = 512


def absorb(graph: Graph, spec: CompileSpec) -> Graph:
    """Replace each MLA op that has fewer than `UNFOLD_ROWS` rows of a chunk, or tree rows."""
    made_by = {out.name: op for op in graph.ops for out in op.outs}
    ops: list[Op] = []
    for op in graph.ops:
        if op.kind == "mla_tree" or (op.kind == "mla_causal" and op.args[0].shape[0] < UNFOLD_ROWS):
            ops += _absorbed(op, made_by)
        else:
            ops.append(op)
    return graph.with_ops(tuple(ops))


def _absorbed(op: Op, made_by: dict[str, Op]) -> list[Op]:
    (out,) = op.outs
    prefix = out.name.rpartition(".")[0]
    ops: list[Op] = []

    def add(kind: str, *args: Value, names: tuple[str, ...], final: Value | None = None, **attrs: Attr) -> Value:
        bare = Op(kind, args, (), tuple(sorted(attrs.items())), op.scope)
        outs = tuple(
            final or replace(out, name=f"{prefix}.{name}", type=type_)
            for name, type_ in zip(names, OPS[kind].shape(bare), strict=True)
        )
        ops.append(replace(bare, outs=outs))
        return outs[0]

    tree = op.kind == "mla_tree"
    q, cache, *rest = op.args
    record, w_uk, w_uv, *where = rest if tree else (None, *rest)
    assert w_uk is not None and w_uv is not None
    content, turned = _halves(q, w_uk.shape[1], made_by, add)
    latent = add("head_linear", content, w_uk, names=("q_latent",), transpose=True)
    wide = add("cat", latent, turned, names=("q_absorbed",))
    tensors = (wide, cache, cache, *([record, record] if record else []), *where)
    part = add(
        "attend_tree" if tree else "attend_causal", *tensors, names=("part", "lse"), scale=op.attr("scale"),
        v_dim=w_uk.shape[2], splits=op.attr("splits"),
    )  # fmt: skip
    lse = ops[-1].outs[1]
    attended = add("merge", part, lse, names=("o_latent",), dtype=q.dtype)
    add("head_linear", attended, w_uv, names=("",), final=out)
    return ops


def _halves(q: Value, width: int, made_by: dict[str, Op], add) -> tuple[Value, Value]:  # noqa: ANN001
    """q [R, H, d + r] as content [R, H, d] and turned part: what was joined to make it, or cuts."""
    maker = made_by.get(q.name)
    if maker is not None and maker.kind == "cat" and maker.args[0].shape[-1] == width and len(maker.args) == 2:
        return maker.args[0], maker.args[1]
    return (
        add("cut", q, names=("q_content",), start=0, stop=width),
        add("cut", q, names=("q_turned",), start=width, stop=q.shape[-1]),
    )
