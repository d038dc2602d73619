"""Building one segment's graph: ops typed by their records as they are added, weights collected as recipes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ddtree_compile.errors import SpecError
from ddtree_compile.ir.graph import Attr, Graph, Op, Space, TensorType, Value
from ddtree_compile.ir.layouts import GROUP
from ddtree_compile.ir.ops import OPS
from ddtree_compile.ir.weights import Cut, Int4, Random, Recipe, Stack, Take, View, Weight
from ddtree_compile.models.config import Quantisation, Rope
from ddtree_compile.models.config_quant import covers


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's weights come from: its checkpoint (`owner` is "target" or "drafter"), or a seed."""

    owner: str
    quantisation: Quantisation | None = None
    seed: int | None = None

    def dense(self, tensor: str, shape: tuple[int, ...], std: float | None = None, mean: float = 0.0) -> Recipe:
        """The tensor as it is; at random, normal with 1/sqrt(inputs) unless `std` says otherwise."""
        if self.seed is None:
            return Take(f"{self.owner}:{tensor}")
        return Random(f"{self.owner}:{tensor}", shape, self.seed, shape[-1] ** -0.5 if std is None else std, mean)

    def linear(self, module: str, shape: tuple[int, ...]) -> tuple[Recipe, str]:
        """Recipe and layout of a Linear's weight [N, K], int4 where the checkpoint's config says so."""
        if self.quantisation is None or not covers(self.quantisation, module):
            return self.dense(f"{module}.weight", shape), "rows"
        group = self.quantisation.group
        if shape[-1] % group:
            raise SpecError(
                f"{self.owner}: config.json: group_size = {group} of its quantization_config does not divide the "
                f"{shape[-1]} inputs of {module}; correct it, or use a checkpoint that is not quantised"
            )
        recipe = Int4(f"{self.owner}:{module}", group) if self.seed is None else self.dense(f"{module}.weight", shape)
        return recipe, "int4_block256" if group == GROUP else "rows"

    def stacked(self, module: str, count: int, shape: tuple[int, ...]) -> tuple[Recipe, str]:
        """`count` Linears, `{}` in `module` their index, as one weight [count, N, K]."""
        if self.seed is not None:
            recipe, layout = self.linear(module.replace("{}", "0"), (count, *shape))
            return recipe, layout
        recipe, layout = self.linear(module.replace("{}", "0"), shape)
        pattern = (
            Int4(f"{self.owner}:{module}", recipe.group)
            if isinstance(recipe, Int4)
            else Take(f"{self.owner}:{module}.weight")
        )
        return Stack(pattern, count), layout


@dataclass
class Builder:
    """Collects the ops of one segment. `weights` is shared by all segments of a plan."""

    segment: str
    weights: dict[str, Weight]
    ops: list[Op] = field(default_factory=list)
    _scope: tuple[str, ...] = ()
    _layer: str = ""
    _names: set[str] = field(default_factory=set)

    @contextmanager
    def layer(self, name: str) -> Generator[None]:
        """Names and scopes inside get the layer's prefix, such as `l07`."""
        before = self._layer
        self._layer = f"{name}."
        with self.scope(name):
            yield
        self._layer = before

    @contextmanager
    def scope(self, name: str) -> Generator[None]:
        self._scope = (*self._scope, name)
        yield
        self._scope = self._scope[:-1]

    def op(
        self, kind: str, *args: Value, name: str = "", outs: tuple[Value | str, ...] | None = None, **attrs: Attr
    ) -> Value:
        """Add an op and give its first out. `name` names a single TEMP out; `outs` names each, or gives the value."""
        named: tuple[Value | str, ...] = (name,) if outs is None else outs
        return self.ops_out(kind, *args, outs=named, **attrs)[0]

    def ops_out(self, kind: str, *args: Value, outs: tuple[Value | str, ...] = (), **attrs: Attr) -> tuple[Value, ...]:
        """Add an op and give all its outs."""
        op = Op(kind, args, (), tuple(sorted(attrs.items())), "/".join((self.segment, *self._scope)))
        types = OPS[kind].shape(op)
        assert len(types) == len(outs), f"{kind} has {len(types)} outs, {len(outs)} named"
        made = tuple(
            self._named(out, type_) if isinstance(out, str) else replace(out, type=type_)
            for out, type_ in zip(outs, types, strict=True)
        )
        self.ops.append(replace(op, outs=made))
        return made

    def update(self, kind: str, *args: Value, **attrs: Attr) -> None:
        """Add an op that only updates its arguments."""
        self.ops_out(kind, *args, outs=(), **attrs)

    def weight(
        self, name: str, shape: tuple[int, ...], dtype: str, recipe: Recipe, layout: str = "rows",
        split: int | None = None,
    ) -> Value:  # fmt: skip
        """A weight's value; segments that name the same weight must mean the same recipe."""
        value = Value(name, TensorType(shape, dtype), Space.WEIGHT)
        weight = Weight(value, recipe, layout, split)
        assert self.weights.setdefault(name, weight) == weight, f"two recipes for {name}"
        return value

    def graph(self) -> Graph:
        return Graph(self.segment, tuple(self.ops))

    def _named(self, name: str, type_: TensorType) -> Value:
        full = f"{self._layer}{name}"
        assert full not in self._names, f"{self.segment}: two values named {full}"
        self._names.add(full)
        return Value(full, type_, Space.TEMP)


