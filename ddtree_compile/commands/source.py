"""From the path a user names to a spec or a plan, telling on stderr how far a compile is."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ddtree_compile.errors import BundleError, SpecError

if TYPE_CHECKING:
    from ddtree_compile.ir.graph import Graph
    from ddtree_compile.passes import Observer
    from ddtree_compile.plan import Plan
    from ddtree_compile.spec import CompileSpec

log = logging.getLogger("ddtree_compile")

PLAN_HEAD = b'{\n  "format":'  # how `plan -o` begins a file


def spec_of(path: Path, target: Path | None, drafter: Path | None) -> CompileSpec:
    """The spec at `path`, its model directories overridden where flags say so."""
    from ddtree_compile.spec import read_spec

    if is_plan(path):
        raise SpecError(f"{path}: is a plan, not a spec; name the spec's TOML file")
    return read_spec(path).override(target, drafter)


def is_plan(path: Path) -> bool:
    """Whether a path names a plan file rather than a spec."""
    if path.suffix == ".json":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(PLAN_HEAD)) == PLAN_HEAD
    except OSError:
        return False  # whoever reads it next says why


def read_plan(path: Path) -> Plan:
    """The plan file at `path`. BundleError says what is wrong with it."""
    from ddtree_compile.plan_json import from_json

    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BundleError(f"{path}: no such file; `ddtree-compile plan SPEC -o {path}` writes one") from None
    except UnicodeDecodeError as error:
        raise BundleError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from None
    return from_json(text, str(path))


@contextmanager
def progress(title: str) -> Generator[Observer]:
    """An observer of passes that shows on a terminal's stderr which segment is at which pass, and logs each."""
    stderr = Console(stderr=True)
    status = stderr.status(f"{title} ...") if stderr.is_terminal else None

    def observe(name: str, before: Graph, after: Graph, seconds: float) -> None:
        log.info("%s: %s, %d to %d ops, %.2f s", before.name, name, len(before.ops), len(after.ops), seconds)
        if status is not None:
            status.update(f"{title}: {before.name}, {name}")

    if status is None:
        yield observe
    else:
        with status:
            yield observe
