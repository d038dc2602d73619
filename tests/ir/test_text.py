"""The printed form reads back equal, folds layers, and says which line is wrong."""

import contextlib
import math
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_compile.errors import SpecError
from ddtree_compile.ir.graph import DTYPE_BYTES, Attr, Graph, Op, Space, TensorType, Value
from ddtree_compile.ir.text import diff_graphs, parse_graph, print_graph


def value(name: str, space: Space = Space.TEMP, shape: tuple[int, ...] = (8, 64), dtype: str = "bf16") -> Value:
    return Value(name, TensorType(shape, dtype), space)


def layered_graph(layers: int, ops_a_layer: int = 24) -> Graph:
    """Layer 0 differs from the rest, as a dense first layer does; each layer reads the one before."""
    ops = [Op("embed", (value("tokens", Space.IO, (8,), "i32"),), (value("l-1.out"),), (), "verify/embed", (), 0)]
    last = ops[0].outs[0]
    for layer in range(layers):
        l = f"l{layer:02d}"  # noqa: E741
        for i in range(ops_a_layer):
            out = value(f"{l}.t{i}" if i < ops_a_layer - 1 else f"{l}.out")
            args = (last, value(f"target.{l}.w{i}", Space.WEIGHT, (64, 64)), value("eps", Space.STATE, (), "f32"))
            body = ()
            if i == 2:
                private = value(f"{l}.private")
                body = (Op("linear", args[:2], (private,), (), f"verify/{l}/mlp"), Op("add", (private, last), (out,)))
            attrs = (("layer", layer), ("eps", 1e-6), ("dense", layer == 0))
            ops.append(Op(f"op{i}", args, (out,), attrs, f"verify/{l}/mlp", body, 1 + layer * ops_a_layer + i))
            last = out
    return Graph("verify[15]", tuple(ops))


names = st.one_of(
    st.sampled_from(["x", "l00.q", "l01.q", "target.l01.w", "5", "{l}", "l01", "in", "for l in 00..01 {", "}"]),
    st.text(max_size=8),
)
values = st.builds(
    Value,
    names,
    st.builds(
        TensorType, st.lists(st.integers(0, 2**40), max_size=3).map(tuple), st.sampled_from([*DTYPE_BYTES, "odd type"])
    ),
    st.sampled_from(Space),
)
floats = st.floats(allow_nan=False)
attr_values = st.one_of(
    st.integers(),
    floats,
    st.booleans(),
    st.text(max_size=6),
    st.just(()),
    st.lists(st.integers(), max_size=3).map(tuple),
    st.lists(floats, max_size=3).map(tuple),
    st.lists(st.text(max_size=4), max_size=3).map(tuple),
)


def ops_of(bodies: st.SearchStrategy[tuple[Op, ...]]) -> st.SearchStrategy[Op]:
    few = st.lists(values, max_size=3).map(tuple)
    attrs = st.lists(st.tuples(names, attr_values), max_size=3).map(tuple)
    return st.builds(Op, names, few, few, attrs, names, bodies, st.integers(-1, 9))


bodies = st.lists(ops_of(st.lists(ops_of(st.just(())), max_size=2).map(tuple)), max_size=2).map(tuple)
graphs = st.builds(Graph, names, st.lists(ops_of(bodies), max_size=8).map(tuple))


def same(one: Graph, other: Graph) -> bool:
    return one == other and repr(one) == repr(other)  # repr tells True from 1 and 0.0 from -0.0


@given(graphs)
def test_reads_back_what_it_prints(graph: Graph):
    """Any graph, legal or not: a dump of a broken graph must be exact too."""
    assert same(parse_graph(print_graph(graph)), graph)


@given(st.integers(0, 4), st.integers(1, 4), st.lists(st.integers(0, 60), max_size=3), st.integers(-3, 3))
def test_folded_layers_read_back(first: int, period: int, odd: list[int], stride: int):
    ops: list[Op] = []
    for layer in range(first, first + 6):
        for i in range(period):
            out = value(f"l{layer:02d}.t{i}")
            args = (value(f"l{max(layer - 1, 0):02d}.t{i}"), value(f"w.l{layer:02d}", Space.WEIGHT))
            attrs = (("n", stride * layer), ("s", f"{{l}} l{layer:02d}"), ("f", 0.5))
            kind = "odd" if len(ops) in odd else f"k{i}"
            ops.append(Op(kind, args, (out,), attrs, f"v/l{layer:02d}", (), max(0, 9 + stride * layer)))
    graph = Graph("g", tuple(ops))
    assert same(parse_graph(print_graph(graph)), graph)


@pytest.mark.parametrize(
    "attr",
    [0, -7, 10**30, 1.0, 1e-6, 1e22, math.inf, -math.inf, -0.0, True, False, "", "a\n\"b\" {l} ; @3", (), (1,), (1, 2),
     (1.5,), (math.inf, 0.0), ("x", "y, z"), ("",)],
)  # fmt: skip
def test_every_attribute_type_reads_back(attr: Attr):
    graph = Graph("g", (Op("k", (), (value("x"),), (("a", attr), ("b", 1))),))
    assert same(parse_graph(print_graph(graph)), graph)


