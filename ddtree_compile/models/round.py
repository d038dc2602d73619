"""All segments of a round, from two configs and a spec: the logical graphs, before any pass.

    draft -> tree (or chain) -> verify[b] -> pick[...] -> commit      a round of bucket b
    plain -> pick[...] -> plain_commit                                a round without a drafter
    prefill[c] ... prefill[c] -> pick[...] -> seat                    a prompt

STATE, a row a sequence: length (committed tokens), root (the last emitted token, not yet run), active, remaining
(tokens still wanted), stops, and the sampling parameters. The host writes them between rounds, and reads IO after one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddtree_compile.ir.graph import Graph, Space, TensorType, Value
from ddtree_compile.ir.ops.commit import STOPS
from ddtree_compile.ir.weights import Weight
from ddtree_compile.models import dflash
from ddtree_compile.models.builder import Builder, Source
from ddtree_compile.models.config import DFlashConfig, KimiConfig, Qwen3Config, TargetConfig
from ddtree_compile.models.kimi import kimi
from ddtree_compile.models.qwen3 import qwen3
from ddtree_compile.models.segment import Rows, Sizes, Target, round_value, state
from ddtree_compile.spec import CompileSpec

LONG_CACHE = 4096  # slots from which a GPU's attention is split over keys
SPLITS = 8

BUILDERS: dict[type, Callable[[Any, Source, Sizes], Target]] = {KimiConfig: kimi, Qwen3Config: qwen3}


@dataclass(frozen=True, slots=True)
class Program:
    """The segments of a plan in the order a round runs them, the weights they name, and the sizes they share."""

    segments: tuple[Graph, ...]
    weights: tuple[Weight, ...]
    sizes: Sizes


def sizes_of(spec: CompileSpec, drafter: DFlashConfig) -> Sizes:
    """The sizes that all segments share."""
    budget = max(spec.tree.buckets)
    sequences = spec.cache.max_sequences
    split = spec.machine.gpu != "cpu" and spec.cache.max_seq_len >= LONG_CACHE
    return Sizes(
        sequences, spec.cache.max_seq_len, drafter.horizon, budget, sequences * (budget + 1), SPLITS if split else 1
    )


def build_program(spec: CompileSpec, target: TargetConfig, drafter: DFlashConfig) -> Program:
    """Lower a whole round of both models. SpecError when the tree cannot hold a bucket."""
    spec.check_tree(drafter.horizon, target.vocab)
    sizes = sizes_of(spec, drafter)
    seed = spec.model.seed if spec.model.weights == "random" else None
    source = Source("target", target.quantisation, seed)
    model = BUILDERS[type(target)](target, source, sizes)
    weights: dict[str, Weight] = {}
    top_k = spec.top_k(target.vocab)
    segments = _Segments(model, drafter, Source("drafter", None, seed), sizes, weights, top_k)
    graphs = [segments.draft()]
    if spec.tree.shape == "tree":
        graphs.append(segments.tree("tree", sizes.budget, spine=spec.tree.keep_top1_chain, chain=False))
    graphs.append(segments.tree("chain", sizes.budget, spine=False, chain=True))
    graphs += [segments.verify(bucket) for bucket in spec.tree.buckets]
    graphs += [segments.pick(kind) for kind in ("greedy", "sample", "filter")]
    graphs += [segments.commit("commit", drafter.taps), segments.plain(), segments.commit("plain_commit", ())]
    graphs += [segments.prefill(chunk) for chunk in spec.prefill.chunks]
    graphs.append(segments.seat())
    return Program(tuple(graphs), tuple(weights.values()), sizes)


@dataclass(frozen=True)
class _Segments:
    """One method a segment; the values they share are named alike in all of them."""

    target: Target
    drafter: DFlashConfig
    drafter_source: Source
    sizes: Sizes
    weights: dict[str, Weight]
    top_k: int

    def draft(self) -> Graph:
        b = self._builder("draft")
        dflash.draft(
            b, self.drafter, self.drafter_source, self.sizes, self.target, self._each("root"), self._each("length"),
            self._each("active"), self.top_k,
        )  # fmt: skip
        return b.graph()

    def tree(self, name: str, budget: int, *, spine: bool, chain: bool) -> Graph:
        b = self._builder(name)
        shape = (self.sizes.sequences * self.sizes.horizon, self.top_k)
        b.ops_out(
            "best_first",
            Value("draft.lp", TensorType(shape, "f32"), Space.ROUND),
            Value("draft.ids", TensorType(shape, "i32"), Space.ROUND),
            self._each("root"),
            self._each("active"),
            outs=tuple(round_value(f"tree.{part}") for part in ("tokens", "parents", "depths", "bits", "scores")),
            budget=budget,
            spine=spine,
            chain=chain,
        )
        return b.graph()

    def verify(self, bucket: int) -> Graph:
        b = self._builder(f"verify[{bucket}]")
        flat = (self.sizes.sequences, self.sizes.budget + 1)
        rows = self._rows(
            b, "node_rows", self._tree("tokens", flat), self._tree("depths", flat),
            self._tree("bits", (*flat, -(-flat[1] // 32))), self._each("length"), self._each("active"),
            nodes=bucket + 1,
        )  # fmt: skip
        self.target.logits(b, self.target.body(b, rows, self.drafter.taps))
        return b.graph()

    def plain(self) -> Graph:
        b = self._builder("plain")
        rows = self._rows(b, "root_rows", self._each("root"), self._each("length"), self._each("active"))
        self.target.logits(b, self.target.body(b, rows, ()))
        return b.graph()

    def pick(self, kind: str) -> Graph:
        b = self._builder(f"pick[{kind}]")
        logits = Value("logits", TensorType((self.sizes.rows, self.target.config.vocab), "f32"), Space.ROUND)
        args = [logits, self._per_row("row_sequence")]
        if kind != "greedy":
            args += [self._per_row("row_position"), self._each("temperature", "f32"), self._each("seed", "i64")]
        if kind == "filter":
            args += [self._each("top_k"), self._each("top_p", "f32"), self._each("min_p", "f32")]
        b.op(f"pick_{kind}", *args, outs=(round_value("picks"),))
        return b.graph()

    def commit(self, name: str, taps: tuple[int, ...]) -> Graph:
        b = self._builder(name)
        sizes, width = self.sizes, self.sizes.horizon + 1
        flat = (sizes.sequences, sizes.budget + 1)
        length, active, remaining = self._each("length"), self._each("active"), self._each("remaining")
        path_rows, accepted, emitted, finish = b.ops_out(
            "walk", self._per_row("picks"), self._tree("tokens", flat), self._tree("parents", flat),
            self._per_row("row_sequence"), Value("row_nodes", TensorType((1,), "i32"), Space.ROUND), length, active,
            remaining, self._stops(), outs=("path_rows", *self._report()), width=width, slots=sizes.slots,
        )  # fmt: skip
        with b.scope("caches"):
            for cached in self.target.caches:
                b.update("commit_rows", path_rows, accepted, length, cached.tree, cached.cache)
        if taps:
            with b.scope("context"):
                positions, row_sequence = b.ops_out(
                    "path_positions", length, accepted, outs=("path_positions", "path_sequence"), width=width
                )
                hidden = TensorType((sizes.rows, self.target.config.hidden), self.target.dtype)
                states = tuple(
                    b.op("gather_rows", Value(f"tap.{i}", hidden, Space.ROUND), path_rows, name=f"tapped.{i}")
                    for i in range(len(taps))
                )
                dflash.extend(b, self.drafter, self.drafter_source, sizes, states, positions, row_sequence)
        b.update("advance", accepted, emitted, length, self._each("root"), remaining, active, finish)
        return b.graph()

    def prefill(self, chunk: int) -> Graph:
        b = self._builder(f"prefill[{chunk}]")
        slot, start, count = (self._io(name, (1,)) for name in ("prompt.slot", "prompt.start", "prompt.count"))
        ids, positions, row_sequence = b.ops_out(
            "chunk_rows", self._io("prompt.tokens", (chunk,)), slot, start, count,
            outs=("ids", "positions", "chunk_sequence"),
        )  # fmt: skip
        x = self.target.body(b, Rows(ids, positions, row_sequence), self.drafter.taps)
        with b.scope("context"):
            hidden = TensorType((chunk, self.target.config.hidden), self.target.dtype)
            taps = tuple(Value(f"tap.{i}", hidden, Space.ROUND) for i in range(len(self.drafter.taps)))
            dflash.extend(b, self.drafter, self.drafter_source, self.sizes, taps, positions, row_sequence)
        b.ops_out(
            "chunk_pick", slot, start, count, outs=(round_value("row_sequence"), round_value("row_position")),
            rows=self.sizes.rows,
        )  # fmt: skip
        self.target.logits(b, b.op("last_row", x, count, name="last"))
        return b.graph()

    def seat(self) -> Graph:
        b = self._builder("seat")
        slot, start, count = (self._io(name, (1,)) for name in ("prompt.slot", "prompt.start", "prompt.count"))
        b.ops_out(
            "seat", self._per_row("picks"), slot, start, count, self._stops(), self._each("length"), self._each("root"),
            self._each("remaining"), self._each("active"), outs=self._report(), width=self.sizes.horizon + 1,
            slots=self.sizes.slots,
        )  # fmt: skip
        return b.graph()

    def _builder(self, segment: str) -> Builder:
        return Builder(segment, self.weights)

    def _rows(self, b: Builder, kind: str, *args: Value, **attrs: int) -> Rows:
        ids, positions, bits, row_sequence, *_ = b.ops_out(
            kind, *args,
            outs=("ids", "positions", "bits", *map(round_value, ("row_sequence", "row_position", "row_nodes"))),
            rows=self.sizes.rows, slots=self.sizes.slots, **attrs,
        )  # fmt: skip
        return Rows(ids, positions, row_sequence, bits, self._each("length"))

    def _each(self, name: str, dtype: str = "i32") -> Value:
        """STATE with one value a sequence."""
        return state(name, (self.sizes.sequences,), dtype)

    def _stops(self) -> Value:
        return state("stops", (self.sizes.sequences, STOPS), "i32")

    def _per_row(self, name: str) -> Value:
        return Value(name, TensorType((self.sizes.rows,), "i32"), Space.ROUND)

    def _tree(self, part: str, shape: tuple[int, ...]) -> Value:
        return Value(f"tree.{part}", TensorType(shape, "i32"), Space.ROUND)

    def _io(self, name: str, shape: tuple[int, ...]) -> Value:
        return Value(name, TensorType(shape, "i32"), Space.IO)

    def _report(self) -> tuple[Value, Value, Value]:
        """What the host reads after a round."""
        accepted, emitted, finish = (self._io(name, ()) for name in ("accepted", "emitted", "finish"))
        return accepted, emitted, finish
