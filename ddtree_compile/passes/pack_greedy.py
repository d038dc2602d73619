"""Packing by rules of thumb: greedy fits in a given order, stacking from the bottom up, orders learned from failures.

In: buffers and, for each, the indices of those that live beside it. Out: an offset for each, whatever the height.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from ddtree_compile.passes.arena import Buffer

LEARNING_ROUNDS = 60  # greedy packings with a learned order


def height_of(buffers: Sequence[Buffer], offsets: Sequence[int]) -> int:
    """Where the highest buffer ends."""
    return max((offset + buffer.size for buffer, offset in zip(buffers, offsets, strict=True)), default=0)


def neighbours_of(buffers: Sequence[Buffer]) -> list[list[int]]:
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


# What to place first, by falling importance.
ORDERS: tuple[Callable[[Buffer], tuple[int, ...]], ...] = (
    lambda b: (b.first, -b.size),
    lambda b: (-b.size, b.first - b.last),
    lambda b: (-b.size * (b.last - b.first + 1),),
    lambda b: (b.first - b.last, -b.size),
    lambda b: (-b.last, -b.size),
)


# What to stack next, least first: from where it would rest, how full its life is (the most of skyline and bytes
# still to come), its length and its size.
CHOICES: tuple[Callable[[int, int, int, int], tuple[int, ...]], ...] = (
    lambda rest, full, length, size: (rest, -length, -size, -full),
    lambda rest, full, length, size: (rest, -full, -length, -size),
    lambda rest, full, length, size: (2 * rest - full, -length, -size),
)


def greedy(buffers: Sequence[Buffer], neighbours: list[list[int]], order: Sequence[int], best_fit: bool) -> list[int]:
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


def stack(
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


def learn(
    buffers: Sequence[Buffer], neighbours: list[list[int]], order: Sequence[int], best: list[int], bound: int
) -> list[int]:
    """Greedy again and again, lowest gap first; what ended above the bound is placed earlier in the next round."""
    count = len(buffers)
    rank = [0.0] * count
    for place, i in enumerate(order):
        rank[i] = float(place)
    for turn in range(LEARNING_ROUNDS):
        offsets = greedy(buffers, neighbours, sorted(range(count), key=lambda i: (rank[i], i)), best_fit=False)
        height = height_of(buffers, offsets)
        if height < height_of(buffers, best):
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
