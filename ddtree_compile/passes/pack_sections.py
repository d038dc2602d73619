"""Packing section by section: a segment is cut where few buffers cross, and each section is searched exactly.

Given the offsets of the buffers that cross into it, a section does not depend on what came before. A model is one
layer many times, so a section's solutions are kept by its shape (sizes, relative lives, pinned offsets): a layer is
solved once for each place its residual comes in at. A section has a few solutions, which differ in where the buffers
that leave it lie; a walk over the sections takes back a choice that no later section can live with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ddtree_compile.passes.arena import Buffer
from ddtree_compile.passes.pack_greedy import neighbours_of
from ddtree_compile.passes.pack_search import fit

WIDEST_CUT = 6  # buffers that may cross a cut
LARGEST_SECTION = 24  # buffers; cuts as narrow as leave no larger section are taken
SECTION_STEPS = 1_000  # of the exact search, for one solution of one section
TOTAL_STEPS = 60_000  # for all of a part

Shape = tuple[tuple[int, int, int, int], ...]  # a member's size, first and last stage, and pinned offset or -1


def pack_sections(buffers: Sequence[Buffer], capacity: int) -> list[int] | None:
    """Offsets of at most `capacity` bytes, or None where there is nothing to cut or nothing was found."""
    sections = _sections(buffers)
    if len(sections) < 2:
        return None
    solver = _Solver(capacity)
    offsets = [-1] * len(buffers)
    seen: set[tuple[int, tuple[int, ...]]] = set()
    walk = [solver.solutions(_shape(buffers, sections[0], offsets, set()))]
    while walk:
        solution = next(walk[-1], None)
        if solution is None:
            walk.pop()
            continue
        depth = len(walk)
        members = sections[depth - 1].members
        for member, offset in zip(members, solution, strict=True):
            offsets[member] = offset
        if depth == len(sections):
            return offsets
        crossing = {i for i in sections[depth].members if buffers[i].first < sections[depth].start}
        state = (depth, tuple(offsets[i] for i in sorted(crossing)))
        if state not in seen:  # else it was tried from here and led nowhere
            seen.add(state)
            walk.append(solver.solutions(_shape(buffers, sections[depth], offsets, crossing)))
    return None


@dataclass(frozen=True, slots=True)
class _Section:
    """Stages `start` to `end`, both included, and the indices of the buffers that live in them. Those that live longest
    come first: they take the edge of the arena, and so leave no hole between what outlives their neighbours."""

    start: int
    end: int
    members: tuple[int, ...]


def _sections(buffers: Sequence[Buffer]) -> list[_Section]:
    """The stages cut wherever at most so many buffers cross, as few as leave no section too large."""
    first, last = min(b.first for b in buffers), max(b.last for b in buffers)
    crossing = [0] * (last + 1)  # by the stage before the cut
    for buffer in buffers:
        for stage in range(buffer.first, buffer.last):
            crossing[stage] += 1
    births = {b.first for b in buffers}
    cuts = [stage for stage in range(first, last) if stage + 1 in births]
    sections: list[_Section] = []
    for width in range(1, WIDEST_CUT + 1):
        ends = [*(stage for stage in cuts if crossing[stage] <= width), last]
        sections = _cut(buffers, ends)
        if max(len(section.members) for section in sections) <= LARGEST_SECTION:
            break
    return sections


def _cut(buffers: Sequence[Buffer], ends: list[int]) -> list[_Section]:
    """Sections that end with the stages `ends`."""
    rising = sorted(range(len(buffers)), key=lambda i: (buffers[i].first, i))
    sections: list[_Section] = []
    live: list[int] = []
    start, at = buffers[rising[0]].first, 0
    for end in ends:
        live = [i for i in live if buffers[i].last >= start]
        while at < len(rising) and buffers[rising[at]].first <= end:
            live.append(rising[at])
            at += 1
        sections.append(
            _Section(start, end, tuple(sorted(live, key=lambda i: (-buffers[i].last, buffers[i].first, i))))
        )
        start = end + 1
    return sections


def _shape(buffers: Sequence[Buffer], section: _Section, offsets: list[int], pinned: set[int]) -> Shape:
    length = section.end - section.start
    return tuple(
        (
            buffers[i].size,
            max(buffers[i].first - section.start, 0),
            min(buffers[i].last - section.start, length + 1),  # past the end: it leaves the section
            offsets[i] if i in pinned else -1,
        )
        for i in section.members
    )


@dataclass(slots=True)
class _Solver:
    """Solves sections of at most `capacity` bytes and keeps their solutions by shape."""

    capacity: int
    steps: int = TOTAL_STEPS
    known: dict[Shape, list[tuple[int, ...]]] = field(default_factory=dict[Shape, list[tuple[int, ...]]])

    def solutions(self, shape: Shape) -> Iterator[tuple[int, ...]]:
        if shape not in self.known:
            self.known[shape] = list(self._solve(shape))
        return iter(self.known[shape])

    def _solve(self, shape: Shape) -> Iterator[tuple[int, ...]]:
        """Solutions that differ in where the leaving buffers lie: packed downwards and upwards, the leaving ones
        where the search has them or at the very edge."""
        buffers = [Buffer(str(i), size, first, last) for i, (size, first, last, _) in enumerate(shape)]
        end = max(last for _, _, last, _ in shape)
        leaving = [i for i, (_, _, last, _) in enumerate(shape) if last == end]
        pins = {i: pin for i, (_, _, _, pin) in enumerate(shape) if pin >= 0}
        seen: set[tuple[int, ...]] = set()
        for upwards in (False, True):
            near = {i: self._mirror(buffers[i], at) for i, at in pins.items()} if upwards else pins
            for edge in (True, False):
                fixed = _at_edge(buffers, leaving, near) if edge else near
                found = self._fit(buffers, fixed)
                if found is None:
                    continue
                if upwards:
                    found = [self._mirror(b, at) for b, at in zip(buffers, found, strict=True)]
                outcome = tuple(found[i] for i in leaving)
                if outcome not in seen:
                    seen.add(outcome)
                    yield tuple(found)

    def _fit(self, buffers: list[Buffer], pins: dict[int, int]) -> list[int] | None:
        allowed = min(self.steps, SECTION_STEPS)
        found, left = fit(buffers, neighbours_of(buffers), self.capacity, allowed, pins)
        self.steps -= allowed - left
        return found

    def _mirror(self, buffer: Buffer, offset: int) -> int:
        return self.capacity - offset - buffer.size


def _at_edge(buffers: list[Buffer], leaving: list[int], pins: dict[int, int]) -> dict[int, int]:
    """The pins and each leaving buffer that is not pinned, at the lowest place that earlier ones leave it."""
    fixed = dict(pins)
    for i in leaving:
        if i not in fixed:
            beside = sorted(
                (at, at + buffers[j].size) for j, at in fixed.items() if buffers[j].last >= buffers[i].first
            )
            place = 0
            for low, high in beside:
                if low < place + buffers[i].size:
                    place = max(place, high)
            fixed[i] = place
    return fixed
