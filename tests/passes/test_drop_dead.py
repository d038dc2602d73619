"""What nobody sees goes, what anybody sees stays."""

from hypothesis import given
from hypothesis import strategies as st

from ddtree_compile.ir.graph import Graph, Op, Space, TensorType, Value
from ddtree_compile.ir.ops import OPS
from ddtree_compile.passes.drop_dead import drop_dead, live_ops


def value(name: str, space: Space = Space.TEMP) -> Value:
    return Value(name, TensorType((4,), "f32"), space)


A, B, C, OUT = value("a"), value("b"), value("c"), value("out", Space.IO)


def kept(*ops: Op, in_place: tuple[str, ...] = ()) -> list[str]:
    return [op.kind for op in live_ops(ops, lambda op: (0,) if op.kind in in_place else ())]


def test_a_chain_that_ends_in_temp_goes():
    assert kept(Op("a", (), (A,)), Op("b", (A,), (B,)), Op("c", (A,), (OUT,))) == ["a", "c"]


def test_every_space_but_temp_is_seen():
    for space in set(Space) - {Space.TEMP, Space.WEIGHT}:
        assert kept(Op("k", (), (value("x", space),))) == ["k"]
        assert kept(Op("k", (value("x", space),), ()), in_place=("k",)) == ["k"]


def test_a_write_in_place_matters_while_somebody_reads_later():
    make, change, read = Op("make", (), (A,)), Op("change", (A,), ()), Op("read", (A,), (OUT,))
    assert kept(make, change, read, in_place=("change",)) == ["make", "change", "read"]
    assert kept(make, read, change, in_place=("change",)) == ["make", "read"]


def test_one_live_out_keeps_the_op_and_a_barrier_stays():
    assert kept(Op("two", (), (A, B)), Op("use", (B,), (OUT,)), Op("barrier", (), ())) == ["two", "use", "barrier"]


def test_the_pass_asks_the_records_and_looks_into_bodies():
    plain = next(kind for kind, record in OPS.items() if not record.writes)
    writer, index = next((kind, record.writes[0]) for kind, record in OPS.items() if record.writes)
    args = tuple(value(f"s{i}", Space.STATE) for i in range(index + 1))
    seen = Op("fused", args, (), body=(Op(writer, args, ()),))
    unseen = Op("fused", args, (A,), body=(Op(plain, args, (A,)),))
    assert drop_dead(Graph("g", (seen, unseen)), None) == Graph("g", (seen,))


@given(st.lists(st.tuples(st.lists(st.integers(0, 13), max_size=3), st.booleans()), max_size=14))
def test_live_is_what_reaches_a_visible_write(program: list[tuple[list[int], bool]]):
    """Oracle: backwards reachability over the graph of uses, by a fixed point."""
    ops = []
    for i, (args, visible) in enumerate(program):
        outs = (value(f"t{i}"), value("s", Space.STATE)) if visible else (value(f"t{i}"),)
        ops.append(Op(f"k{i}", tuple(value(f"t{j}") for j in args if j < i), outs))
    live = {i for i, (_, visible) in enumerate(program) if visible}
    while more := {j for i in live for j in program[i][0] if j < i} - live:
        live |= more
    once = live_ops(tuple(ops), lambda _: ())
    assert [int(op.kind[1:]) for op in once] == sorted(live)
    assert live_ops(once, lambda _: ()) == once
