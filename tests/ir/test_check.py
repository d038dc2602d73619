"""Legal graphs pass; every kind of break, made on purpose, is named."""

from dataclasses import replace

import pytest
import torch

from ddtree_compile.ir.check import IllegalGraph, check_graph, written_args
from ddtree_compile.ir.graph import Graph, Op, Space, TensorType, Value
from ddtree_compile.ir.ops.record import OpRecord, same_as, table


def _two(op: Op) -> tuple[TensorType, ...]:
    return (op.args[0].type, op.args[0].type)


RECORDS = table(
    OpRecord("copy", torch.clone, same_as(0)),
    OpRecord("mul", torch.mul, same_as(0)),
    OpRecord("split", torch.clone, _two),
    OpRecord("store", torch.clone, lambda _: (), writes=(1,)),
    OpRecord("outside", torch.clone, lambda _: (), writes=(5,)),
)


def value(name: str, space: Space = Space.TEMP, shape: tuple[int, ...] = (4, 8), dtype: str = "f32") -> Value:
    return Value(name, TensorType(shape, dtype), space)


IN, OUT, W = value("in", Space.IO), value("out", Space.IO), value("w", Space.WEIGHT)
CACHE, A, B, C, P = value("cache", Space.STATE), value("a"), value("b"), value("c"), value("p")

LEGAL = Graph(
    "g",
    (
        Op("copy", (IN,), (A,), (), "g/copy", (), 0),
        Op("mul", (A, W), (B,), (), "g/mul", (), 1),
        Op("fused", (B, W, CACHE), (C,), (), "g/fused",
           (Op("mul", (B, W), (P,)), Op("copy", (P,), (C,)), Op("store", (C, CACHE), ())), 2),
        Op("mul", (C, CACHE), (OUT,), (), "g/out", (), 3),
    ),
)  # fmt: skip


def with_op(index: int, **changes: object) -> Graph:
    ops = list(LEGAL.ops)
    ops[index] = replace(ops[index], **changes)  # pyright: ignore[reportArgumentType]
    return Graph("g", tuple(ops))


def with_body(*body: Op) -> Graph:
    return with_op(2, body=body)


def test_a_legal_graph_passes_with_and_without_stages():
    check_graph(LEGAL, RECORDS)
    check_graph(Graph("g", tuple(op.at(-1) for op in LEGAL.ops)), RECORDS)
    check_graph(Graph("empty", ()), RECORDS)


def test_a_fused_op_writes_what_its_body_writes_in_place():
    assert written_args(LEGAL.ops[2], RECORDS) == (2,)
    nested = Op("outer", (CACHE, B, W), (C,), body=(replace(LEGAL.ops[2]),))
    assert written_args(nested, RECORDS) == (0,)


BODY = LEGAL.ops[2].body
BREAKS = {
    "read before": with_op(0, outs=(value("other"),)),
    "read before it": Graph("g", (LEGAL.ops[1], LEGAL.ops[0], *LEGAL.ops[2:])),
    "second time": with_op(1, outs=(A,)),
    "twice an out": with_op(1, kind="split", outs=(B, B)),
    "is bf16": with_op(2, args=(B, value("w", Space.WEIGHT, dtype="bf16"), CACHE)),
    "in state here": with_op(3, args=(C, value("w", Space.STATE))),
    "weight is written": with_op(3, outs=(value("w2", Space.WEIGHT),)),
    "written in place": with_op(3, kind="store", args=(C, W), outs=()),
    "its record makes f32": with_op(3, outs=(value("out", Space.IO, (4, 9)),)),
    "its record makes 1": with_op(3, outs=()),
    "its record makes 2": with_op(3, kind="split"),
    "shape rule refuses": with_op(0, args=()),
    "no record": with_op(0, kind="unheard_of"),
    "no dtype": with_op(0, args=(value("in", Space.IO, dtype="f16"),)),
    "negative size": with_op(0, args=(value("in", Space.IO, (-1,)),)),
    "writes argument 5": with_op(3, kind="outside", outs=()),
    "has no stage": with_op(1, stage=-1),
    "read in stage 0": with_op(1, stage=0),
    "read in stage 1": with_op(2, stage=1),
    "written in stage 2, before that in 2": Graph("g", (
        *LEGAL.ops[:3], Op("copy", (W,), (CACHE,), (), "", (), 2), LEGAL.ops[3].at(4))),
    "before that read in 3": Graph("g", (*LEGAL.ops, Op("store", (IN, CACHE), (), (), "", (), 3))),
    "body of fused, which does not list it as an argument": with_op(2, args=(B, CACHE)),
    "body of fused, which does not list it as an out": with_body(*BODY, Op("copy", (B,), (CACHE,))),
    "no op of the body writes": with_body(BODY[0]),
    "p: read before": with_body(BODY[1], BODY[0], BODY[2]),
    "c: read before": with_body(BODY[0], BODY[2], BODY[1]),
    "b: defined a second": with_body(*BODY, Op("copy", (P,), (B,))),
    "p: is f32[4,9]": with_body(Op("mul", (B, W), (value("p", shape=(4, 9)),)), *BODY[1:]),
    "mul: no record": with_body(Op("mul_", (B, W), (P,)), *BODY[1:]),
}  # fmt: skip


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_graph_is_refused(what: str):
    words = what.removeprefix("mul: ")
    with pytest.raises(IllegalGraph) as caught:
        check_graph(BREAKS[what], RECORDS)
    assert words in str(caught.value)


def test_the_message_names_the_scope_and_the_value():
    with pytest.raises(IllegalGraph, match=r"^g/mul \(mul\): a: read before it is written$"):
        check_graph(BREAKS["read before"], RECORDS)
