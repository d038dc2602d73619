"""What a target's builder is given of the segment it stands in: its rows, how they attend, and where K/V goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ddtree_compile.ir.graph import Space, TensorType, Value
from ddtree_compile.models.builder import Builder, Module, Source
from ddtree_compile.models.config import TargetConfig


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that a spec and two configs fix for a plan. Counts of sequences, nodes, rows, tokens."""

    sequences: int
    slots: int  # of a cache: max_seq_len
    horizon: int
    budget: int  # nodes of the largest tree besides its root
    rows: int  # of the largest segment that a pick follows
    splits: int  # partial results of attention over a cache


@dataclass(frozen=True, slots=True)
class Rows:
    """A segment's rows. `bits` and `length` say that they are tree rows; without them they are a chunk's."""

    ids: Value
    positions: Value
    row_sequence: Value
    bits: Value | None = None
    length: Value | None = None


def state(name: str, shape: tuple[int, ...], dtype: str) -> Value:
    """A STATE value."""
    return Value(name, TensorType(shape, dtype), Space.STATE)


def round_value(name: str) -> Value:
    """A ROUND value whose type comes from the op that makes it."""
    return Value(name, TensorType((), "i32"), Space.ROUND)


def keep_kv(b: Builder, rows: Rows, x: Value, cache: Value, tree: str) -> Value:
    """K or V of this segment's rows [R, G, d]: a tree's to ROUND under the name `tree`, a chunk's into the cache."""
    if rows.bits is not None:
        return b.op("keep", x, outs=(round_value(tree),))
    b.update("write_chunk", x, cache, rows.positions, rows.row_sequence)
    return x


def attend(
    b: Builder, rows: Rows, q: Value, k_cache: Value, v_cache: Value, k: Value, v: Value, *, scale: float, v_dim: int,
    splits: int,
) -> Value:  # fmt: skip
    """q [R, H, d] over the caches and, for tree rows, their ancestors' k and v: [R, H, v_dim]."""
    if rows.bits is not None and rows.length is not None:
        kind, args = "attend_tree", (q, k_cache, v_cache, k, v, rows.length, rows.row_sequence, rows.bits)
    else:
        kind, args = "attend_causal", (q, k_cache, v_cache, rows.positions, rows.row_sequence)
    part, lse = b.ops_out(kind, *args, outs=("part", "lse"), scale=scale, v_dim=v_dim, splits=splits)
    return b.op("merge", part, lse, name="attended", dtype=q.dtype)


@dataclass(frozen=True, slots=True)
class Cached:
    """A tree buffer in ROUND and the cache in STATE that its accepted rows are committed to."""

    tree: Value
    cache: Value

    def rows(self, count: int) -> Value:
        """The tree buffer with `count` rows."""
        shape = (count, *self.tree.shape[1:])
        return replace(self.tree, type=TensorType(shape, self.tree.dtype))


@dataclass(frozen=True, slots=True)
class Target:
    """A target model as the round sees it: embedding, layers, final norm, head.

    `layer(b, m, rows, x, index)` adds one layer to the hidden state x [R, hidden]. Of the model's own `config` only
    what all targets share is read here.
    """

    config: TargetConfig
    source: Source
    caches: tuple[Cached, ...]
    layer: Callable[[Builder, Module, Rows, Value, int], Value]

    @property
    def dtype(self) -> str:
        return self.config.dtype

    def module(self, b: Builder, layer: int | None = None) -> Module:
        """The weights of a layer, or those outside of all."""
        if layer is None:
            return Module(b, self.source, self.config.prefix, "target", self.dtype)
        return Module(b, self.source, f"{self.config.prefix}layers.{layer}.", f"target.l{layer:02d}", self.dtype)

    def embed(self, b: Builder) -> Value:
        """The embedding's rows [V, hidden]; the drafter shares them."""
        return self._vocabulary(b, f"{self.config.prefix}embed_tokens.weight", "target.embed", std=1.0)

    def head(self, b: Builder) -> Value:
        """The head's weight [V, hidden], the embedding's when they are tied; the drafter shares it."""
        return self.embed(b) if self.config.tied else self._vocabulary(b, self.config.head, "target.head")

    def body(self, b: Builder, rows: Rows, taps: tuple[int, ...]) -> Value:
        """Embedding and layers: the last hidden state [R, hidden]. Those after the layers in `taps` are kept in ROUND
        as `tap.i`."""
        with b.scope("embed"):
            x = b.op("embed", rows.ids, self.embed(b), name="x")
        for index in range(self.config.layers):
            with b.layer(f"l{index:02d}"):
                x = self.layer(b, self.module(b, index), rows, x, index)
                if index in taps:
                    b.op("keep", x, outs=(round_value(f"tap.{taps.index(index)}"),))
        return x

    def logits(self, b: Builder, x: Value) -> Value:
        """The vocabulary's logits of x [R, hidden], fp32, in ROUND."""
        with b.scope("head"):
            gain = self.module(b).norm("norm.weight", self.config.hidden, "norm")
            final = b.op("rms_norm", x, gain, name="final", eps=self.config.eps)
            return b.op("linear", final, self.head(b), outs=(round_value("logits"),), dtype="f32")

    def _vocabulary(self, b: Builder, tensor: str, name: str, std: float | None = None) -> Value:
        shape = (self.config.vocab, self.config.hidden)
        return b.weight(name, shape, self.dtype, self.source.dense(tensor, shape, std), split=0)
