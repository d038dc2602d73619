"""`plan`: compile a spec, say what it costs and whether it fits, and write the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ddtree_compile.commands.options import (
    AsJson,
    DrafterDir,
    Logging,
    LogLevel,
    SpecPath,
    TargetDir,
    Version,
    check_out,
    console,
    print_json,
    write_text,
)
from ddtree_compile.commands.source import progress, spec_of

GIB = 1 << 30
MEMORY = {
    "weights": "both models, laid out", "cache": "K/V of every sequence", "arena": "temporaries of all segments",
    "round": "what crosses segments", "peer": "landing areas of the group",
}  # fmt: skip

Out = Annotated[
    Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write the plan here.", show_default=False)
]


def plan(
    spec: SpecPath,
    out: Out = None,
    target: TargetDir = None,
    drafter: DrafterDir = None,
    as_json: AsJson = False,
    log_level: Logging = LogLevel.WARNING,
    version: Version = False,
) -> None:
    """Compile SPEC and print what a round of each tree size costs on its GPU, and whether it fits in memory.

    Needs the models' configs only: no checkpoint, no GPU.
    """
    read = spec_of(spec, target, drafter)
    if out is not None:
        check_out(out, spec)
    from ddtree_compile.compiler import compile_spec
    from ddtree_compile.plan_json import to_json

    with progress("compiling") as observe:
        made = compile_spec(read, observe)
    if out is not None:
        write_text(out, to_json(made))
    if as_json:
        print_json(made.report)
        return
    show(made.report, console())
    if out is not None:
        typer.echo(f"wrote {out}")


def show(report: dict[str, Any] | Any, to: Console) -> None:
    """The report for a reader: memory, times and tokens by bucket and context, and what to know about the figures."""
    ranks = report["tensor_parallel"]
    to.print(f"{report['gpu']} x {ranks}: figures are for one rank" if ranks > 1 else report["gpu"])
    to.print(_memory(report["memory"]))
    to.print(_verdict(report["memory"]))
    met = [name for name, is_met in report["arena_bound_met"].items() if not is_met]
    to.print(
        f"arena: lower bound {report['arena_lower_bound'] / (1 << 20):.1f} MiB, "
        + ("met by every segment" if not met else f"not met by {', '.join(met)}"), markup=False
    )  # fmt: skip
    contexts = list(dict.fromkeys(row["context"] for row in report["buckets"]))
    to.print(_times(report, contexts))
    if report["best"][str(contexts[0])] is not None:
        to.print(_rates(report, contexts))
    to.print(_bytes(report, contexts[0]))
    for note in map(escape, report["notes"]):
        to.print(f"[bold]{note}[/bold]" if note.startswith("warning") else f"[dim]note: {note}[/dim]")


def _memory(memory: dict[str, Any]) -> Table:
    table = Table("memory of a rank", "GiB", "", title_justify="left")
    for name, meaning in MEMORY.items():
        table.add_row(name, f"{memory[name] / GIB:.3f}", meaning)
    table.add_row("total", f"{memory['total'] / GIB:.3f}", f"of {memory['capacity'] / GIB:.3f} GiB", style="bold")
    return table


def _verdict(memory: dict[str, Any]) -> str:
    if memory["fits"]:
        return f"fits, {(memory['capacity'] - memory['total']) / GIB:.3f} GiB free"
    lines = [f"does not fit: {memory['over'] / GIB:.3f} GiB too much"]
    lines += [f"  {c['set']} = {c['to']} would fit, with {c['total'] / GIB:.3f} GiB" for c in memory["advice"]]
    return "\n".join(lines if memory["advice"] else [*lines, "  no single change of the spec would make it fit"])


def _by_round(report: dict[str, Any]) -> dict[tuple[str, int], dict[int, dict[str, Any]]]:
    found: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for row in report["buckets"]:
        found.setdefault((row["shape"], row["nodes"]), {})[row["context"]] = row
    return found


def _times(report: dict[str, Any], contexts: list[int]) -> Table:
    table = Table("round", "kernels", "experts", *map(_context, contexts), title="a round in ms: floor / predicted")
    for (shape, nodes), rows in _by_round(report).items():
        first = next(iter(rows.values()))
        cells = [f"{rows[c]['floor_us'] / 1e3:.2f} / {rows[c]['predicted_us'] / 1e3:.2f}" for c in contexts]
        touched = "" if first["experts_touched"] is None else str(first["experts_touched"])
        table.add_row(_round(shape, nodes), str(first["kernels"]), touched, *cells)
    return table


def _rates(report: dict[str, Any], contexts: list[int]) -> Table:
    table = Table("round", "tokens", *map(_context, contexts), title="tokens a second, predicted; the best is marked")
    best = {c: (report["best_shape"][str(c)], report["best"][str(c)]) for c in contexts}
    for kind, rows in _by_round(report).items():
        cells = [f"{rows[c]['tokens_per_second']:.1f}{' *' if best[c] == kind else ''}" for c in contexts]
        table.add_row(_round(*kind), f"{next(iter(rows.values()))['expected_tokens']:.2f}", *cells)
    return table


def _bytes(report: dict[str, Any], context: int) -> Table:
    kinds = _by_round(report)
    names = list(dict.fromkeys(name for rows in kinds.values() for name in rows[context]["bytes"]))
    title = f"compulsory bytes of a round at {_context(context)} tokens, GiB"
    table = Table("", *[_round(*kind) for kind in kinds], title=title)
    for name in names:
        cells = [rows[context]["bytes"].get(name, 0) / GIB for rows in kinds.values()]
        table.add_row(name.replace("_", " "), *[f"{cell:.3f}" if cell else "" for cell in cells])
    totals = [f"{sum(rows[context]['bytes'].values()) / GIB:.3f}" for rows in kinds.values()]
    table.add_row("total", *totals, style="bold")
    return table


def _round(shape: str, nodes: int) -> str:
    return shape if shape == "plain" else f"{shape} {nodes}"


def _context(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