def test_a_nan_attribute_reads_back():
    graph = Graph("g", (Op("k", (), (), (("a", math.nan),)),))
    assert repr(parse_graph(print_graph(graph))) == repr(graph)


def test_layers_print_once_and_61_of_them_take_well_under_a_second():
    graph = layered_graph(61)
    assert len(graph.ops) > 1400
    start = time.process_time()
    text = print_graph(graph)
    back = parse_graph(text)
    seconds = time.process_time() - start
    assert same(back, graph)
    assert len(text.splitlines()) < 150
    assert "for l in 01..60 {" in text
    assert seconds < 1.5, seconds  # 0.3 s here; the limit leaves room for a busy machine


def test_the_printed_form_is_this():
    x, w, q, o = value("l00.x"), value("l00.w", Space.WEIGHT), value("l00.q"), value("kv", Space.STATE, (4,), "f32")
    linear = Op("linear", (x, w), (q,), (("eps", 1e-6),), "verify/l00/attn", (), 4)
    store = Op("store", (q,), (o,), scope="verify/l00/attn", body=(Op("cast", (q,), (o,)),), stage=5)
    assert print_graph(Graph("verify", (linear, store))) == (
        "graph verify {\n"
        "  in %l00.x: bf16[8,64]\n"
        "  in @l00.w: bf16[8,64]\n"
        "  %l00.q: bf16[8,64] = linear(%l00.x, @l00.w) {eps=1e-06} ; verify/l00/attn @4\n"
        "  $kv: f32[4] = store(%l00.q) ; verify/l00/attn @5 {\n"
        "    $kv = cast(%l00.q)\n"
        "  }\n"
        "}\n"
    )


def test_a_fold_shows_this_layer_the_one_before_and_what_advances():
    text = print_graph(layered_graph(4, ops_a_layer=3))
    assert "  for l in 01..03 {\n" in text
    assert "%{l}.t0: bf16[8,64] = op0(%{l-1}.out, @target.{l}.w0, $eps) " in text
    assert "{layer={0+1*l}, eps=1e-06, dense=false} ; verify/{l}/mlp @{1+3*l}" in text


def test_diff_shows_only_what_changed():
    before = layered_graph(8, ops_a_layer=4)
    after = before.with_ops(tuple(replace(op, kind="swap") if op.kind == "op3" else op for op in before.ops))
    assert diff_graphs(before, before) == ""
    changed = [line for line in diff_graphs(before, after).splitlines()[2:] if line[0] in "+-"]
    assert len(changed) == 4  # layer 0 and the fold, a line out and a line in for each
    assert all("swap" in line for line in changed if line[0] == "+")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("graf g {\n}", 1),
        ("graph g {", 1),
        ("graph g {\n}\n}", 3),
        ("graph g {\n  %x = k()\n}", 2),
        ("graph g {\n  in %x: bf16[8\n}", 2),
        ("graph g {\n  in %x: bf16[8]\n  $y: f32[] = k($x)\n}", 3),
        ("graph g {\n\n  k(\n}", 3),
        ("graph g {\n  k() {a=}\n}", 2),
        ("graph g {\n  k() {a=1.2.3}\n}", 2),
        ("graph g {\n  k() {a=zebra}\n}", 2),
        ('graph g {\n  k() {a="\\q"}\n}', 2),
        ("graph g {\n  k() ; s @x\n}", 2),
        ("graph g {\n  k() ; s @1 rest\n}", 2),
        ("graph g {\n  k() {\n  }\n}", 2),
        ("graph g {\n  k() {\n    j()\n", 2),
        ("graph g {\n  for l in 00..02 {\n    k()\n", 2),
        ("graph g {\n  for l in 05..02 {\n    k()\n  }\n}", 2),
        ("graph g {\n  for l in 0..99999999 {\n    k()\n  }\n}", 2),
        ("graph g {\n  for l in 00..02 {\n    k() ; {l-1}\n  }\n}", 3),
        ("graph g {\n  for l in 00..02 {\n    for l in 00..02 {\n    }\n  }\n}", 3),
        ("graph g {\n  for m in 00..02 {\n  }\n}", 2),
    ],
)
def test_malformed_text_names_its_line(text: str, line: int):
    with pytest.raises(SpecError, match=rf"^line {line}: "):
        parse_graph(text)


@given(st.data())
def test_damaged_text_is_refused_or_read_but_never_crashes(data: st.DataObject):
    text = print_graph(layered_graph(3, ops_a_layer=4))
    at = data.draw(st.integers(0, len(text) - 1))
    instead = data.draw(st.sampled_from(['"', "{", "}", "\n", "(", "@", "9", "l", " ", ""]))
    with contextlib.suppress(SpecError):
        parse_graph(text[:at] + instead + text[at + 1 :])
