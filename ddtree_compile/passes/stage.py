"""Which ops may run at once: every op gets a stage, and ops of one stage have nothing to do with each other.

In: a legal graph. Out: the same ops with `stage` set, sorted by it. An op runs as early as its hazards allow, unless
running later costs no stage and keeps less memory alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddtree_compile.ir.check import Writes, written_args
from ddtree_compile.ir.graph import Graph, Op, Space, Value
from ddtree_compile.passes.buffers import lifetimes, lower_bound

if TYPE_CHECKING:
    from ddtree_compile.spec import CompileSpec


def dependencies(graph: Graph, writes: Writes = written_args) -> tuple[tuple[int, ...], ...]:
    """For each op the indices of the earlier ops that must end before it starts, rising: it reads what they wrote,
    or writes what they read or wrote. By name, over all spaces. Those implied by others may be left out."""
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    found: list[tuple[int, ...]] = []
    for index, op in enumerate(graph.ops):
        before: set[int] = set()
        written = {value.name for value in op.outs} | {op.args[i].name for i in writes(op)}
        for value in op.args:
            if value.name in writer:
                before.add(writer[value.name])
        for name in written:
            if name in writer:
                before.add(writer[name])
            before.update(readers.get(name, ()))
        for value in op.args:
            readers.setdefault(value.name, []).append(index)
        for name in written:
            writer[name] = index
            readers[name] = []
        found.append(tuple(sorted(before)))
    return tuple(found)


def stage(graph: Graph, spec: CompileSpec) -> Graph:  # every pass takes the spec
    """`graph` with stages 0, 1, ..., sorted by them; ops of one stage stay in their order. The number of stages is the
    least that hazards allow."""
    before = dependencies(graph)
    early = _earliest(before)
    # Moving an op also keeps its arguments longer, so that the peaks decide.
    candidates = [early, _late_where_larger(graph, before, early)]
    return min((_with_stages(graph, it) for it in candidates), key=lambda staged: lower_bound(lifetimes(staged)))


def _earliest(before: Sequence[Sequence[int]]) -> list[int]:
    stages: list[int] = []
    for earlier in before:
        stages.append(max((stages[i] + 1 for i in earlier), default=0))
    return stages


def _late_where_larger(graph: Graph, before: Sequence[Sequence[int]], early: Sequence[int]) -> list[int]:
    """The stages with ops whose TEMP outs outweigh their TEMP arguments moved to just before their first user."""
    stages = list(early)
    latest = [max(early, default=0)] * len(stages)
    for index in reversed(range(len(stages))):
        op = graph.ops[index]
        if _temp_bytes(op.outs) > _temp_bytes(op.args):
            stages[index] = latest[index]
        for i in before[index]:
            latest[i] = min(latest[i], stages[index] - 1)
    return stages


def _temp_bytes(values: tuple[Value, ...]) -> int:
    return sum(value.type.nbytes for value in {value for value in values if value.space == Space.TEMP})


def _with_stages(graph: Graph, stages: Sequence[int]) -> Graph:
    ops: list[Op] = [op.at(stage) for op, stage in zip(graph.ops, stages, strict=True)]
    return graph.with_ops(tuple(sorted(ops, key=lambda op: op.stage)))
