"""Imports run one way (the corridor's layers), and the runtime lives without Triton and the compiler."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddtree_compile

PACKAGE = Path(ddtree_compile.__file__).parent
FRONT = {"errors", "machine", "spec"}
LOWER = FRONT | {"ir"}

# A top-level module or folder, and what its files may import when they are imported themselves.
MAY_IMPORT = {
    "errors": set[str](),
    "machine": {"errors"},
    "spec": {"errors", "machine"},
    "embedded": set[str](),
    "text": {"errors"},
    "ir": {"errors", "machine"},
    "plan": {"errors", "machine", "ir"},
    "runtime": {"errors", "machine", "ir", "plan"},
    "models": LOWER,
    "passes": LOWER,
    "kernels": LOWER,
    "acceptance": LOWER,
    "memory": LOWER | {"models", "plan"},
    "price": LOWER | {"models", "plan", "acceptance", "memory"},
    "place": LOWER | {"plan", "models", "passes", "kernels"},
    "plan_check": LOWER | {"plan", "passes"},
    "plan_json": LOWER | {"plan", "passes", "plan_check"},
}
ABOVE = {"compiler", "commands", "cli", "doctor", "__init__"}  # these may import what they like, but for the commands
EDGE = {"commands", "cli"}
INSIDE_FUNCTIONS = {"runtime/engine.py": {"compiler", "spec"}}  # Engine.from_spec compiles


def _files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _part(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def _names(node: ast.AST) -> Iterator[str]:
    """The parts of the package that an import names; the bare package (its version) is none."""
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    else:
        return
    for module in modules:
        first, *rest = module.split(".")
        if first == "ddtree_compile" and rest and rest[0] in MAY_IMPORT.keys() | ABOVE:
            yield rest[0]


def _imports(path: Path, *, inside: bool) -> set[str]:
    """What a file imports at module level, or `inside` functions; imports for type checkers alone do not count."""
    found: set[str] = set()

    def visit(node: ast.AST, depth: int) -> None:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if bool(depth) == inside:
            found.update(_names(node))
        deeper = depth + isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, deeper)

    visit(ast.parse(path.read_text(encoding="utf-8")), 0)
    return found - {_part(path)}


def test_every_part_has_a_layer():
    assert {_part(path) for path in _files()} <= MAY_IMPORT.keys() | ABOVE


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    part, imported = _part(path), _imports(path, inside=False)
    if part in ABOVE:
        assert part in EDGE or not imported & EDGE
        return
    assert imported <= MAY_IMPORT[part]
    name = str(path.relative_to(PACKAGE))
    assert _imports(path, inside=True) <= MAY_IMPORT[part] | INSIDE_FUNCTIONS.get(name, set())


def test_layers_have_no_cycle():
    done: set[str] = set()
    while len(done) < len(MAY_IMPORT):
        free = {part for part, below in MAY_IMPORT.items() if part not in done and below <= done}
        assert free
        done |= free


BLOCKED = """
import importlib, pkgutil, sys
for name in ("triton", "ddtree_compile.compiler", "ddtree_compile.kernels", "ddtree_compile.passes",
             "ddtree_compile.models", "ddtree_compile.place", "ddtree_compile.spec"):
    sys.modules[name] = None  # importing it is an ImportError now
import ddtree_compile.runtime
for module in pkgutil.walk_packages(ddtree_compile.runtime.__path__, "ddtree_compile.runtime."):
    importlib.import_module(module.name)
import ddtree_compile.text
"""


def test_runtime_imports_without_triton_and_compiler():
    done = subprocess.run([sys.executable, "-c", BLOCKED], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
