"""The price of a plan: what a round of each bucket must read and compute at each context, and what that should take.

A round is draft + tree + verify + pick + commit, priced from the logical graphs, before any pass, for one rank:

    floor     = sum over ops of max(compulsory bytes / read bandwidth, FLOPs / matmul rate)
    predicted = the same with each class's EFFICIENCY, plus EDGE_US for each kernel that streams weights or K/V, plus
                what a graph node costs, plus the all-reduces

Compulsory bytes: each weight byte once a segment, embedding rows only those looked up, experts only those expected to
be touched (routing taken as uniform), K/V of the committed context once, no temporaries. One live sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ddtree_compile import machine
from ddtree_compile.acceptance import expected_tokens
from ddtree_compile.ir.graph import DTYPE_BYTES, Graph, Op, Space, Value
from ddtree_compile.ir.ops import OPS
from ddtree_compile.ir.ops.record import Facts, uniform_experts
from ddtree_compile.ir.weights import Weight
from ddtree_compile.machine import Gpu
from ddtree_compile.memory import CACHE_DIMS, Holdings, Split, is_experts, split_of
from ddtree_compile.models.config import DFlashConfig, TargetConfig
from ddtree_compile.models.round import Program
from ddtree_compile.plan import Layout, Segment
from ddtree_compile.spec import CompileSpec

# By the innermost part of an op's scope that is here; the drafter's own weights and caches are classes of their own.
CLASSES: Mapping[str, str] = {
    "embed": "embedding", "attn": "attention", "mlp": "mlp", "router": "router", "experts": "experts",
    "shared": "shared_expert", "moe": "router", "head": "head",
}  # fmt: skip
CLASS_NAMES = (
    "attention", "mlp", "router", "experts", "shared_expert", "drafter", "head", "embedding", "target_cache",
    "drafter_cache",
)  # fmt: skip

# Share of the read ceiling that a kernel reaches between its fill and its drain. Measured on H200 in graphs, weights
# rotated past L2: dense linears 16 to 290 us long, 16 and 64 rows; a Triton W4A16 grouped MoE of 32 rows (66 % and
# 58 %). Attention over a cache was not measured; it is taken as a linear's. Other GPUs are assumed alike.
EFFICIENCY: Mapping[str, float] = {name: 0.62 if name == "experts" else 0.93 for name in CLASS_NAMES}
EDGE_US = 3.0  # fill and drain of a kernel that streams weights: 3 to 5 us in the same runs, with what the node costs
PROGRAMS = 132  # of a typical kernel's grid, for what its node costs
FIRST_CONTEXT, CONTEXT_STEP = 1024, 4


def price(
    spec: CompileSpec, target: TargetConfig, drafter: DFlashConfig, program: Program, segments: Iterable[Segment],
    spaces: Mapping[Space, Layout], arena: int,
) -> dict[str, Any]:  # fmt: skip
    """The report that `plan --json` prints: bytes are integers, per rank; times in microseconds."""
    segments = tuple(segments)
    split = split_of(spec, program, fp8=target.fp8)
    width = target.hidden * DTYPE_BYTES[target.dtype]
    rounds = Rounds(spec, target, drafter, program, {s.name: s.graph for s in segments}, split)
    contexts = contexts_of(spec.cache.max_seq_len)
    rows = [rounds.row(shape, nodes, context) for context in contexts for shape, nodes in rounds.kinds()]
    best = {context: _best([row for row in rows if row["context"] == context]) for context in contexts}
    return {
        "spec": spec.to_dict(),
        "gpu": spec.machine.gpu,
        "tensor_parallel": spec.machine.tensor_parallel,
        "memory": Holdings(program, spaces, arena, width).report(spec, split),
        "arena_lower_bound": max(segment.lower_bound for segment in segments),
        "arena_bound_met": {segment.name: segment.temp_bytes == segment.lower_bound for segment in segments},
        "buckets": rows,
        "best": {str(context): row["nodes"] if row else None for context, row in best.items()},
        "best_shape": {str(context): row["shape"] if row else None for context, row in best.items()},
        "notes": notes(spec, target),
    }


def contexts_of(slots: int) -> tuple[int, ...]:
    """Committed tokens to price: 1k, 4k, 16k .. below a cache's slots, and the slots; a quarter, half and all of a
    small one."""
    if slots <= FIRST_CONTEXT:
        return tuple(sorted({max(1, slots // 4), max(1, slots // 2), slots}))
    found: list[int] = []
    context = FIRST_CONTEXT
    while context < slots:
        found.append(context)
        context *= CONTEXT_STEP
    return (*found, slots)


def notes(spec: CompileSpec, target: TargetConfig) -> list[str]:
    """What a reader of the figures must know; warnings first."""
    found: list[str] = []
    if target.fp8:
        found.append("warning: this is an fp8 checkpoint: priced at one byte a weight of its linears, run refuses it")
    if spec.cache.dtype == "fp8_e4m3":
        found.append("warning: an fp8 cache is priced, no kernel has it yet")
    if spec.machine.gpu == "cpu":
        found.append("times for cpu come from a nominal row of the GPU table and mean little")
    if spec.machine.tensor_parallel > 1:
        found.append("arena and round are the unsharded graphs', an upper bound for a rank")
    if spec.cache.max_sequences > 1:
        found.append(f"a round is priced with 1 of {spec.cache.max_sequences} sequences live")
    if spec.acceptance is None:
        found.append("no [acceptance] prior: expected tokens, tokens a second and the best bucket are unknown")
    found.append("experts touched: expected under uniform routing; real routing touches fewer")
    return found if hasattr(target, "experts") else found[:-1]


def _best(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The row with the most tokens a second, the first (the smallest) on a tie; None without a prior."""
    rated = [row for row in rows if row["tokens_per_second"] is not None]
    return max(rated, key=lambda row: row["tokens_per_second"]) if len(rated) == len(rows) else None


