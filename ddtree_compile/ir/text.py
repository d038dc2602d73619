"""Graphs as text: what enters is a `Graph`, what leaves is its printed form, and the way back is exact.

One op a line, `OUTS = kind(ARGS) {attributes} ; scope @stage`; a fused op opens a block with its body:

    graph verify {
      in @l00.norm: f32[64]
      %l00.x: bf16[8,64] = rms_norm(%x, @l00.norm) {eps=1e-06} ; verify/l00/attn @4
    }

A mark before a name is the space: % TEMP, @ WEIGHT, $ STATE, & ROUND, ! IO, ~ PEER. A type stands where a name first
appears: in the header for what is read first, at its definition for the rest. A name, scope or kind that is no plain
word is a JSON string.

Layers that are equal but for their number print once (`ir.fold`), so parsing is: unfold, then read lines.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator

from ddtree_compile.errors import SpecError
from ddtree_compile.ir.fold import QUOTED, fold, unfold
from ddtree_compile.ir.graph import Attr, Graph, Op, Space, TensorType, Value

MARKS = {Space.TEMP: "%", Space.WEIGHT: "@", Space.STATE: "$", Space.ROUND: "&", Space.IO: "!", Space.PEER: "~"}
SPACES = {mark: space for space, mark in MARKS.items()}

_PLAIN = r"[A-Za-z0-9_./\[\]<>-]+(?::[A-Za-z0-9_./\[\]<>-]+)*"
_is_plain = re.compile(_PLAIN, re.ASCII).fullmatch
_is_word = re.compile(r"[A-Za-z_]\w*", re.ASCII).fullmatch


# Printing


def print_graph(graph: Graph) -> str:
    """The graph as text, repeated layers folded; ends in a newline. Legal or not, it reads back equal."""
    lines = [f"graph {_text(graph.name)} {{"]
    lines += fold(_units(graph))
    return "\n".join([*lines, "}", ""])


def diff_graphs(before: Graph, after: Graph) -> str:
    """A unified diff of the printed forms, layers folded; empty when the graphs are equal."""
    old, new = print_graph(before).splitlines(), print_graph(after).splitlines()
    return "\n".join(difflib.unified_diff(old, new, f"{before.name} before", f"{after.name} after", lineterm="", n=1))


def _units(graph: Graph) -> Iterator[str]:
    """What may be folded as a whole: a header line, or an op with its body, unindented."""
    known: dict[str, Value] = {}
    written: set[str] = set()
    for op in graph.ops:
        for value in op.args:
            if value.name not in known and value.name not in written:
                known[value.name] = value
                yield f"in {_value(value, {})}"
        written.update(value.name for value in op.outs)
    for op in graph.ops:
        yield "\n".join(_op_lines(op, known))


def _op_lines(op: Op, known: dict[str, Value]) -> Iterator[str]:
    """The lines of an op; `known` is what has its type printed, and grows."""
    outs = ", ".join(_value(value, known) for value in op.outs)
    args = ", ".join(_value(value, known) for value in op.args)
    line = f"{outs} = " if outs else ""
    line += f"{_text(op.kind)}({args})"
    if op.attrs:
        line += " {" + ", ".join(f"{_text(name)}={_attr(value)}" for name, value in op.attrs) + "}"
    if op.scope or op.stage != -1:
        line += " ;"
    if op.scope:
        line += f" {_text(op.scope)}"
    if op.stage != -1:
        line += f" @{op.stage}"
    if not op.body:
        yield line
        return
    yield line + " {"
    inner = dict(known)
    for part in op.body:
        yield from ("  " + text for text in _op_lines(part, inner))
    yield "}"


def _value(value: Value, known: dict[str, Value]) -> str:
    text = MARKS[value.space] + _text(value.name)
    if known.get(value.name) == value:
        return text
    known[value.name] = value
    dtype = value.dtype if _is_word(value.dtype) else json.dumps(value.dtype)
    return f"{text}: {dtype}[{','.join(map(str, value.shape))}]"


def _text(name: str) -> str:
    return name if _is_plain(name) else json.dumps(name)


def _attr(value: Attr) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return int.__repr__(value)
        case float():
            return float.__repr__(value)
        case str():
            return json.dumps(value)
        case tuple():
            inside = ", ".join(map(_attr, value))
            return f"({inside},)" if len(value) == 1 else f"({inside})"


# Parsing

_tokens = re.compile(
    rf"\s*(?:(?P<quoted>{QUOTED})|(?P<mark>[%@$&!~])|(?P<plain>{_PLAIN})|(?P<sign>[][(){{}},:=;+]))", re.ASCII
)
_integer = re.compile(r"-?[0-9]{1,400}").fullmatch
_float = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|inf)|nan").fullmatch
_type = re.compile(rf"\s*(?P<dtype>[A-Za-z_]\w*|{QUOTED})\[(?P<shape>(?:-?\d{{1,40}}(?:,-?\d{{1,40}})*)?)\]", re.ASCII)
_number = re.compile(r"\s*(?P<number>-?[0-9][0-9.]*(?:e[+-]?[0-9]+)?|-?inf|nan|true|false)", re.ASCII)


def parse_graph(text: str) -> Graph:
    """The graph whose printed form `text` is. SpecError names the line and what was expected there."""
    lines = list(unfold(text))
    if not lines:
        raise SpecError("line 1: expected `graph NAME {`")
    line = _Line(*lines[0])
    line.expect("graph")
    name = line.name("the graph's name")
    line.expect("{")
    line.end()
    ops, at = _parse_block(lines, 1, {}, lines[0][0], header=True)
    if at != len(lines):
        raise SpecError(f"line {lines[at][0]}: nothing may follow the graph's last `}}`")
    return Graph(name, ops)


def _parse_block(
    lines: list[tuple[int, str]], at: int, known: dict[str, Value], opened: int, header: bool = False
) -> tuple[tuple[Op, ...], int]:
    """The ops up to the closing brace, and the index of the line behind it."""
    ops: list[Op] = []
    while at < len(lines):
        number, text = lines[at]
        line = _Line(number, text)
        at += 1
        if text == "}":
            return tuple(ops), at
        if header and re.match(r"in [%@$&!~]", text):
            line.expect("in")
            line.value(known)
            line.end()
            continue
        op, opens = _parse_op(line, known)
        if opens:
            body, at = _parse_block(lines, at, dict(known), number)
            if not body:
                raise SpecError(f"line {number}: a body must hold an op")
            op = Op(op.kind, op.args, op.outs, op.attrs, op.scope, body, op.stage)
        ops.append(op)
    raise SpecError(f"line {opened}: the block opened here is never closed")


def _parse_op(line: _Line, known: dict[str, Value]) -> tuple[Op, bool]:
    """An op without its body, and whether a body follows."""
    outs: list[Value] = []
    if line.peek in SPACES:
        outs.append(line.value(known))
        while line.accept(","):
            outs.append(line.value(known))
        line.expect("=")
    kind = line.name("an op's kind")
    line.expect("(")
    args: list[Value] = []
    while not line.accept(")"):
        if args:
            line.expect(",")
        args.append(line.value(known))
    attrs: list[tuple[str, Attr]] = []
    opens = line.rest.strip() == "{"
    if not opens and line.accept("{"):
        while not line.accept("}"):
            if attrs:
                line.expect(",")
            key = line.name("an attribute's name")
            line.expect("=")
            attrs.append((key, line.attr()))
    scope, stage = "", -1
    if line.accept(";"):
        if line.peek not in ("@", "{", ""):
            scope = line.name("a scope")
        if line.accept("@"):
            stage = line.integer("a stage")
    opens = line.accept("{")
    line.end()
    return Op(kind, tuple(args), tuple(outs), tuple(attrs), scope, (), stage), opens


class _Line:
    """A cursor over one line; every failure names the line."""

    def __init__(self, number: int, text: str) -> None:
        self.number, self.text, self.at = number, text, 0

    @property
    def rest(self) -> str:
        return self.text[self.at :]

    def fail(self, expected: str) -> SpecError:
        found = self.rest.strip()
        return SpecError(f"line {self.number}: expected {expected}, found {found[:40] or 'the end of the line'}")

    @property
    def peek(self) -> str:
        """The next token ("" at the end of the line, or where no token can stand)."""
        match = _tokens.match(self.text, self.at)
        return match[0].strip() if match else ""

    def accept(self, token: str) -> bool:
        match = _tokens.match(self.text, self.at)
        if match is None or match[0].strip() != token:
            return False
        self.at = match.end()
        return True

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise self.fail(f"`{token}`")

    def end(self) -> None:
        if self.rest.strip():
            raise self.fail("the end of the line")

    def name(self, what: str) -> str:
        match = _tokens.match(self.text, self.at)
        if match is None or not (match["plain"] or match["quoted"]):
            raise self.fail(what)
        self.at = match.end()
        return match["plain"] or self.unquote(match["quoted"])

    def unquote(self, text: str) -> str:
        try:
            return json.loads(text, strict=False)
        except json.JSONDecodeError as error:
            raise SpecError(f"line {self.number}: {text[:40]} is no JSON string ({error.msg})") from None

    def value(self, known: dict[str, Value]) -> Value:
        mark = self.peek
        if mark not in SPACES:
            raise self.fail("a value (one of " + " ".join(SPACES) + " and a name)")
        self.expect(mark)
        name = self.name("a value's name")
        if self.accept(":"):
            known[name] = Value(name, self.type(), SPACES[mark])
        found = known.get(name)
        if found is None:
            raise SpecError(f"line {self.number}: {mark}{name} is used before its type is given")
        if found.space != SPACES[mark]:
            raise SpecError(f"line {self.number}: {mark}{name} lives in {found.space} space ({MARKS[found.space]})")
        return found

    def type(self) -> TensorType:
        match = _type.match(self.text, self.at)
        if match is None:
            raise self.fail("a type such as bf16[16,64]")
        self.at = match.end()
        dtype = match["dtype"]
        dtype = self.unquote(dtype) if dtype.startswith('"') else dtype
        return TensorType(tuple(int(n) for n in match["shape"].split(",") if n), dtype)

    def integer(self, what: str) -> int:
        match = _number.match(self.text, self.at)
        if match is None or not _integer(match["number"]):
            raise self.fail(what)
        self.at = match.end()
        return int(match["number"])

    def attr(self) -> Attr:
        if not self.accept("("):
            return self.scalar()
        items: list[int | float | bool | str] = []
        while not self.accept(")"):
            if items:
                self.expect(",")
                if self.accept(")"):
                    break
            items.append(self.scalar())
        return tuple(items)  # pyright: ignore[reportReturnType]  # a mixed tuple prints, so it reads back

    def scalar(self) -> int | float | bool | str:
        quoted = _tokens.match(self.text, self.at)
        if quoted is not None and quoted["quoted"]:
            self.at = quoted.end()
            return self.unquote(quoted["quoted"])
        match = _number.match(self.text, self.at)
        if match is None:
            raise self.fail("an attribute's value")
        self.at = match.end()
        word = match["number"]
        if word in ("true", "false"):
            return word == "true"
        if _integer(word):
            return int(word)
        if not _float(word):
            raise SpecError(f"line {self.number}: {word} is no number")
        return float(word)
