"""Folding of repeated layers in printed graphs: lines in, fewer lines out, and the way back.

A unit is a text of one or more lines (an op with its body). A run of units that repeats with its layer number prints
once, as `for l in 01..60 {`: `{l}` is this layer (`l07`), `{l-1}` the one before, `{3+9*l}` an integer that advances
with it. Folding works on text and knows nothing of ops.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ddtree_compile.errors import SpecError

LONGEST_PERIOD = 256  # units of one layer that folding looks for
MOST_LAYERS = 10_000  # of one `for`, so that a short text cannot ask for an endless graph
QUOTED = r'"(?:[^"\\]|\\.)*"'

# What may change from layer to layer: a layer number, or an integer that stands alone. Quoted text is left alone.
_holes = re.compile(
    QUOTED + r"|(?<![A-Za-z0-9])l(?P<layer>\d{2,})(?![A-Za-z0-9])|(?<=[=(,@ ])(?P<integer>-?\d+)(?=[,)} ]|$)",
    re.ASCII | re.MULTILINE,
)
_slots = re.compile(
    QUOTED + r"|\{l(?P<offset>[+-]\d{1,18})?\}|\{(?P<base>-?\d{1,40})(?P<step>[+-]\d{1,40})\*l\}", re.ASCII
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


def fold(texts: Iterator[str]) -> Iterator[str]:
    """The lines of `texts` (units, unindented), indented by two, repeated layers folded."""
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


def unfold(text: str) -> Iterator[tuple[int, str]]:
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
