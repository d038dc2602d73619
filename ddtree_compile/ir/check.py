"""Legality: what every graph must hold before and after each pass.

In: a graph. Out: nothing, or `IllegalGraph` with the op's scope, the value, and what is wrong. `written_args` says
which arguments an op writes in place; the stage pass and drop_dead ask it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ddtree_compile.ir.graph import DTYPE_BYTES, Attr, Graph, Op, Space, TensorType, Value
from ddtree_compile.ir.ops import OPS
from ddtree_compile.ir.ops.record import OpRecord

Writes = Callable[[Op], tuple[int, ...]]


class IllegalGraph(ValueError):  # noqa: N818  # a graph can be illegal; the word says more than Error
    """A graph that cannot be run as it stands: which op, which value, what is wrong."""


def written_args(op: Op, records: Mapping[str, OpRecord] = OPS) -> tuple[int, ...]:
    """Indices of the arguments that `op` writes in place: its record's, or for a fused op those of its body's ops.
    IllegalGraph on a kind that no record has."""
    if not op.body:
        if op.kind not in records:
            raise _illegal(op, "no record has this kind, and it has no body")
        return records[op.kind].writes
    names = {part.args[index].name for part in op.body for index in written_args(part, records)}
    return tuple(index for index, value in enumerate(op.args) if value.name in names)


def check_graph(graph: Graph, records: Mapping[str, OpRecord] = OPS) -> None:
    """Raise IllegalGraph unless every TEMP value is defined once, before it is read; a name means one value; WEIGHT is
    never written; outs have their records' types; bodies hold to the same with their op's values; and stages, where
    set, put every op behind what it depends on."""
    _check_ops(graph.ops, _Scope(records))
    _check_stages(graph, records)


@dataclass(slots=True)
class _Scope:
    """What is known at a point of a graph or a body. `owner` is the fused op whose body it is."""

    records: Mapping[str, OpRecord]
    owner: Op | None = None
    values: dict[str, Value] = field(default_factory=dict[str, Value])
    defined: set[str] = field(default_factory=set[str])
    seen_types: set[object] = field(default_factory=set[object])


def _illegal(op: Op, what: str, value: Value | None = None) -> IllegalGraph:
    where = f"{op.scope} ({op.kind})" if op.scope else op.kind
    return IllegalGraph(f"{where}: {value.name}: {what}" if value else f"{where}: {what}")


def _check_ops(ops: tuple[Op, ...], scope: _Scope) -> None:
    for op in ops:
        _check_values(op, scope)
        _check_reads(op, scope)
        _check_writes(op, scope)
        if op.body:
            _check_body(op, scope)
        else:
            _check_types(op, scope)


def _check_values(op: Op, scope: _Scope) -> None:
    for value in (*op.args, *op.outs):
        known = scope.values.get(value.name)
        if known is value:
            continue
        if value.dtype not in DTYPE_BYTES:
            raise _illegal(op, f"{value.dtype} is no dtype", value)
        if any(size < 0 for size in value.shape):
            raise _illegal(op, f"the shape {value.shape} has a negative size", value)
        if known is None:
            scope.values[value.name] = value
        elif known != value:
            raise _illegal(op, f"is {value.type} in {value.space} here and {known.type} in {known.space} before", value)


def _check_reads(op: Op, scope: _Scope) -> None:
    for value in op.args:
        if value.space == Space.TEMP and value.name not in scope.defined:
            raise _illegal(op, "read before it is written", value)
        if scope.owner and value.space != Space.TEMP and value.name not in {v.name for v in scope.owner.values}:
            raise _illegal(op, f"read in the body of {scope.owner.kind}, which does not list it as an argument", value)


def _check_writes(op: Op, scope: _Scope) -> None:
    for index in written_args(op, scope.records):
        if not 0 <= index < len(op.args):
            raise _illegal(op, f"writes argument {index} and has only {len(op.args)}")
        if op.args[index].space == Space.WEIGHT:
            raise _illegal(op, "a weight is written in place", op.args[index])
    for place, value in enumerate(op.outs):
        if value.space == Space.WEIGHT:
            raise _illegal(op, "a weight is written", value)
        if any(other.name == value.name for other in op.outs[:place]):
            raise _illegal(op, "is twice an out of one op", value)
        if value.space == Space.TEMP and value.name in scope.defined:
            raise _illegal(op, "defined a second time", value)
        if scope.owner and value.space != Space.TEMP and value.name not in {v.name for v in scope.owner.outs}:
            raise _illegal(op, f"written in the body of {scope.owner.kind}, which does not list it as an out", value)
        scope.defined.add(value.name)


def _check_types(op: Op, scope: _Scope) -> None:
    # Layers repeat: an op whose types and attributes passed once passes again.
    key: tuple[str, tuple[TensorType, ...], tuple[TensorType, ...], tuple[tuple[str, Attr], ...]] = (
        op.kind,
        tuple(value.type for value in op.args),
        tuple(value.type for value in op.outs),
        op.attrs,
    )
    if key in scope.seen_types:
        return
    try:
        types = scope.records[op.kind].shape(op)
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise _illegal(op, f"the shape rule refuses its arguments: {error}") from error
    if len(types) != len(op.outs):
        raise _illegal(op, f"has {len(op.outs)} outs; its record makes {len(types)}")
    for value, expected in zip(op.outs, types, strict=True):
        if value.type != expected:
            raise _illegal(op, f"is {value.type}; its record makes {expected}", value)
    scope.seen_types.add(key)


def _check_body(op: Op, outer: _Scope) -> None:
    """A body is a graph whose inputs are the op's arguments; what else it defines is its own, but for the outs."""
    values = {value.name: value for value in op.values}
    inner = _Scope(outer.records, op, values, {value.name for value in op.args}, outer.seen_types)
    _check_ops(op.body, inner)
    written = {value.name for part in op.body for value in part.outs}
    for value in op.outs:
        if value.name not in written:
            raise _illegal(op, "is an out that no op of the body writes", value)


def _check_stages(graph: Graph, records: Mapping[str, OpRecord]) -> None:
    unset = [op for op in graph.ops if op.stage < 0]
    if len(unset) == len(graph.ops):
        return
    if unset:
        raise _illegal(unset[0], "has no stage, while other ops have one")
    write_stage: dict[str, int] = {}
    read_stage: dict[str, int] = {}  # the last since the last write
    for op in graph.ops:
        written = [*op.outs, *(op.args[index] for index in written_args(op, records))]
        for value in op.args:
            if write_stage.get(value.name, -1) >= op.stage:
                raise _illegal(op, f"read in stage {op.stage}, written in {write_stage[value.name]}", value)
        for value in written:
            if write_stage.get(value.name, -1) >= op.stage:
                raise _illegal(op, f"written in stage {op.stage}, before that in {write_stage[value.name]}", value)
            if read_stage.get(value.name, -1) >= op.stage:
                raise _illegal(op, f"written in stage {op.stage}, before that read in {read_stage[value.name]}", value)
        for value in op.args:
            read_stage[value.name] = max(read_stage.get(value.name, -1), op.stage)
        for value in written:
            write_stage[value.name] = op.stage
            read_stage.pop(value.name, None)
