"""Packing by exact search over canonical packings: buffers come in rising offset and each rests on what is below it, as
in minimalloc (Moffitt, ASPLOS 2023). Limits count steps (buffers placed), never time: equal buffers give equal results.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ddtree_compile.passes.arena import Buffer
from ddtree_compile.passes.pack_greedy import height_of


def search(
    buffers: Sequence[Buffer], neighbours: list[list[int]], best: list[int], bound: int, align: int, steps: int
) -> tuple[list[int], bool]:
    """Exact: ask for the bound itself first, then for less than the best, until none exists or the steps are spent."""
    share = steps // 3
    offsets, left = fit(buffers, neighbours, bound, share)
    if offsets is not None:
        return offsets, True
    # Nothing is as small as the bound (proved when steps were left): look for anything smaller than the best.
    steps += left - share
    while steps > 0:
        offsets, left = fit(buffers, neighbours, height_of(buffers, best) - align, steps)
        if offsets is None:
            return best, left > 0
        best, steps = offsets, left
    return best, False


def fit(
    buffers: Sequence[Buffer],
    neighbours: list[list[int]],
    capacity: int,
    steps: int,
    pins: Mapping[int, int] = MappingProxyType({}),
) -> tuple[list[int] | None, int]:
    """A packing of at most `capacity` bytes, or None; and the steps left (0: None proves nothing). `pins` are the
    buffers (by index) whose offsets are given, no two of them in each other's way.

    Buffers come in rising (offset, index), each on the skyline over its life or on the pin that leaves no room there.
    A choice is left out when an unplaced buffer would fit whole below it: the packing whose offsets have the least sum
    has no such place.
    """
    problem = _pose(buffers, neighbours, capacity, pins)
    state = _start(problem)
    if max(state.profile[1]) > capacity or any(pins[i] + problem.sizes[i] > capacity for i in pins):
        return None, steps
    if not state.unplaced:
        return state.rests, steps
    pending = [(state, _choices(problem, state))]
    while pending:
        state, allowed = pending[-1]
        if not allowed:
            pending.pop()
            continue
        if steps <= 0:
            return None, 0
        steps -= 1
        state = _place(problem, state, allowed.pop())
        if state.unplaced:
            pending.append((state, _choices(problem, state)))
        elif height_of(buffers, state.rests) <= capacity:
            return state.rests, steps
    return None, steps


@dataclass(frozen=True, slots=True)
class _Problem:
    """Buffers by index: `sizes`, `spans` (of the times at which any is born), `neighbours`; `pins` in rising offset,
    and `beside` for each buffer the (start, end) of the pins in its life, rising too."""

    capacity: int
    sizes: list[int]
    spans: list[range]
    neighbours: list[list[int]]
    pins: dict[int, int]
    rising: list[int]
    beside: list[list[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class _Packing:
    """A partial packing: `profile` holds, for each time, the skyline and the bytes still to come; `rests` the offset
    of each placed buffer, and where each other one would rest now; `last` the (offset, index) placed last; `passed`
    how many pins, in rising order, the skyline has taken in."""

    profile: tuple[list[int], list[int]]
    rests: list[int]
    unplaced: frozenset[int]
    last: tuple[int, int]
    passed: int


def _pose(buffers: Sequence[Buffer], neighbours: list[list[int]], capacity: int, pins: Mapping[int, int]) -> _Problem:
    times = sorted({buffer.first for buffer in buffers})
    spans = [range(bisect_left(times, b.first), bisect_right(times, b.last)) for b in buffers]
    sizes = [buffer.size for buffer in buffers]
    rising = sorted(pins, key=lambda i: (pins[i], i))
    beside: list[list[tuple[int, int]]] = [[] for _ in buffers]
    for i in rising:
        for j in neighbours[i]:
            beside[j].append((pins[i], pins[i] + sizes[i]))
    return _Problem(capacity, sizes, spans, neighbours, dict(pins), rising, beside)


def _start(problem: _Problem) -> _Packing:
    count = len(problem.sizes)
    ahead = [0] * max((span.stop for span in problem.spans), default=1)
    for size, span in zip(problem.sizes, problem.spans, strict=True):
        for t in span:
            ahead[t] += size
    rests = [problem.pins[i] if i in problem.pins else _rest(problem, i, 0) for i in range(count)]
    return _Packing(([0] * len(ahead), ahead), rests, frozenset(range(count)) - problem.pins.keys(), (0, -1), 0)


def _rest(problem: _Problem, i: int, top: int) -> int:
    """The lowest place for buffer `i` from `top` up that no pin is in."""
    for low, high in problem.beside[i]:
        if low < top + problem.sizes[i] and top < high:
            top = high
    return top


def _choices(problem: _Problem, state: _Packing) -> list[int]:
    """What may come next, the best last: the lowest, then the one that lives longest."""
    sizes, spans, rests, floor = problem.sizes, problem.spans, state.rests, state.last[0]
    for height, ahead in zip(*state.profile, strict=True):
        if ahead and max(height, floor) + ahead > problem.capacity:
            return []
    ceiling = min(rests[i] + sizes[i] for i in state.unplaced)
    allowed = [i for i in state.unplaced if rests[i] < ceiling and (rests[i], i) > state.last]
    return sorted(allowed, key=lambda i: (-rests[i], len(spans[i]), sizes[i], -i))


def _place(problem: _Problem, state: _Packing, i: int) -> _Packing:
    offset, sizes, pins = state.rests[i], problem.sizes, problem.pins
    skyline, ahead = list(state.profile[0]), list(state.profile[1])
    passed = state.passed
    while passed < len(problem.rising) and pins[problem.rising[passed]] <= offset:
        pin = problem.rising[passed]
        _raise(skyline, ahead, problem.spans[pin], pins[pin], sizes[pin])
        passed += 1
    _raise(skyline, ahead, problem.spans[i], offset, sizes[i])
    rests, top = list(state.rests), offset + sizes[i]
    for j in problem.neighbours[i]:
        if j in state.unplaced and rests[j] < top:
            rests[j] = _rest(problem, j, top)
    return _Packing((skyline, ahead), rests, state.unplaced - {i}, (offset, i), passed)


def _raise(skyline: list[int], ahead: list[int], span: range, offset: int, size: int) -> None:
    """A buffer joins the skyline and is ahead no longer."""
    for t in span:
        skyline[t] = max(skyline[t], offset + size)
        ahead[t] -= size
