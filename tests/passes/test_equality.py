"""Every pass keeps every bit, on the memory of real rounds; a lossy one stays close. So does every order in a stage.

Each segment an engine runs is run again from the same memory: as built, after each pass, and as planned with the ops
of each stage in another order. What it leaves in STATE, ROUND and IO is compared. TEMP is poisoned throughout.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import make_spec
from support.lab import make_models, one_thread, prompts_of
from torch import Tensor

from ddtree_compile.compiler import compile_spec, load
from ddtree_compile.ir import interpret
from ddtree_compile.ir.graph import Graph, Space
from ddtree_compile.ir.layouts import LAYOUTS
from ddtree_compile.passes import LOSSY, PASSES
from ddtree_compile.plan import ALIGN, Plan
from ddtree_compile.runtime.cpu import FIRST, CpuExecutor
from ddtree_compile.runtime.engine import Engine
from ddtree_compile.runtime.sampling import SamplingParams
from ddtree_compile.spec import CompileSpec

Steps = dict[str, list[tuple[str, Graph, Graph]]]  # by segment: (pass, before, after)


def unpacked(graph: Graph) -> tuple[dict[str, int], int]:
    """Offsets that share no byte, for a graph that has no stages yet."""
    offsets: dict[str, int] = {}
    size = 0
    for value in graph.values().values():
        if value.space is Space.TEMP:
            offsets[value.name] = size
            size += -(-value.type.nbytes // ALIGN) * ALIGN
    return offsets, size


def shuffled(graph: Graph, rng: random.Random) -> Graph:
    """The ops of each stage in another order."""
    return graph.with_ops(tuple(sorted(graph.ops, key=lambda op: (op.stage, rng.random()))))


@dataclass
class Mirror:
    """An executor that runs every segment in all its forms and compares."""

    inner: CpuExecutor
    steps: Steps
    weights: Mapping[str, Tensor]
    tolerance: float  # of a lossy pass, absolute and relative
    strays: float  # the part of a value's elements that may lie outside it: a row that is routed to another expert
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    compared: set[tuple[str, str]] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)

    def write(self, name: str, values: Any, at: int = 0) -> None:
        self.inner.write(name, values, at)

    def read(self, name: str) -> Tensor:
        return self.inner.read(name)

    def close(self) -> None:
        self.inner.close()

    def run(self, segment: str) -> None:
        if segment.partition("[")[0] in FIRST:
            self.inner._poison_round()  # as its own run is about to do
        before = {space: self.inner._memory[space].clone() for space in self.inner.plan.spaces}
        self.inner.run(segment)
        for name, old, new in self.steps[segment]:
            ran = [self._left(graph, before, *unpacked(graph)) for graph in (old, new)]
            self._compare(f"{segment} {name}", *ran, lossy=name in LOSSY)
            self.compared.add((segment.partition("[")[0], name))
            if old != new:
                self.changed.add(name)
        planned = self.inner.plan.segment(segment)
        real = {space: self.inner._memory[space] for space in before}
        for graph in (planned.graph, shuffled(planned.graph, self.rng)):
            left = self._left(graph, before, planned.offsets, planned.temp_bytes)
            self._compare(f"{segment} as planned", real, left, lossy=False)

    def _left(
        self, graph: Graph, before: Mapping[Space, Tensor], offsets: Mapping[str, int], size: int
    ) -> dict[Space, Tensor]:
        memory = {Space.TEMP: interpret.buffer(size)}
        for space, content in before.items():
            memory[space] = interpret.buffer(len(content))
            memory[space].copy_(content)
        memory[Space.TEMP].fill_(0xFF)
        places = {
            name: place.offset for layout in self.inner.plan.spaces.values() for name, place in layout.places.items()
        }
        interpret.run(interpret.bind(graph, offsets, memory, self.weights, places, poisoned=True))
        return {space: memory[space] for space in before}

    def _compare(self, what: str, one: dict[Space, Tensor], two: dict[Space, Tensor], *, lossy: bool) -> None:
        if not lossy:
            for space in one:
                assert one[space].equal(two[space]), f"{what}: {self._differing(space, one, two)} differ"
            return
        for space, layout in self.inner.plan.spaces.items():
            for name, place in layout.places.items():
                a, b = (interpret.view(ran[space], place.offset, place.type) for ran in (one, two))
                if a.is_floating_point():
                    close = torch.isclose(a.float(), b.float(), self.tolerance, self.tolerance, equal_nan=True)
                    assert (~close).float().mean() <= self.strays, f"{what}: {name} differs"

    def _differing(self, space: Space, one: dict[Space, Tensor], two: dict[Space, Tensor]) -> list[str]:
        found: list[str] = []
        for name, place in self.inner.plan.spaces[space].places.items():
            at = slice(place.offset, place.offset + place.type.nbytes)
            if not one[space][at].equal(two[space][at]):
                found.append(name)
        return found


def mirrored(spec: CompileSpec, tolerance: float, strays: float) -> tuple[Engine, Mirror, Plan]:
    steps: Steps = {}

    def observe(name: str, before: Graph, after: Graph, seconds: float) -> None:
        steps.setdefault(before.name, []).append((name, before, after))

    plan = compile_spec(spec, observe)
    weights = load(spec, plan)[0]
    logical = {
        weight.value.name: LAYOUTS[weight.layout]
        .unpack(weights[weight.value.name], weight.value.shape, weight.value.dtype)
        .float()
        for weight in plan.weights
    }
    mirror = Mirror(CpuExecutor(plan, weights, poisoned=True), steps, logical, tolerance, strays)
    return Engine(plan, mirror), mirror, plan


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance", "strays"),
    [
        ("kimi", "float32", 1e-4, 0.0),
        ("qwen3", "float32", 0.0, 0.0),
        pytest.param("kimi", "bfloat16", 0.1, 0.1, marks=pytest.mark.full),
        pytest.param("qwen3", "bfloat16", 0.0, 0.0, marks=pytest.mark.full),
    ],
)
def test_every_pass_keeps_every_bit(tmp_path: Path, family: str, dtype: str, tolerance: float, strays: float):
    root = make_models(tmp_path, family, dtype=dtype, block=5)
    tables = make_spec(root, [3, 9], cache={"max_sequences": 2, "max_seq_len": 96}, prefill={"chunks": [8, 512]})
    engine, mirror, plan = mirrored(CompileSpec.parse(tables), tolerance, strays)
    greedy = SamplingParams(max_new_tokens=4, bucket=9)
    with engine:
        engine.generate(prompts_of([3, 70]), greedy)
        engine.generate(prompts_of([9, 2], seed=1), [
            SamplingParams(max_new_tokens=3, bucket=3, shape="chain", temperature=0.7),
            SamplingParams(max_new_tokens=3, speculate=False, temperature=0.9, top_p=0.9),
        ])  # fmt: skip
    kinds = {segment.name.partition("[")[0] for segment in plan.segments}
    assert mirror.compared == {(kind, name) for kind in kinds for name, _ in PASSES}
    assert mirror.changed >= {"fuse", "stage"} | ({"absorb"} if family == "kimi" else set())
