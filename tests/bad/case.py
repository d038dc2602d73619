"""A bad input, as data: what is done to good files, the command line, and the one line that must answer."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Change = Callable[[Path], None]
DROP = object()  # as a new value: take the key out
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Case:
    """`does` is done to a copy of the good files (`{root}` in `args`); `says` is searched in the error's line.

    `library`: the same call from Python raises the same text.
    """

    name: str
    args: str
    code: int
    says: str
    does: Change | tuple[Change, ...] = ()
    library: bool = True

    def prepare(self, root: Path) -> None:
        for change in self.does if isinstance(self.does, tuple) else (self.does,):
            change(root)


def config(path: str, **changes: Any) -> Change:
    """Keys of a JSON file, with `__` between levels, set or dropped."""

    def change(root: Path) -> None:
        file = root / path
        data = json.loads(file.read_text())
        for key, value in changes.items():
            *parents, last = key.split("__")
            inner = data
            for parent in parents:
                inner = inner[parent]
            if value is DROP:
                del inner[last]
            else:
                inner[last] = value
        file.write_text(json.dumps(data))

    return change


def write(path: str, content: str | bytes) -> Change:
    """A file with this content."""
    raw = content.encode() if isinstance(content, str) else content
    return lambda root: _write(root / path, raw)


def replace(path: str, old: str, new: str) -> Change:
    """A text file with `old`, which must be there, turned into `new`."""

    def change(root: Path) -> None:
        text = (root / path).read_text()
        assert old in text
        (root / path).write_text(text.replace(old, new))

    return change


def remove(path: str) -> Change:
    return lambda root: (root / path).unlink()


def cut(path: str, keep: int) -> Change:
    """A file that ends early: its first `keep` bytes; a negative number counts from its end."""
    return lambda root: _write(root / path, (root / path).read_bytes()[:keep])


def tensors(path: str, **changes: Any) -> Change:
    """Tensors of `path`/model.safetensors (`__` for dots) replaced by a tensor or by a function of the old one."""

    def change(root: Path) -> None:
        found = load_file(root / path / WEIGHTS)
        for key, new in changes.items():
            name = key.replace("__", ".")
            if new is DROP:
                del found[name]
            else:
                found[name] = new if isinstance(new, torch.Tensor) else new(found[name]).contiguous()
        save_file(found, root / path / WEIGHTS)

    return change


def raw_weights(path: str, header: bytes | dict[str, Any], data: bytes = b"") -> Change:
    """A safetensors file written by hand."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return lambda root: _write(root / path / WEIGHTS, struct.pack("<Q", len(text)) + text + data)


def shards(path: str, *, index: bool = True) -> Change:
    """The weights in two numbered files, with or without an index."""

    def change(root: Path) -> None:
        found = load_file(root / path / WEIGHTS)
        (root / path / WEIGHTS).unlink()
        places = {name: f"model-{i % 2 + 1:05d}-of-00002.safetensors" for i, name in enumerate(sorted(found))}
        for file in set(places.values()):
            save_file({name: found[name] for name in found if places[name] == file}, root / path / file)
        if index:
            (root / path / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": places}))

    return change


def _write(path: Path, raw: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