@dataclass(frozen=True, slots=True)
class Module:
    """A named part of a model that makes weight values: `prefix` in the checkpoint, `label` in the plan."""

    b: Builder
    source: Source
    prefix: str
    label: str
    dtype: str

    def linear(self, module: str, n: int, k: int, name: str, split: int | None = None) -> Value:
        recipe, layout = self.source.linear(f"{self.prefix}{module}", (n, k))
        return self.b.weight(f"{self.label}.{name}", (n, k), self.dtype, recipe, layout, split)

    def experts(self, module: str, count: int, n: int, k: int, name: str, split: int) -> Value:
        recipe, layout = self.source.stacked(f"{self.prefix}{module}", count, (n, k))
        return self.b.weight(f"{self.label}.{name}", (count, n, k), self.dtype, recipe, layout, split)

    def per_head(self, module: str, heads: int, rows: tuple[int, int], of: int, k: int, name: str) -> Value:
        """Rows [start, stop) of each head's `of` rows of a Linear [heads * of, k]: [heads, stop - start, k]."""
        recipe, _ = self.source.linear(f"{self.prefix}{module}", (heads * of, k))
        cut = Cut(View(recipe, (heads, of, k)), 1, *rows)
        return self.b.weight(f"{self.label}.{name}", (heads, rows[1] - rows[0], k), self.dtype, cut, split=0)

    def norm(self, tensor: str, width: int, name: str) -> Value:
        recipe = self.source.dense(f"{self.prefix}{tensor}", (width,), std=0.1, mean=1.0)
        return self.b.weight(f"{self.label}.{name}", (width,), self.dtype, recipe)

    def vector(self, tensor: str, width: int, name: str, dtype: str) -> Value:
        recipe = self.source.dense(f"{self.prefix}{tensor}", (width,), std=0.01)
        return self.b.weight(f"{self.label}.{name}", (width,), dtype, recipe)


def turn(b: Builder, x: Value, positions: Value, rope: Rope, name: str) -> Value:
    """x [R, ..., rope.dim] turned by positions [R]."""
    return b.op(
        "rope", x, positions, name=name, theta=rope.theta, interleaved=rope.interleaved, factor=rope.factor,
        original_max=rope.original_max, beta_fast=rope.beta_fast, beta_slow=rope.beta_slow, amplitude=rope.amplitude,
    )  # fmt: skip


def mlp(b: Builder, m: Module, x: Value, hidden: int, width: int, module: str, name: str = "mlp") -> Value:
    """down(silu(gate(x)) * up(x)): x [R, hidden], inner width `width`."""
    gate = b.op("linear", x, m.linear(f"{module}.gate_proj", width, hidden, f"{name}.gate", 0), name=f"{name}.gate")
    up = b.op("linear", x, m.linear(f"{module}.up_proj", width, hidden, f"{name}.up", 0), name=f"{name}.up")
    inner = b.op("swiglu", gate, up, name=f"{name}.inner")
    return b.op("linear", inner, m.linear(f"{module}.down_proj", hidden, width, f"{name}.down", 1), name=f"{name}.out")
