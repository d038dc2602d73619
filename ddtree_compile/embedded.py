"""The model that comes with the package: a small Kimi-shaped target and its drafter, for a CPU."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def embedded_spec() -> Path:
    """The spec of the embedded model, as `read_spec` and `Engine.from_spec` take it."""
    return Path(str(resources.files("ddtree_compile") / "assets" / "spec.toml"))
