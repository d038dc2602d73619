"""The CPU executor: a Plan on real memory, each segment run by the interpreter.

An executor has four verbs, which a GPU's executor shares: `run` a segment, `write` and `read` a value of STATE or IO,
`close`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ddtree_compile.ir import interpret
from ddtree_compile.ir.graph import Space
from ddtree_compile.ir.layouts import LAYOUTS, Parts
from ddtree_compile.plan import Plan
from ddtree_compile.runtime.threads import threads_for

FIRST = ("draft", "plain", "prefill")  # segments that begin a round


def memory_needed(plan: Plan) -> int:
    """Bytes that running a plan here takes: the packed weights while they are read, each once more in fp32, and every
    space."""
    packed = sum(LAYOUTS[w.layout].nbytes(w.value.shape, w.value.dtype) for w in plan.weights)
    unpacked = sum(weight.value.type.numel for weight in plan.weights) * torch.float32.itemsize
    return packed + unpacked + plan.arena + sum(layout.size for layout in plan.spaces.values())


class CpuExecutor:
    """Memory of all spaces and the bound steps of each segment. `weights`: packed parts by weight name."""

    def __init__(self, plan: Plan, weights: Mapping[str, Parts], *, poisoned: bool = False) -> None:
        self.plan = plan
        self._poisoned = poisoned
        self._memory = {space: interpret.buffer(layout.size) for space, layout in plan.spaces.items()}
        self._memory[Space.TEMP] = interpret.buffer(plan.arena)
        self._places = {name: place for layout in plan.spaces.values() for name, place in layout.places.items()}
        self._spaces = {name: space for space, layout in plan.spaces.items() for name in layout.places}
        if poisoned:
            for name in self._places:
                interpret.poison(self._tensor(name))
            self._memory[Space.TEMP].fill_(0xFF)  # NaN in every float format
        self._largest = max(math.prod(weight.value.shape[-2:]) for weight in plan.weights)
        with threads_for(self._largest):
            logical = {
                weight.value.name: LAYOUTS[weight.layout]
                .unpack(weights[weight.value.name], weight.value.shape, weight.value.dtype)
                .float()
                for weight in plan.weights
            }
        offsets = {name: place.offset for name, place in self._places.items()}
        self._steps = {
            segment.name: interpret.bind(
                segment.graph, segment.offsets, self._memory, logical, offsets, poisoned=poisoned
            )
            for segment in plan.segments
        }

    def run(self, segment: str) -> None:
        """Run one segment. In test mode a segment that begins a round forgets what the last one left in ROUND."""
        if self._poisoned and segment.partition("[")[0] in FIRST:
            self._poison_round()
        with threads_for(self._largest):
            interpret.run(self._steps[segment])

    def write(self, name: str, values: Sequence[int | float] | Tensor, at: int = 0) -> None:
        """Put `values` into a value of STATE or IO, from its flat element `at`."""
        tensor = self._tensor(name).view(-1)
        new = torch.as_tensor(values).view(-1)
        tensor[at : at + new.numel()] = new.to(tensor.dtype)

    def read(self, name: str) -> Tensor:
        """A copy of a value of STATE, ROUND or IO."""
        return self._tensor(name).clone()

    def close(self) -> None:
        """Give the memory back."""
        self._steps = {}
        self._memory = {}

    def _poison_round(self) -> None:
        for name, space in self._spaces.items():
            if space is Space.ROUND:
                interpret.poison(self._tensor(name))

    def _tensor(self, name: str) -> Tensor:
        place = self._places[name]
        return interpret.view(self._memory[self._spaces[name]], place.offset, place.type)
