"""Whether a Plan holds together, by code that did not make it: legal graphs, a place for every value, sound arenas."""

from __future__ import annotations

from collections.abc import Mapping

from ddtree_compile.ir.check import check_graph
from ddtree_compile.ir.graph import Space, Value
from ddtree_compile.passes.buffers import Arena, IllegalArena, check_arena, lifetimes, lower_bound
from ddtree_compile.plan import ALIGN, Layout, Plan, Segment


def check_plan(plan: Plan) -> None:
    """KeyError for what is missing, ValueError (or IllegalGraph, which is one) for what is wrong; each names it."""
    names = [segment.name for segment in plan.segments]
    wanted = [*(f"verify[{b}]" for b in plan.buckets), *(f"prefill[{c}]" for c in plan.chunks)]
    if missing := [name for name in wanted if name not in names]:
        raise KeyError(f"segment {missing[0]}")
    weights = {weight.value.name: weight.value for weight in plan.weights}
    for space, layout in plan.spaces.items():
        _check_layout(space, layout)
    for segment in plan.segments:
        check_graph(segment.graph)
        _check_segment(segment)
        for value in segment.graph.values().values():
            _check_value(value, segment.name, plan, weights)
    needed = max((segment.temp_bytes for segment in plan.segments), default=0)
    if plan.arena != needed:
        raise ValueError(f"arena = {plan.arena} is not the {needed} bytes that its segments need")


def _check_segment(segment: Segment) -> None:
    buffers = lifetimes(segment.graph)
    bound = lower_bound(buffers, ALIGN)
    if segment.lower_bound != bound:
        raise ValueError(f"{segment.name}: lower_bound = {segment.lower_bound} is not the peak of live bytes, {bound}")
    try:
        check_arena(buffers, Arena(segment.temp_bytes, dict(segment.offsets), bound, proved=False, align=ALIGN))
    except IllegalArena as error:
        raise ValueError(f"{segment.name}: {error}") from None


def _check_value(value: Value, segment: str, plan: Plan, weights: Mapping[str, Value]) -> None:
    if value.space == Space.WEIGHT and weights.get(value.name) != value:
        raise ValueError(f"{segment}: no weight {value.name} of {value.type}")
    layout = plan.spaces.get(value.space)
    if layout is None:
        return
    place = layout.places.get(value.name)
    if place is None or value.type.nbytes > place.type.nbytes or value.dtype != place.type.dtype:
        raise ValueError(f"{segment}: {value.name} of {value.type} has no place that large in {value.space}")


def _check_layout(space: Space, layout: Layout) -> None:
    end = 0
    for name, place in sorted(layout.places.items(), key=lambda item: item[1].offset):
        if place.offset < end or place.offset % ALIGN:
            raise ValueError(f"{space}: {name} at {place.offset} overlaps its neighbour, or is not aligned to {ALIGN}")
        end = place.offset + place.type.nbytes
    if end > layout.size:
        raise ValueError(f"{space}: its values end at {end}, outside its {layout.size} bytes")
