"""What one rank holds: weights, caches and the other spaces against its GPU's memory, and what would make them fit.

Until a pass shards the graph, a rank's part follows from data: `Weight.split` (None: every rank holds all of it), a
cache's key heads (a latent cache has one, so every rank holds it), `context_shards`, `expert_parallel`. Bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ddtree_compile import machine
from ddtree_compile.ir.graph import DTYPE_BYTES, Graph, Space, TensorType, Value
from ddtree_compile.ir.layouts import LAYOUTS
from ddtree_compile.ir.weights import Weight
from ddtree_compile.models.round import Program
from ddtree_compile.plan import ALIGN, Layout
from ddtree_compile.spec import MAX_RANKS, CompileSpec

CACHE_DIMS = 4  # a cache is [S, T, G, d]; no other STATE value has as many
ROUND_SLOTS = 1024  # an advised max_seq_len is a multiple of this, where it can be


@dataclass(frozen=True, slots=True)
class Split:
    """How a group of ranks shares two models. `units` says into how many heads a projection's rows fall: a rank holds
    whole heads. `cache_dtype` None: that of the model. `fp8`: the target's linears are one byte a weight."""

    ranks: int = 1
    shards: int = 1
    expert_parallel: bool = False
    cache_dtype: str | None = None
    fp8: bool = False
    units: Mapping[str, int] | None = None

    def weight_shape(self, weight: Weight) -> tuple[int, ...]:
        """The part of a weight's logical shape that the largest rank holds."""
        shape, split = weight.value.shape, weight.split
        if split is None:
            return shape
        if self.expert_parallel and is_experts(weight):
            split = 0
        units = (self.units or {}).get(weight.value.name, shape[split])
        held = -(-units // self.ranks) * (shape[split] // units)
        return (*shape[:split], held, *shape[split + 1 :])

    def weight_bytes(self, weight: Weight) -> int:
        """Bytes of that part in the weight's layout."""
        nbytes = LAYOUTS[weight.layout].nbytes(self.weight_shape(weight), weight.value.dtype)
        return nbytes // DTYPE_BYTES[weight.value.dtype] if self.fp8 and _is_fp8(weight) else nbytes

    def weight_share(self, weight: Weight) -> float:
        """The part of a weight's elements that a rank holds, which is its part of the work on it."""
        return TensorType(self.weight_shape(weight), "u8").numel / weight.value.type.numel

    def cache_bytes(self, cache: Value) -> int:
        """Bytes of a cache [S, T, G, d] on a rank."""
        sequences, slots, heads, width = cache.shape
        held = -(-heads // (self.ranks // self.shards))
        return sequences * -(-slots // self.shards) * held * width * DTYPE_BYTES[self.cache_dtype or cache.dtype]


def split_of(spec: CompileSpec, program: Program, *, fp8: bool) -> Split:
    """The split that a spec asks for."""
    cache, group = spec.cache, spec.machine
    dtype = None if cache.dtype == "auto" else cache.dtype
    units = _head_units(program.segments)
    return Split(group.tensor_parallel, cache.context_shards, group.expert_parallel, dtype, fp8, units)


def is_experts(weight: Weight) -> bool:
    """Whether a weight is a stack of experts [E, N, K]."""
    return ".experts." in weight.value.name


def _is_fp8(weight: Weight) -> bool:
    """The linears that fp8 checkpoints of these families quantise: all of the target's but embedding, head, router."""
    owner, _, name = weight.value.name.partition(".")
    kept = ("embed", "head", "router")
    return owner == "target" and len(weight.value.shape) > 1 and name.rpartition(".")[2] not in kept


def _head_units(graphs: Iterable[Graph]) -> dict[str, int]:
    """Heads of each projection whose result is seen as heads."""
    units: dict[str, int] = {}
    for graph in graphs:
        made_by = {out.name: op for op in graph.ops for out in op.outs}
        for op in graph.ops:
            maker = made_by.get(op.args[0].name) if op.kind == "heads" else None
            if maker is not None and maker.kind == "linear":
                units[maker.args[1].name] = op.outs[0].shape[1]
    return units


@dataclass(frozen=True, slots=True)
class Holdings:
    """Everything that a rank of a program keeps; `total` adds it up for a split."""

    program: Program
    spaces: Mapping[Space, Layout]
    arena: int
    width: int  # bytes of a hidden state row, what an all-reduce carries

    def parts(self, split: Split) -> dict[str, int]:
        """Bytes by kind. `arena` and `round` are the unsharded graphs', an upper bound; `peer` is two landing areas a
        rank for the widest round's all-reduce (prefill's go through the communication library)."""
        state = self.spaces[Space.STATE].places
        cache = 0
        for name, place in state.items():
            value = Value(name, place.type, Space.STATE)
            nbytes = split.cache_bytes(value) if len(value.shape) == CACHE_DIMS else place.type.nbytes
            cache += -(-nbytes // ALIGN) * ALIGN
        return {
            "weights": sum(split.weight_bytes(weight) for weight in self.program.weights),
            "cache": cache,
            "arena": self.arena,
            "round": self.spaces[Space.ROUND].size,
            "peer": 0 if split.ranks == 1 else 2 * split.ranks * self.program.sizes.rows * self.width,
        }

    def total(self, split: Split) -> int:
        return sum(self.parts(split).values())

    def report(self, spec: CompileSpec, split: Split) -> dict[str, Any]:
        """The plan report's `memory`; with `over` and `advice` when it does not fit."""
        parts = self.parts(split)
        total, capacity = sum(parts.values()), machine.gpu(spec.machine.gpu).memory_bytes
        report: dict[str, Any] = {**parts, "total": total, "capacity": capacity, "fits": total <= capacity}
        if total > capacity:
            report["over"] = total - capacity
            report["advice"] = list(self._advice(spec, split, capacity))
        return report

    def _advice(self, spec: CompileSpec, split: Split, capacity: int) -> Iterator[dict[str, Any]]:
        """Single changes of the spec each of which fits, with the total each would have. Computed, never guessed."""

        def change(key: str, value: int | str, total: int) -> dict[str, Any]:
            return {"set": key, "to": value, "total": total}

        slots, cache = self.program.sizes.slots, self.parts(split)["cache"]
        rest, per_slot = self.total(split) - cache, -(-cache // slots)
        fitting = (capacity - rest) // per_slot
        fitting = fitting // ROUND_SLOTS * ROUND_SLOTS or fitting
        if 2 <= fitting < slots:
            yield change("cache.max_seq_len", fitting, rest + fitting * per_slot)
        sequences = self.program.sizes.sequences
        fitting = (capacity - rest) // -(-cache // sequences)
        if 1 <= fitting < sequences:
            yield change("cache.max_sequences", fitting, rest + fitting * -(-cache // sequences))
        for shards in range(split.shards + 1, split.ranks + 1):
            total = self.total(replace(split, shards=shards)) if split.ranks % shards == 0 else capacity + 1
            if total <= capacity:
                yield change("cache.context_shards", shards, total)
                break
        for ranks in range(split.ranks + 1, MAX_RANKS + 1):
            total = self.total(replace(split, ranks=ranks)) if self._divides(ranks, split.shards) else capacity + 1
            if total <= capacity:
                yield change("machine.tensor_parallel", ranks, total)
                break
        total = self.total(split)
        for name, row in machine.GPUS.items():
            if name not in ("cpu", spec.machine.gpu) and row.memory_bytes >= total:
                yield change("machine.gpu", name, total)

    def _divides(self, ranks: int, shards: int) -> bool:
        """Whether every split weight falls into `ranks` equal parts: what a shard pass can do without padding."""
        split = [weight for weight in self.program.weights if weight.split is not None]
        return ranks % shards == 0 and all(w.value.shape[w.split or 0] % ranks == 0 for w in split)
