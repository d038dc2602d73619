"""Graphs as text: what enters is a `Graph`, what leaves is its printed form, and the way back is exact.

One op a line, `OUTS = kind(ARGS) {attributes} ; scope @stage`; a fused op opens a block with its body:

    graph verify {
      in @l00.norm: f32[64]
      %l00.x: bf16[8,64] = rms_norm(%x, @l00.norm) {eps=1e-06} ; verify/l00/attn @4
    }

A mark before a name is the space: % TEMP, @ WEIGHT, $ STATE, & ROUND, ! IO, ~ PEER. A type stands where a name first
appears: in the header for what is read first, at its definition for the rest. A name, scope or kind that is no plain
word is a JSON string.

Layers that are equal but for their number print once, as `for l in 01..60 {`: `{l}` is this layer (`l07`), `{l-1}`
the one before, `{3+9*l}` an integer that advances with it (a stage, an attribute). Folding works on lines and knows
nothing of ops, so that parsing is: unfold, then read lines.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ddtree_compile.errors import SpecError
from ddtree_compile.ir.graph import Attr, Graph, Op, Space, TensorType, Value

MARKS = {Space.TEMP: "%", Space.WEIGHT: "@", Space.STATE: "$", Space.ROUND: "&", Space.IO: "!", Space.PEER: "~"}
SPACES = {mark: space for space, mark in MARKS.items()}
LONGEST_PERIOD = 256  # ops (with their bodies) of one layer that folding looks for
MOST_LAYERS = 10_000  # of one `for`, so that a short text cannot ask for an endless graph

_PLAIN = r"[A-Za-z0-9_./\[\]<>-]+(?::[A-Za-z0-9_./\[\]<>-]+)*"
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_is_plain = re.compile(_PLAIN, re.ASCII).fullmatch
_is_word = re.compile(r"[A-Za-z_]\w*", re.ASCII).fullmatch


# Printing


def print_graph(graph: Graph) -> str:
    """The graph as text, repeated layers folded; ends in a newline. Legal or not, it reads back equal."""
    lines = [f"graph {_text(graph.name)} {{"]
    lines += _fold(_units(graph))
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


# Folding: lines in, lines out

# What may change from layer to layer: a layer number, or an integer that stands alone. Quoted text is left alone.
_holes = re.compile(
    _QUOTED + r"|(?<![A-Za-z0-9])l(?P<layer>\d{2,})(?![A-Za-z0-9])|(?<=[=(,@ ])(?P<integer>-?\d+)(?=[,)} ]|$)",
    re.ASCII | re.MULTILINE,
)
_slots = re.compile(
    _QUOTED + r"|\{l(?P<offset>[+-]\d{1,18})?\}|\{(?P<base>-?\d{1,40})(?P<step>[+-]\d{1,40})\*l\}", re.ASCII
)
_for = re.compile(r"for l in (\d{1,9})\.\.(\d{1,9}) \{", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Unit:
    """A unit's text with holes: two units of one `shape` differ in `numbers` alone."""

    text: str
    shape: str
    numbers: tuple[int, ...]
    is_layer: tuple[bool, ...]

    @property
    def layer(self) -> int | None:
        """The layer that the unit is of: the last layer number of its first line's (its scope's, if it has one)."""
        count = self.shape.split("\n", 1)[0].count("\0")
        named = [n for n, layer in zip(self.numbers[:count], self.is_layer[:count], strict=True) if layer]
        return named[-1] if named else None


def _layer(number: int) -> str:
    return f"l{number:02d}"


def _unit(text: str) -> _Unit:
    numbers: list[int] = []
    is_layer: list[bool] = []

    def hole(match: re.Match[str]) -> str:
        layer = match["layer"] is not None
        digits = match["layer"] if layer else match["integer"]
        if digits is None or len(digits) > 18:
            return match[0]
        number = int(digits)
        if match[0] != (_layer(number) if layer else str(number)):
            return match[0]
        numbers.append(number)
        is_layer.append(layer)
        return "l\0" if layer else "\0"

    return _Unit(text, _holes.sub(hole, text), tuple(numbers), tuple(is_layer))


def _fold(texts: Iterator[str]) -> Iterator[str]:
    units = [_unit(text) for text in texts]
    layers = [unit.layer for unit in units]
    at = 0
    while at < len(units):
        period, count = _run(units, layers, at)
        if count < 2:
            yield from _indent(units[at].text, "  ")
            at += 1
            continue
        first, second = _numbers(units, at, period), _numbers(units, at + period, period)
        layered = [flag for unit in units[at : at + period] for flag in unit.is_layer]
        moving = [n for n, m, layer in zip(first, second, layered, strict=True) if layer and m == n + 1]
        start = Counter(moving).most_common(1)[0][0]
        yield f"  for l in {start:02d}..{start + count - 1:02d} {{"
        slots = iter([_slot(*pair, start) for pair in zip(first, second, layered, strict=True)])
        template = "\n".join(unit.shape for unit in units[at : at + period])
        yield from _indent(re.sub(r"l?\0", lambda _, slots=slots: next(slots), template), "    ")
        yield "  }"
        at += period * count


