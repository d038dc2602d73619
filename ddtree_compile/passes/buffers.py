"""The arena of a segment: which bytes each temporary gets.

In: a staged graph. Out: `lifetimes` (which stages each TEMP value is live in), `pack` (an offset for each), and
`check_arena`, which knows nothing of how `pack` works and runs on every compile.

Packing is dynamic storage allocation: rectangles whose time is fixed slide along the byte axis. The peak of live
bytes is a lower bound; meeting it is a proof that no smaller arena exists. What is tried, cheapest first, stops at
the bound: greedy best fit in a few orders; stacking from the bottom up; orders learned from failures (a buffer that
ends above the bound moves forward); an exact search over canonical packings, in which buffers come in rising offset and
each rests on what is below it, as in minimalloc (Moffitt, ASPLOS 2023). Limits count steps, never time: equal graphs
give equal arenas.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ddtree_compile.ir.graph import Graph, Space

ALIGN = 256  # bytes; what a CUDA allocation and every vector load ask for, with room
LEARNING_ROUNDS = 60  # greedy packings with a learned order
SEARCH_STEPS = 12_000  # buffers placed by the exact search


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
        part_size = _height(part, placed)
        if part_size > size:
            size, proved = part_size, part_proved
        elif part_size == size:
            proved = proved or part_proved
    return Arena(size, offsets, bound, proved, align)


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


def _height(buffers: Sequence[Buffer], offsets: Sequence[int]) -> int:
    return max((offset + buffer.size for buffer, offset in zip(buffers, offsets, strict=True)), default=0)


def _pack_part(buffers: Sequence[Buffer], bound: int, align: int, steps: int) -> tuple[list[int], bool]:
    """Offsets for one part, and whether its height is proved the least (or reaches the bound of the whole)."""
    neighbours = _neighbours(buffers)
    best: list[int] = []
    best_order: list[int] = []
    for key in _ORDERS:
        order = sorted(range(len(buffers)), key=lambda i: (key(buffers[i]), i))
        for fit in (False, True):
            offsets = _greedy(buffers, neighbours, order, fit)
            if not best or _height(buffers, offsets) < _height(buffers, best):
                best, best_order = offsets, order
            if _height(buffers, best) <= bound:
                return best, True
    for choice in _CHOICES:
        offsets = _stack(buffers, neighbours, choice)
        if _height(buffers, offsets) < _height(buffers, best):
            best, best_order = offsets, sorted(range(len(buffers)), key=offsets.__getitem__)
        if _height(buffers, best) <= bound:
            return best, True
    best = _learn(buffers, neighbours, best_order, best, bound)
    if _height(buffers, best) <= bound:
        return best, True
    return _search(buffers, neighbours, best, max(bound, lower_bound(buffers)), align, steps)


# What to place first, by falling importance.
_ORDERS: tuple[Callable[[Buffer], tuple[int, ...]], ...] = (
    lambda b: (b.first, -b.size),
    lambda b: (-b.size, b.first - b.last),
    lambda b: (-b.size * (b.last - b.first + 1),),
    lambda b: (b.first - b.last, -b.size),
    lambda b: (-b.last, -b.size),
)


# What to stack next, least first: from where it would rest, how full its life is (the most of skyline and bytes
# still to come), its length and its size.
_CHOICES: tuple[Callable[[int, int, int, int], tuple[int, ...]], ...] = (
    lambda rest, full, length, size: (rest, -length, -size, -full),
    lambda rest, full, length, size: (rest, -full, -length, -size),
    lambda rest, full, length, size: (2 * rest - full, -length, -size),
)


def _neighbours(buffers: Sequence[Buffer]) -> list[list[int]]:
    """For each buffer the others that are live at some time with it."""
    found: list[list[int]] = [[] for _ in buffers]
    by_birth = sorted(range(len(buffers)), key=lambda i: buffers[i].first)
    for at, i in enumerate(by_birth):
        for j in by_birth[at + 1 :]:
            if buffers[j].first > buffers[i].last:
                break
            found[i].append(j)
            found[j].append(i)
    return found


def _greedy(buffers: Sequence[Buffer], neighbours: list[list[int]], order: Sequence[int], best_fit: bool) -> list[int]:
    """Each buffer in turn at the lowest gap that holds it, or (`best_fit`) at the tightest."""
    sizes = [buffer.size for buffer in buffers]
    offsets = [-1] * len(buffers)
    for i in order:
        taken = sorted((offsets[j], sizes[j]) for j in neighbours[i] if offsets[j] >= 0)
        size, top, place, slack = sizes[i], 0, -1, 0
        for start, length in taken:
            room = start - top - size
            if room >= 0 and (place < 0 or room < slack):
                place, slack = top, room
                if not best_fit:
                    break
            top = max(top, start + length)
        offsets[i] = top if place < 0 else place
    return offsets


def _stack(
    buffers: Sequence[Buffer], neighbours: list[list[int]], choice: Callable[[int, int, int, int], tuple[int, ...]]
) -> list[int]:
    """Each buffer on the skyline over its life, the next one chosen by `choice`."""
    times = sorted({buffer.first for buffer in buffers})
    spans = [slice(bisect_left(times, b.first), bisect_right(times, b.last)) for b in buffers]
    fill = [0] * len(times)  # the skyline and, on it, what is still to come
    for buffer, span in zip(buffers, spans, strict=True):
        fill[span] = [height + buffer.size for height in fill[span]]
    ahead, rests = list(fill), [0] * len(buffers)

    def rank(i: int) -> tuple[tuple[int, ...], int]:
        return choice(rests[i], max(fill[spans[i]]), spans[i].stop - spans[i].start, buffers[i].size), i

    ranks = {i: rank(i) for i in range(len(buffers))}
    while ranks:
        i, _ = min(ranks.items(), key=lambda item: item[1])
        del ranks[i]
        span, top = spans[i], rests[i] + buffers[i].size
        ahead[span] = [rest - buffers[i].size for rest in ahead[span]]
        fill[span] = [top + rest for rest in ahead[span]]
        for j in neighbours[i]:
            if j in ranks:
                rests[j] = max(rests[j], top)
                ranks[j] = rank(j)
    return rests


def _learn(
    buffers: Sequence[Buffer], neighbours: list[list[int]], order: Sequence[int], best: list[int], bound: int
) -> list[int]:
    """Greedy again and again, lowest gap first; what ended above the bound is placed earlier in the next round."""
    count = len(buffers)
    rank = [0.0] * count
    for place, i in enumerate(order):
        rank[i] = float(place)
    for turn in range(LEARNING_ROUNDS):
        offsets = _greedy(buffers, neighbours, sorted(range(count), key=lambda i: (rank[i], i)), best_fit=False)
        height = _height(buffers, offsets)
        if height < _height(buffers, best):
            best = offsets
        if height <= bound:
            break
        # A little more than the last time, so that a cycle of orders is left.
        push = count * (0.1 + 0.02 * (turn % 11))
        for i, buffer in enumerate(buffers):
            over = offsets[i] + buffer.size - bound
            if over > 0:
                rank[i] -= push * (1 + over / buffer.size if over < buffer.size else 2)
    return best


def _search(
    buffers: Sequence[Buffer], neighbours: list[list[int]], best: list[int], bound: int, align: int, steps: int
) -> tuple[list[int], bool]:
    """Exact: ask for the bound itself first, then for less than the best, until none exists or the steps are spent."""
    share = steps // 3
    offsets, left = _fit(buffers, neighbours, bound, share)
    if offsets is not None:
        return offsets, True
    # Nothing is as small as the bound (proved when steps were left): look for anything smaller than the best.
    steps += left - share
    while steps > 0:
        offsets, left = _fit(buffers, neighbours, _height(buffers, best) - align, steps)
        if offsets is None:
            return best, left > 0
        best, steps = offsets, left
    return best, False


def _fit(
    buffers: Sequence[Buffer], neighbours: list[list[int]], capacity: int, steps: int
) -> tuple[list[int] | None, int]:
    """A packing of at most `capacity` bytes, or None; and the steps left (0: None proves nothing).

    Buffers come in rising (offset, index), each on the skyline over its life. A choice is left out when an unplaced
    buffer would fit whole below it: the packing whose offsets have the least sum has no such place.
    """
    times = sorted({buffer.first for buffer in buffers})
    spans = [(bisect_left(times, b.first), bisect_right(times, b.last)) for b in buffers]
    sizes = [buffer.size for buffer in buffers]
    ahead = [0] * len(times)
    for size, (start, end) in zip(sizes, spans, strict=True):
        for t in range(start, end):
            ahead[t] += size
    if max(ahead) > capacity:
        return None, steps

    def choices(state: _Packing) -> list[int]:
        """What may come next, the best last: the lowest, then the one that lives longest."""
        floor = state.last[0]
        if any(ahead and max(height, floor) + ahead > capacity for height, ahead in zip(*state.profile, strict=True)):
            return []
        rests = state.rests
        ceiling = min(rests[i] + sizes[i] for i in state.unplaced)
        allowed = [i for i in state.unplaced if rests[i] < ceiling and (rests[i], i) > state.last]
        return sorted(allowed, key=lambda i: (-rests[i], spans[i][1] - spans[i][0], sizes[i], -i))

    def place(state: _Packing, i: int) -> _Packing:
        offset, (start, end) = state.rests[i], spans[i]
        top = offset + sizes[i]
        skyline, ahead = list(state.profile[0]), list(state.profile[1])
        for t in range(start, end):
            skyline[t] = top
            ahead[t] -= sizes[i]
        rests = list(state.rests)
        for j in neighbours[i]:
            if j in state.unplaced and rests[j] < top:
                rests[j] = top
        return _Packing((skyline, ahead), rests, state.unplaced - {i}, (offset, i))

    state = _Packing(([0] * len(times), ahead), [0] * len(buffers), frozenset(range(len(buffers))), (0, -1))
    pending = [(state, choices(state))]
    while pending:
        state, allowed = pending[-1]
        if not allowed:
            pending.pop()
            continue
        if steps <= 0:
            return None, 0
        steps -= 1
        state = place(state, allowed.pop())
        if not state.unplaced:
            return state.rests, steps
        pending.append((state, choices(state)))
    return None, steps


@dataclass(frozen=True, slots=True)
class _Packing:
    """A partial packing: `profile` holds, for each time, the skyline and the bytes still to come; `rests` the offset
    of each placed buffer, and where each other one would rest now; `last` the (offset, index) placed last."""

    profile: tuple[list[int], list[int]]
    rests: list[int]
    unplaced: frozenset[int]
    last: tuple[int, int]
