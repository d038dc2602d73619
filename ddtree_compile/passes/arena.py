"""What a packing is, and the check of one.

`check_arena` knows nothing of how buffers are packed and runs on every compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ALIGN = 256  # bytes; what a CUDA allocation and every vector load ask for, with room


@dataclass(frozen=True, slots=True)
class Buffer:
    """`size` bytes that are live from stage `first` to stage `last`, both included."""

    name: str
    size: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Arena:
    """Offsets in bytes, multiples of `align`. `lower_bound` is the peak of live bytes, each buffer rounded up to
    `align`; `proved` says that no arena of this alignment can be smaller than `size`."""

    size: int
    offsets: dict[str, int] = field(hash=False)
    lower_bound: int
    proved: bool
    align: int = ALIGN


class IllegalArena(ValueError):  # noqa: N818  # an arena can be illegal; the word says more than Error
    """An arena in which two live buffers overlap, or one lies outside, unaligned, missing or unknown."""


def check_arena(buffers: Sequence[Buffer], arena: Arena) -> None:
    """Raise IllegalArena unless every buffer has an aligned place inside the arena and no two that are live at one
    time share a byte."""
    names = [buffer.name for buffer in buffers]
    if len(set(names)) != len(names):
        raise IllegalArena("two buffers have one name")
    if missing := sorted(set(names) - set(arena.offsets)):
        raise IllegalArena(f"{missing[0]} has no offset")
    if extra := sorted(set(arena.offsets) - set(names)):
        raise IllegalArena(f"{extra[0]} has an offset and is no buffer")
    for buffer in buffers:
        start = arena.offsets[buffer.name]
        if buffer.size < 0 or buffer.last < buffer.first:
            raise IllegalArena(f"{buffer.name} is no buffer: {buffer}")
        if start % arena.align:
            raise IllegalArena(f"{buffer.name} at {start} is not aligned to {arena.align}")
        if start < 0 or start + buffer.size > arena.size:
            raise IllegalArena(f"{buffer.name} at {start} + {buffer.size} is outside the arena of {arena.size}")
    by_birth = sorted((buffer for buffer in buffers if buffer.size), key=lambda buffer: buffer.first)
    for index, one in enumerate(by_birth):
        low, high = arena.offsets[one.name], arena.offsets[one.name] + one.size
        for other in by_birth[index + 1 :]:
            if other.first > one.last:
                break
            start = arena.offsets[other.name]
            if start < high and low < start + other.size:
                raise IllegalArena(f"{one.name} and {other.name} share bytes while both are live at {other.first}")
    if arena.lower_bound > arena.size:
        raise IllegalArena(f"the size {arena.size} is below its own lower bound {arena.lower_bound}")
