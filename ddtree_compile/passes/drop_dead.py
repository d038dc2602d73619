"""Ops whose results nobody sees are left out.

In: a legal graph. Out: the same graph without the ops that write only TEMP values which no kept op reads later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddtree_compile.ir.check import Writes, written_args
from ddtree_compile.ir.graph import Graph, Op, Space

if TYPE_CHECKING:
    from ddtree_compile.spec import CompileSpec


def drop_dead(graph: Graph, spec: CompileSpec) -> Graph:  # every pass takes the spec
    """The graph without dead ops. An op that writes nothing at all is kept: it is there for an effect (a barrier).
    Bodies stay as they are, for a kernel stands for a whole body."""
    return graph.with_ops(live_ops(graph.ops))


def live_ops(ops: tuple[Op, ...], writes: Writes = written_args) -> tuple[Op, ...]:
    """The ops that write outside TEMP, what they read, what that was made from, and so on; in their order."""
    needed: set[str] = set()
    kept: list[Op] = []
    for op in reversed(ops):
        written = [*op.outs, *(op.args[index] for index in writes(op))]
        if written and not any(value.space != Space.TEMP or value.name in needed for value in written):
            continue
        kept.append(op)
        needed.update(value.name for value in op.args)
    return tuple(reversed(kept))
