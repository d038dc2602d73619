"""`inspect`: the graphs of a plan as text, what each pass did to one, and its arena as a picture."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ddtree_compile.commands.options import (
    AsJson,
    DrafterDir,
    Logging,
    LogLevel,
    SpecOrPlan,
    TargetDir,
    Version,
    check_out,
    console,
    print_json,
    write_text,
)
from ddtree_compile.commands.source import is_plan, progress, read_plan, spec_of
from ddtree_compile.errors import SpecError

if TYPE_CHECKING:
    from ddtree_compile.ir.graph import Graph
    from ddtree_compile.passes.buffers import Arena, Buffer
    from ddtree_compile.plan import Segment
    from ddtree_compile.spec import CompileSpec

LOGICAL = "logical"
MIB = 1 << 20

Name = Annotated[
    str | None, typer.Option("--segment", metavar="S", help="One segment, such as 'verify[15]'.", show_default=False)
]
After = Annotated[
    str | None,
    typer.Option("--after", metavar="PASS", help="The graph after this pass; `logical`: before.", show_default=False),
]
Diff = Annotated[bool, typer.Option("--diff", help="What each pass changed (with --after, that pass alone).")]
ShowArena = Annotated[bool, typer.Option("--arena", help="Draw the segment's arena in the terminal.")]
Svg = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="Draw the segment's arena into a file.", show_default=False)
]


def inspect(
    spec: SpecOrPlan,
    segment: Name = None,
    after: After = None,
    diff: Diff = False,
    arena: ShowArena = False,
    svg: Svg = None,
    target: TargetDir = None,
    drafter: DrafterDir = None,
    as_json: AsJson = False,
    log_level: Logging = LogLevel.WARNING,
    version: Version = False,
) -> None:
    """List the segments of SPEC; with --segment, print one as text, pass by pass if you like, or draw its arena."""
    if segment is None:
        for flag, given in (("--after", after), ("--diff", diff), ("--arena", arena), ("--svg", svg)):
            if given:
                raise SpecError(f"{flag} needs --segment: run without it to see their names")
        _refuse_override(spec, target, drafter)
        rows = [_row(each) for each in _all(spec, target, drafter)]
        print_json(rows) if as_json else console().print(_list(rows))
        return
    if arena and (after or diff):
        raise SpecError("--arena is of the finished segment: leave --after and --diff out")
    if svg is not None:
        check_out(svg, spec)
    if is_plan(spec):
        if after or diff:
            raise SpecError(f"{spec}: a plan holds no graph before its last pass; name the spec for --after and --diff")
        _refuse_override(spec, target, drafter)
        history = History((), _named({each.name: each for each in read_plan(spec).segments}, segment))
    else:
        history = _compile_one(spec_of(spec, target, drafter), segment)
    if svg is not None:
        from ddtree_compile.passes.picture import arena_svg

        write_text(svg, arena_svg(*_packed(history.segment)))
    if as_json:
        print_json(_as_json(history, after, diff))
    elif arena:
        from ddtree_compile.passes.picture import arena_text

        buffers, packed = _packed(history.segment)
        typer.echo(arena_text(buffers, packed) if buffers else f"{segment}: no temporaries\n", nl=False)
    elif svg is None or after or diff:
        typer.echo(history.diff(after) if diff else history.text(after), nl=False)


@dataclass(frozen=True, slots=True)
class History:
    """A segment and the graph before and after each pass: (pass, before, after)."""

    steps: tuple[tuple[str, Graph, Graph], ...]
    segment: Segment

    def after(self, name: str | None) -> Graph:
        """The graph after a pass; None is the last."""
        if name is None:
            return self.segment.graph
        if name == LOGICAL:
            return self.steps[0][1]
        known = {step: after for step, _, after in self.steps}
        if name not in known:
            raise SpecError(f"--after {name}: no such pass; there are {', '.join((LOGICAL, *known))}")
        return known[name]

    def text(self, name: str | None) -> str:
        from ddtree_compile.ir.text import print_graph

        return print_graph(self.after(name))

    def diffs(self, name: str | None) -> list[tuple[str, Graph, Graph, str]]:
        """(pass, before, after, unified diff) of each pass, or of one."""
        from ddtree_compile.ir.text import diff_graphs

        self.after(name)
        chosen = [step for step in self.steps if name in (None, step[0])]
        return [(step, before, after, diff_graphs(before, after)) for step, before, after in chosen]

    def diff(self, name: str | None) -> str:
        """The diffs as text, each under a line that says what the pass did."""
        parts = [
            f"== {step}: {len(before.ops)} to {len(after.ops)} ops{'' if text else ', nothing changed'}\n"
            + (f"{text}\n" if text else "")
            for step, before, after, text in self.diffs(name)
        ]
        return "".join(parts)


def _refuse_override(path: Path, target: Path | None, drafter: Path | None) -> None:
    if is_plan(path) and (target or drafter):
        raise SpecError(f"{path}: is compiled already; --target and --drafter go with a spec")


def _all(path: Path, target: Path | None, drafter: Path | None) -> tuple[Segment, ...]:
    """Every segment of a spec or plan."""
    if is_plan(path):
        return read_plan(path).segments
    spec = spec_of(path, target, drafter)
    from ddtree_compile.place import place_segment

    with progress("compiling") as observe:
        return tuple(place_segment(graph, spec, observe) for graph in _graphs(spec).values())


def _compile_one(spec: CompileSpec, name: str) -> History:
    from ddtree_compile.place import place_segment

    steps: list[tuple[str, Graph, Graph]] = []
    graph = _named(_graphs(spec), name)
    with progress("compiling") as observe:

        def record(step: str, before: Graph, after: Graph, seconds: float) -> None:
            steps.append((step, before, after))
            observe(step, before, after, seconds)

        placed = place_segment(graph, spec, record)
    return History(tuple(steps), placed)


def _graphs(spec: CompileSpec) -> dict[str, Graph]:
    from ddtree_compile.compiler import read_models
    from ddtree_compile.models.round import build_program

    models = read_models(spec)
    return {graph.name: graph for graph in build_program(spec, models.target, models.drafter).segments}


T = typing.TypeVar("T")


def _named(known: dict[str, T], name: str) -> T:
    from ddtree_compile.machine import close_match

    if name not in known:
        raise SpecError(f"--segment {name}: no such segment{close_match(name, known)}; there are {', '.join(known)}")
    return known[name]


def _packed(segment: Segment) -> tuple[tuple[Buffer, ...], Arena]:
    from ddtree_compile.passes.buffers import Arena, lifetimes

    met = segment.temp_bytes == segment.lower_bound
    return lifetimes(segment.graph), Arena(segment.temp_bytes, dict(segment.offsets), segment.lower_bound, proved=met)


def _row(segment: Segment) -> dict[str, Any]:
    return {
        "name": segment.name,
        "ops": len(segment.graph.ops),
        "stages": max((op.stage for op in segment.graph.ops), default=-1) + 1,
        "arena": segment.temp_bytes,
        "lower_bound": segment.lower_bound,
        "bound_met": segment.temp_bytes == segment.lower_bound,
    }


def _list(rows: list[dict[str, Any]]) -> Table:
    table = Table("segment", "ops", "stages", "arena MiB", "lower bound", "met")
    for row in rows:
        sizes = (f"{row['arena'] / MIB:.3f}", f"{row['lower_bound'] / MIB:.3f}")
        name = escape(row["name"])
        table.add_row(name, str(row["ops"]), str(row["stages"]), *sizes, "yes" if row["bound_met"] else "no")
    return table


def _as_json(history: History, after: str | None, diff: bool) -> dict[str, Any]:
    found = _row(history.segment)
    if diff:
        passes = [
            {"pass": step, "ops_before": len(before.ops), "ops_after": len(new.ops), "diff": text.splitlines()}
            for step, before, new, text in history.diffs(after)
        ]
        return {**found, "passes": passes}
    return {**found, "graph": history.text(after).splitlines()}
