"""The arena of a segment: which bytes each temporary gets.

In: a staged graph. Out: `lifetimes` (which stages each TEMP value is live in), `pack` (an offset for each), and, from
`arena`, `check_arena`, which knows nothing of how `pack` works and runs on every compile.

Packing is dynamic storage allocation: rectangles whose time is fixed slide along the byte axis. The peak of live
bytes is a lower bound; meeting it is a proof that no smaller arena exists. What is tried, cheapest first, stops at
the bound: greedy best fit in a few orders; exact search of sections cut where few buffers cross, a repeated layer once;
stacking from the bottom up; orders learned from failures (a buffer that ends above the bound moves forward); an exact
search of the whole. Limits count steps, never time: equal graphs give equal arenas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddtree_compile.ir.graph import Graph, Space
from ddtree_compile.passes.arena import ALIGN, Arena, Buffer, IllegalArena, check_arena
from ddtree_compile.passes.pack_greedy import CHOICES, ORDERS, greedy, height_of, learn, neighbours_of, stack
from ddtree_compile.passes.pack_search import search
from ddtree_compile.passes.pack_sections import pack_sections

__all__ = ["ALIGN", "Arena", "Buffer", "IllegalArena", "check_arena", "lifetimes", "lower_bound", "pack"]

SEARCH_STEPS = 12_000  # buffers placed by the exact search


def lifetimes(graph: Graph) -> tuple[Buffer, ...]:
    """The TEMP values of a staged graph, live from the stage that first touches them to the last that does, in order
    of first appearance. ValueError when an op has no stage. What is private to a fused op's body is not here."""
    spans: dict[str, tuple[int, int, int]] = {}
    for op in graph.ops:
        if op.stage < 0:
            raise ValueError(f"{op.scope or op.kind}: the op has no stage; run the stage pass before the buffers")
        for value in op.values:
            if value.space == Space.TEMP:
                _, first, last = spans.get(value.name, (0, op.stage, op.stage))
                spans[value.name] = (value.type.nbytes, min(first, op.stage), max(last, op.stage))
    return tuple(Buffer(name, *span) for name, span in spans.items())


def lower_bound(buffers: Sequence[Buffer], align: int = 1) -> int:
    """The most bytes that are live in one stage, each buffer rounded up to `align`."""
    changes: dict[int, int] = {}
    for buffer in buffers:
        size = _round_up(buffer.size, align)
        changes[buffer.first] = changes.get(buffer.first, 0) + size
        changes[buffer.last + 1] = changes.get(buffer.last + 1, 0) - size
    live = peak = 0
    for stage in sorted(changes):
        live += changes[stage]
        peak = max(peak, live)
    return peak


def pack(buffers: Sequence[Buffer], align: int = ALIGN, steps: int = SEARCH_STEPS) -> Arena:
    """The smallest arena found. `steps` limits the exact search, which runs only where the bound is not met without
    it. ValueError when names repeat or a buffer ends before it begins."""
    if len({buffer.name for buffer in buffers}) != len(buffers):
        raise ValueError("two buffers have one name")
    for buffer in buffers:
        if buffer.last < buffer.first or buffer.size < 0:
            raise ValueError(f"buffer {buffer.name} ends before it begins: {buffer}")
    bound = lower_bound(buffers, align)
    offsets = {buffer.name: 0 for buffer in buffers}
    size, proved = bound, True
    for part in _split([replace(b, size=_round_up(b.size, align)) for b in buffers if b.size]):
        placed, part_proved = _pack_part(part, bound, align, steps)
        offsets.update({buffer.name: offset for buffer, offset in zip(part, placed, strict=True)})
        part_size = height_of(part, placed)
        if part_size > size:
            size, proved = part_size, part_proved
        elif part_size == size:
            proved = proved or part_proved
    return Arena(size, offsets, bound, proved, align)


def _round_up(size: int, align: int) -> int:
    return -(-size // align) * align


def _split(buffers: Sequence[Buffer]) -> list[list[Buffer]]:
    """The buffers in parts with a time between them at which nothing lives; each part can be packed on its own."""
    parts: list[list[Buffer]] = []
    end = 0
    for buffer in sorted(buffers, key=lambda buffer: buffer.first):
        if not parts or buffer.first > end:
            parts.append([])
            end = buffer.last
        parts[-1].append(buffer)
        end = max(end, buffer.last)
    return parts


def _pack_part(buffers: Sequence[Buffer], bound: int, align: int, steps: int) -> tuple[list[int], bool]:
    """Offsets for one part, and whether its height is proved the least (or reaches the bound of the whole)."""
    neighbours = neighbours_of(buffers)
    best: list[int] = []
    best_order: list[int] = []
    for key in ORDERS:
        order = sorted(range(len(buffers)), key=lambda i: (key(buffers[i]), i))
        for fit in (False, True):
            offsets = greedy(buffers, neighbours, order, fit)
            if not best or height_of(buffers, offsets) < height_of(buffers, best):
                best, best_order = offsets, order
            if height_of(buffers, best) <= bound:
                return best, True
    by_section = pack_sections(buffers, bound)
    if by_section is not None:
        return by_section, True
    for choice in CHOICES:
        offsets = stack(buffers, neighbours, choice)
        if height_of(buffers, offsets) < height_of(buffers, best):
            best, best_order = offsets, sorted(range(len(buffers)), key=offsets.__getitem__)
        if height_of(buffers, best) <= bound:
            return best, True
    best = learn(buffers, neighbours, best_order, best, bound)
    if height_of(buffers, best) <= bound:
        return best, True
    return search(buffers, neighbours, best, max(bound, lower_bound(buffers)), align, steps)
