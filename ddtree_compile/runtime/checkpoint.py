"""A model directory's safetensors: headers are read at once and checked, tensors one at a time when asked for.

The format: 8 bytes little-endian, the header's length; the header, JSON (name to dtype, shape, data_offsets); the
data. Errors are `CheckpointError`s of one line that name the file and the tensor.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ddtree_compile.errors import CheckpointError

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"

_DTYPES: Final[dict[str, torch.dtype]] = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
}

_LENGTH_BYTES: Final = 8
_MAX_HEADER: Final = 100_000_000  # the limit of the reference implementation
_SHARD: Final = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    shape: tuple[int, ...]
    dtype: str  # as the file spells it
    start: int  # of the data, from the start of the file
    nbytes: int


class Checkpoint:
    """The tensors of a directory: with an index, as one `model.safetensors`, or as shards without an index."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._entries: dict[str, _Entry] = {}
        index = _read_index(directory)
        shards = _shards(directory) if index is None else sorted(set(index.values()))
        for shard in shards:
            path = directory / shard
            for name, entry in _read_header(path).items():
                if name in self._entries:
                    raise CheckpointError(f"{path}: tensor {name} is also in {self._entries[name].path.name}")
                self._entries[name] = entry
        for name, shard in (index or {}).items():
            if name not in self._entries or self._entries[name].path.name != shard:
                raise CheckpointError(f"{directory / shard}: tensor {name} is not there, but {INDEX} says it is")

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def names(self) -> tuple[str, ...]:
        """Every tensor's name, sorted."""
        return tuple(sorted(self._entries))

    def info(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """(shape, dtype) of a tensor, from its header. CheckpointError when it is absent or of a dtype we lack."""
        entry = self._entry(name)
        return entry.shape, _DTYPES[entry.dtype]

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The tensor, or its rows [start, stop) along the first dimension; only those bytes are read."""
        entry = self._entry(name)
        shape, start, nbytes = entry.shape, entry.start, entry.nbytes
        if rows is not None:
            first, last = rows
            if not shape or not 0 <= first <= last <= shape[0]:
                raise CheckpointError(
                    f"{entry.path}: tensor {name} of shape {list(shape)} has no rows {first} to {last}"
                )
            row_bytes = nbytes // shape[0] if shape[0] else 0
            shape, start, nbytes = (last - first, *shape[1:]), start + first * row_bytes, (last - first) * row_bytes
        if not nbytes:
            return torch.empty(shape, dtype=_DTYPES[entry.dtype])
        buffer = bytearray(nbytes)
        with entry.path.open("rb") as file:
            file.seek(start)
            if file.readinto(buffer) != nbytes:
                raise CheckpointError(f"{entry.path}: ends inside tensor {name}; the file is truncated")
        return torch.frombuffer(buffer, dtype=_DTYPES[entry.dtype]).view(shape)

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.directory}: tensor {name} is missing")
        if entry.dtype not in _DTYPES:
            raise CheckpointError(
                f"{entry.path}: tensor {name} has dtype {entry.dtype} (supported: {', '.join(sorted(_DTYPES))})"
            )
        return entry


def _read_index(directory: Path) -> dict[str, str] | None:
    """Tensor name to shard file name, or None without an index."""
    path = directory / INDEX
    if not path.exists():
        return None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        shards = index["weight_map"]
        valid = all(isinstance(shard, str) and Path(shard).name == shard for shard in shards.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not an index with a weight_map ({error})") from None
    if not valid:
        raise CheckpointError(f"{path}: weight_map holds something other than file names of its own directory")
    for shard in sorted(set(shards.values())):
        if not (directory / shard).exists():
            raise CheckpointError(f"{path}: names {shard}, which is missing")
    return shards


def _shards(directory: Path) -> list[str]:
    """The files to read without an index: `model.safetensors`, or a complete set of shards, or whatever is there."""
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if not found:
        raise CheckpointError(f"{directory}: holds no safetensors")
    if SINGLE in found:
        return [SINGLE]
    numbered = {name: match for name in found if (match := _SHARD.fullmatch(name))}
    if not numbered:
        return found
    for count in {match[2] for match in numbered.values()}:
        for number in range(1, int(count) + 1):
            name = f"model-{number:0{len(count)}d}-of-{count}.safetensors"
            if name not in numbered:
                raise CheckpointError(f"{directory / name}: this shard is missing")
    return list(numbered)


def _read_header(path: Path) -> dict[str, _Entry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER):
                raise CheckpointError(f"{path}: its header does not fit; the file is truncated or not safetensors")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is broken ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is broken (not a JSON object)")
    header.pop("__metadata__", None)
    data = _LENGTH_BYTES + length
    return {name: _read_entry(path, name, fields, data, size) for name, fields in header.items()}


def _read_entry(path: Path, name: str, fields: Any, data: int, size: int) -> _Entry:
    try:
        shape, dtype = tuple(fields["shape"]), str(fields["dtype"])
        start, stop = fields["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        whole, shape, dtype, start, stop = False, (), "", 0, 0
    if not whole or stop < start:
        raise CheckpointError(f"{path}: the header's entry of tensor {name} is broken")
    if data + stop > size:
        raise CheckpointError(f"{path}: ends before tensor {name} does; the file is truncated")
    known = _DTYPES.get(dtype)
    if known is not None and math.prod(shape) * known.itemsize != stop - start:
        raise CheckpointError(f"{path}: tensor {name} has {stop - start} bytes, not those of {dtype}{list(shape)}")
    return _Entry(path, shape, dtype, data + start, stop - start)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"tensor {name} stands twice")
        found[name] = value
    return found
