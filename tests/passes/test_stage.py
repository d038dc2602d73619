"""Stages respect every hazard, are as few as possible, and never cost memory."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from ddtree_compile.ir.check import check_graph
from ddtree_compile.ir.graph import Graph, Op, Space, TensorType, Value
from ddtree_compile.ir.ops import OPS
from ddtree_compile.ir.ops.record import OpRecord, same_as, table
from ddtree_compile.passes.buffers import lifetimes, lower_bound
from ddtree_compile.passes.stage import dependencies, stage

KIND = next(kind for kind, record in OPS.items() if not record.writes)
NO_SPEC = None  # the pass takes a spec, as all do, and reads nothing of it


def value(name: str, space: Space = Space.TEMP, size: int = 64) -> Value:
    return Value(name, TensorType((size,), "u8"), space)


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[tuple[Value, ...], tuple[Value, ...], tuple[int, ...]]]:
    """(args, outs, indices of the arguments written in place) an op; TEMP is defined once and before its use."""
    states = [value(f"s{i}", Space.STATE) for i in range(3)]
    temps: list[Value] = []
    ops = []
    for i in range(draw(st.integers(1, 14))):
        args = draw(st.lists(st.sampled_from([*states, *temps]), max_size=3).map(tuple))
        outs = draw(st.lists(st.sampled_from(states), max_size=1).map(tuple))
        if draw(st.booleans()):
            temps.append(value(f"t{i}", size=draw(st.integers(0, 500))))
            outs = (*outs, temps[-1])
        in_place = tuple(j for j in range(len(args)) if draw(st.integers(0, 4)) == 0)
        ops.append((args, outs, in_place))
    return ops


def as_graph(program: list[tuple[tuple[Value, ...], tuple[Value, ...], tuple[int, ...]]]) -> Graph:
    return Graph("g", tuple(Op(f"k{i}", args, outs) for i, (args, outs, _) in enumerate(program)))


@given(programs())
def test_dependencies_are_the_hazards(program):
    """Oracle: two ops conflict when one writes what the other touches; what `dependencies` gives must order exactly
    those pairs and nothing that no chain of conflicts orders."""
    graph = as_graph(program)
    before = dependencies(graph, lambda op: program[int(op.kind[1:])][2])
    reach = [set(earlier) for earlier in before]
    for index, earlier in enumerate(before):
        for i in earlier:
            reach[index] |= reach[i]
    oracle: list[set[int]] = [set() for _ in program]
    touched = [{v.name for v in (*args, *outs)} for args, outs, _ in program]
    written = [{v.name for v in outs} | {args[i].name for i in in_place} for args, outs, in_place in program]
    for i, j in combinations(range(len(program)), 2):
        if written[i] & touched[j] or touched[i] & written[j]:
            oracle[j] |= {i} | oracle[i]
    assert reach == oracle


@given(programs())
def test_stages_are_legal_least_and_no_worse_in_memory(program):
    plain = Graph("g", tuple(Op(KIND, args, outs) for args, outs, _ in program))
    staged = stage(plain, NO_SPEC)
    assert sorted(map(repr, (op.at(-1) for op in staged.ops))) == sorted(map(repr, plain.ops))
    assert [op.stage for op in staged.ops] == sorted(op.stage for op in staged.ops)
    for before, op in zip(dependencies(staged), staged.ops, strict=True):
        assert all(staged.ops[i].stage < op.stage for i in before)
    levels: list[int] = []
    for before in dependencies(plain):
        levels.append(max((levels[i] + 1 for i in before), default=0))
    assert max(op.stage for op in staged.ops) == max(levels)
    early = plain.with_ops(tuple(op.at(level) for op, level in zip(plain.ops, levels, strict=True)))
    assert lower_bound(lifetimes(staged)) <= lower_bound(lifetimes(early))
    assert stage(staged, NO_SPEC) == stage(staged, NO_SPEC)


def test_what_reads_only_state_waits_for_its_user():
    """A chain of layers, each with a large value made from STATE alone: early, all would live at once."""
    x, ops = value("x0"), [Op(KIND, (value("in", Space.IO),), (value("x0"),))]
    for i in range(6):
        big, after = value(f"big{i}", size=10_000), value(f"x{i + 1}")
        ops += [Op(KIND, (value("s", Space.STATE),), (big,)), Op(KIND, (x, big), (after,))]
        x = after
    staged = stage(Graph("g", (*ops, Op(KIND, (x,), (value("out", Space.IO),)))), NO_SPEC)
    assert lower_bound(lifetimes(staged)) < 20_500


def test_the_checker_agrees():
    records = table(OpRecord(KIND, lambda *args: args[0], same_as(0)))
    a, b, c = value("a"), value("b"), value("c")
    graph = Graph("g", (
        Op(KIND, (value("s", Space.STATE),), (a,)), Op(KIND, (value("r", Space.ROUND),), (b,)),
        Op(KIND, (a, b), (c,)), Op(KIND, (c,), (value("s", Space.STATE),)),
    ))  # fmt: skip
    staged = stage(graph, NO_SPEC)
    check_graph(staged, records)
    assert [op.stage for op in staged.ops] == [0, 0, 1, 2]


def test_the_empty_graph():
    assert stage(Graph("g", ()), NO_SPEC) == Graph("g", ())