@dataclass(frozen=True)
class Rounds:
    """Prices rounds of one program. `optimised`: the graphs after the passes, by name, whose ops are kernels."""

    spec: CompileSpec
    target: TargetConfig
    drafter: DFlashConfig
    program: Program
    optimised: Mapping[str, Graph]
    split: Split

    def kinds(self) -> list[tuple[str, int]]:
        """(shape, nodes) of every round that can run: plain, chains up to what the drafter drafts, trees."""
        buckets, horizon = self.spec.tree.buckets, self.drafter.horizon
        last = min((b for b in buckets if b >= horizon), default=max(buckets))
        chains = [("chain", b) for b in buckets if b <= last]
        return [("plain", 0), *chains, *[("tree", b) for b in buckets if self.spec.tree.shape == "tree"]]

    def row(self, shape: str, nodes: int, context: int) -> dict[str, Any]:
        """One row of the report."""
        names = _segments(shape, nodes)
        device = machine.gpu(self.spec.machine.gpu)
        work = [part for name in names for part in self._parts[name]]
        rows = nodes + 1
        facts = Facts(context, live=1, distinct_experts=lambda _rows, k, of: uniform_experts(rows, k, of))
        nbytes: dict[str, float] = dict.fromkeys(CLASS_NAMES, 0.0)
        flops = floor = busy = 0.0
        for part in work:
            read = part.read(facts)
            done = part.flops(facts)
            for name, count in read.items():
                nbytes[name] += count * part.count
            rate = device.matmul[part.dtype]
            flops += done * part.count
            floor += max(sum(read.values()) / device.read_bandwidth, done / rate) * part.count
            slow = sum(count / EFFICIENCY[name] for name, count in read.items())
            busy += max(slow / device.read_bandwidth, done / rate / EFFICIENCY["attention"]) * part.count
        kernels = [op for name in names for op in self.optimised[name].ops]
        collectives = self.collectives_us(device, shape, rows)
        edges = sum(any(_streams(value) for value in op.args) for op in kernels) * EDGE_US
        nodes_us = len(kernels) * machine.node_overhead_us(PROGRAMS, programmatic=True)
        predicted = busy * 1e6 + edges + nodes_us + collectives
        tokens = expected_tokens(self.spec, shape, nodes, self.drafter.horizon, self.target.vocab)
        return {
            "nodes": nodes,
            "shape": shape,
            "context": context,
            "ops": sum(part.count for part in work),
            "kernels": len(kernels),
            "bytes": {name: round(count) for name, count in nbytes.items() if count},
            "flops": round(flops),
            "experts_touched": self._touched(rows),
            "floor_us": _rounded(floor * 1e6),
            "collectives_us": _rounded(collectives),
            "predicted_us": _rounded(predicted),
            "expected_tokens": None if tokens is None else _rounded(tokens),
            "tokens_per_second": None if tokens is None else _rounded(tokens / predicted * 1e6),
        }

    def collectives_us(self, device: Gpu, shape: str, rows: int) -> float:
        """Two all-reduces a layer (three when the context is sharded) and one for the embedding, of every row's hidden
        state; the drafter's likewise; a gather of candidates after each head, priced as a small all-reduce."""
        ranks, width = self.split.ranks, self.target.hidden * DTYPE_BYTES[self.target.dtype]
        each = 3 if self.split.shards > 1 else 2
        gather = machine.allreduce_us(device, ranks, rows * 8)
        spent = (each * self.target.layers + 1) * machine.allreduce_us(device, ranks, rows * width) + gather
        if shape != "plain":
            block = machine.allreduce_us(device, ranks, self.drafter.block * width)
            spent += (each * self.drafter.layers + 1) * block + gather
        return spent

    def _touched(self, rows: int) -> float | None:
        """Distinct experts a MoE layer; None for a dense model."""
        experts, top_k = getattr(self.target, "experts", 0), getattr(self.target, "top_k", 0)
        return round(uniform_experts(rows, top_k, experts), 1) if experts else None

    @cached_property
    def _parts(self) -> dict[str, list[Part]]:
        weights = {weight.value.name: weight for weight in self.program.weights}
        live = 1 / self.program.sizes.sequences
        run = {name for shape, nodes in self.kinds() for name in _segments(shape, nodes)}
        return {g.name: _parts_of(g, weights, self.split, live) for g in self.program.segments if g.name in run}