def _indent(text: str, by: str) -> Iterator[str]:
    return (by + line for line in text.split("\n"))


def _numbers(units: list[_Unit], at: int, period: int) -> list[int]:
    return [number for unit in units[at : at + period] for number in unit.numbers]


def _slot(first: int, second: int, layer: bool, start: int) -> str:
    step = second - first
    if layer:
        return _layer(first) if step == 0 else "{l}" if first == start else f"{{l{first - start:+d}}}"
    return str(first) if step == 0 else f"{{{first - step * start}{step:+d}*l}}"


def _run(units: list[_Unit], layers: list[int | None], at: int) -> tuple[int, int]:
    """The period and the number of layers of the longest run that starts here; (1, 1) when there is none. A run
    starts where a layer does, or a fold would begin in the middle of one."""
    best = (1, 1)
    if layers[at] is None or (at > 0 and layers[at] == layers[at - 1]):
        return best
    for period in range(1, min(LONGEST_PERIOD, (len(units) - at) // 2) + 1):
        if units[at + period].shape != units[at].shape:
            continue
        count = _repeats(units, at, period)
        if count > 1 and period * count > best[0] * best[1]:
            best = (period, count)
    return best


def _repeats(units: list[_Unit], at: int, period: int) -> int:
    """How many times `period` units from `at` repeat, every number advancing evenly and some layer number by one."""
    count, steps, here = 1, None, _numbers(units, at, period)
    layered = [flag for unit in units[at : at + period] for flag in unit.is_layer]
    while at + (count + 1) * period <= len(units):
        start = at + count * period
        if any(units[start + i].shape != units[at + i].shape for i in range(period)):
            break
        after = _numbers(units, start, period)
        step = [b - a for a, b in zip(here, after, strict=True)]
        if steps is None:
            layer_steps = {s for s, layer in zip(step, layered, strict=True) if layer}
            if 1 not in layer_steps or not layer_steps <= {0, 1}:
                break
            steps = step
        if step != steps:
            break
        count, here = count + 1, after
    return count


def _unfold(text: str) -> Iterator[tuple[int, str]]:
    """The lines (number from 1, text without indent) with every `for` written out; blank lines left out."""
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
    at = 0
    while at < len(lines):
        number, line = lines[at]
        at += 1
        if not line.startswith("for l in "):
            if line:
                yield number, line
            continue
        match = _for.fullmatch(line)
        if match is None:
            raise SpecError(f"line {number}: expected `for l in FIRST..LAST {{`")
        first, last = map(int, match.groups())
        if not first <= last < first + MOST_LAYERS:
            raise SpecError(f"line {number}: a `for` must run up, over at most {MOST_LAYERS} layers")
        start, depth = at, 1
        while at < len(lines):
            inner = lines[at][1]
            if inner.startswith("for l in "):
                raise SpecError(f"line {lines[at][0]}: a `for` inside a `for` is not part of the format")
            depth += inner.endswith("{") - (inner == "}")
            if depth == 0:
                break
            at += 1
        else:
            raise SpecError(f"line {number}: this `for` is never closed")
        for layer in range(first, last + 1):
            for inner_number, inner in lines[start:at]:
                if inner:
                    yield inner_number, _fill(inner, layer, inner_number)
        at += 1


def _fill(line: str, layer: int, number: int) -> str:
    def slot(match: re.Match[str]) -> str:
        if match["base"] is not None:
            return str(int(match["base"]) + int(match["step"]) * layer)
        if match[0].startswith('"'):
            return match[0]
        named = layer + int(match["offset"] or 0)
        if named < 0:
            raise SpecError(f"line {number}: {match[0]} is below layer 0 where l is {layer}")
        return _layer(named)

    return _slots.sub(slot, line)


# Parsing

_tokens = re.compile(
    rf"\s*(?:(?P<quoted>{_QUOTED})|(?P<mark>[%@$&!~])|(?P<plain>{_PLAIN})|(?P<sign>[][(){{}},:=;+]))", re.ASCII
)
_integer = re.compile(r"-?[0-9]{1,400}").fullmatch
_float = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|inf)|nan").fullmatch
_type = re.compile(rf"\s*(?P<dtype>[A-Za-z_]\w*|{_QUOTED})\[(?P<shape>(?:-?\d{{1,40}}(?:,-?\d{{1,40}})*)?)\]", re.ASCII)
_number = re.compile(r"\s*(?P<number>-?[0-9][0-9.]*(?:e[+-]?[0-9]+)?|-?inf|nan|true|false)", re.ASCII)


def parse_graph(text: str) -> Graph:
    """The graph whose printed form `text` is. SpecError names the line and what was expected there."""
    lines = list(_unfold(text))
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
