"""Options and arguments that more than one command takes, each written once; and how a command prints."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ddtree_compile import __version__
from ddtree_compile.errors import DeviceError, SpecError

PIPE_COLUMNS = 120  # of a table that goes into a file or a pipe


class LogLevel(StrEnum):
    """How much of its work a command tells on stderr."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ddtree-compile {__version__}")
        raise typer.Exit


def _start_logging(level: LogLevel) -> LogLevel:
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(message)s", stream=sys.stderr, force=True)
    return level


SpecPath = Annotated[Path, typer.Argument(metavar="SPEC", help="A spec: the TOML file that names models and buckets.")]
SpecOrPlan = Annotated[Path, typer.Argument(metavar="SPEC", help="A spec (TOML), or a plan file that `plan -o` wrote.")]
TargetDir = Annotated[
    Path | None, typer.Option("--target", metavar="DIR", help="Another target than the spec's.", show_default=False)
]
DrafterDir = Annotated[
    Path | None, typer.Option("--drafter", metavar="DIR", help="Another drafter than the spec's.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of tables.")]
Logging = Annotated[
    LogLevel, typer.Option("--log-level", callback=_start_logging, help="What to tell on stderr while working.")
]
Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
]


def console() -> Console:
    """Tables on stdout: as wide as the terminal, or `PIPE_COLUMNS` in a pipe."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=PIPE_COLUMNS)


def print_json(data: Any) -> None:
    """The only thing on stdout when a user asks for JSON."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def check_out(path: Path, read: Path) -> None:
    """SpecError when `path`, to be written, is the file that the command read."""
    if os.path.realpath(path) == os.path.realpath(read):
        raise SpecError(f"{path}: is the file that is read; name another one to write")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: to a temporary name beside it, then renamed. A link keeps leading to its file;
    a device or a pipe is written as it is."""
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises where a name is too long
        raise SpecError(f"{path}: is a directory; name a file to write")
    if not os.path.isdir(path.parent):  # noqa: PTH112 - same
        raise SpecError(f"{path}: its directory {path.parent} does not exist; create it first")
    path = Path(os.path.realpath(path))
    temporary = None
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())  # noqa: PTH101 - mkstemp gives a name
        os.replace(temporary, path)  # noqa: PTH105 - same
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise DeviceError(f"{path}: cannot be written: {error.strerror}") from None


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