def _segments(shape: str, nodes: int) -> tuple[str, ...]:
    """The segments of a round, a greedy one."""
    if shape == "plain":
        return ("plain", "pick[greedy]", "plain_commit")
    return ("draft", shape, f"verify[{nodes}]", "pick[greedy]", "commit")


@dataclass(frozen=True)
class Part:
    """`count` ops of a segment that cost the same: `weights` are (class, a rank's bytes), `cache` the K/V's class and a
    rank's share of it ("" without one), `share` a rank's part of the FLOPs, `live` the part of the rows that count."""

    op: Op
    count: int
    weights: tuple[tuple[str, int], ...]
    cache: tuple[str, float]
    share: float
    live: float

    @property
    def dtype(self) -> str:
        """Of the operands; what is no matmul has no FLOPs either."""
        dtype = self.op.args[0].dtype
        return dtype if dtype in ("f32", "bf16", "fp8_e4m3") else "f32"

    def read(self, facts: Facts) -> dict[str, float]:
        """Compulsory bytes by class."""
        record = OPS[self.op.kind]
        share = record.weight_share(self.op, facts) * (self.live if self.op.kind == "embed" else 1.0)
        found: Counter[str] = Counter()
        for name, nbytes in self.weights:
            found[name] += nbytes * share  # pyright: ignore[reportArgumentType] - bytes here are expectations
        name, part = self.cache
        if name:
            found[name] += record.cache_bytes(self.op, facts) * part  # pyright: ignore[reportArgumentType]
        return dict(found)

    def flops(self, facts: Facts) -> float:
        """FLOPs of a rank. Attention's rules count live rows themselves."""
        rows = 1.0 if self.cache[0] else self.live
        return OPS[self.op.kind].flops(self.op, facts) * self.share * rows


def _parts_of(graph: Graph, weights: Mapping[str, Weight], split: Split, live: float) -> list[Part]:
    """The ops of a logical graph, those alike together."""
    found: dict[Any, tuple[Part, int]] = {}
    for op in graph.ops:
        held = [weights[value.name] for value in op.args if value.space == Space.WEIGHT]
        named = tuple((_class(op, weight), split.weight_bytes(weight)) for weight in held)
        caches = [value for value in op.args if _is_cache(value)]
        cache = ("", 0.0)
        if caches:
            name = "drafter_cache" if caches[0].name.startswith("ctx.") else "target_cache"
            cache = (name, split.cache_bytes(caches[0]) / caches[0].type.nbytes)
        part = Part(op, 1, named, cache, _share(op, held, split), live)
        key = (op.kind, tuple(v.type for v in op.args), op.attrs, named, cache, part.share)
        found[key] = (found[key][0] if key in found else part, found[key][1] + 1 if key in found else 1)
    return [Part(p.op, count, p.weights, p.cache, p.share, p.live) for p, count in found.values()]


def _class(op: Op, weight: Weight) -> str:
    if weight.value.name.startswith("drafter."):
        return "drafter"
    if is_experts(weight):
        return "experts"
    return next(CLASSES[part] for part in reversed(op.scope.split("/")) if part in CLASSES)


def _share(op: Op, weights: list[Weight], split: Split) -> float:
    """A rank's part of an op's work: its part of the weight, or of the heads."""
    if weights:
        return split.weight_share(weights[-1])
    if any(map(_is_cache, op.args)) and len(op.args[0].shape) == 3:
        heads = op.args[0].shape[1]
        return -(-heads // split.ranks) / heads
    return 1.0


def _is_cache(value: Value) -> bool:
    return value.space == Space.STATE and len(value.shape) == CACHE_DIMS


def _streams(value: Value) -> bool:
    """Whether a kernel with this argument streams from memory: a matrix, or K/V."""
    return (value.space == Space.WEIGHT and len(value.shape) > 1) or _is_cache(value)


def _rounded(x: float) -> float:
    """Six significant digits, so that every machine prints the same."""
    return float(f"{x:.6g}")
