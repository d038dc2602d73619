"""`doctor`: what this machine has and what will therefore work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from ddtree_compile.commands.options import AsJson, Logging, LogLevel, Version, console, print_json

if TYPE_CHECKING:
    from ddtree_compile.doctor import Row

STYLES = {"ok": "green", "warn": "yellow", "no": "red"}


def doctor(
    as_json: AsJson = False,
    log_level: Logging = LogLevel.WARNING,
    version: Version = False,
) -> None:
    """Look at this machine and say what will work on it: plan, run, build, several GPUs; and what to install."""
    from ddtree_compile.doctor import examine

    report = examine()
    if as_json:
        print_json(report.to_dict())
        return
    to = console()
    to.print(f"ddtree-compile {report.version}")
    to.print(_table("this machine has", report.has))
    to.print(_table("so this works", report.works))


def _table(title: str, rows: tuple[Row, ...]) -> Table:
    table = Table(title, "", "found", "why, or what to do")
    for row in rows:
        table.add_row(row.name, f"[{STYLES[row.status]}]{row.status}[/]", escape(row.found), escape(row.reason))
    return table
