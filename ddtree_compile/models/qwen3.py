"""Qwen3 dense as a graph: GQA with per-head norms of q and k, SwiGLU. Semantics: transformers' Qwen3ForCausalLM.

`qwen_heads` is shared with the DFlash drafter, whose layers are Qwen3's.
"""

from __future__ import annotations

from ddtree_compile.ir.graph import Space, TensorType, Value
from ddtree_compile.models.builder import Builder, Module, Source, mlp, turn
from ddtree_compile.models.config import DFlashConfig, Qwen3Config
from ddtree_compile.models.segment import Cached, Rows, Sizes, Target, attend, keep_kv, state


def qwen3(config: Qwen3Config, source: Source, sizes: Sizes) -> Target:
    """The target's builders for one plan."""

    def layer(b: Builder, m: Module, rows: Rows, x: Value, index: int) -> Value:
        with b.scope("attn"):
            x = _attention(b, config, m, rows, x, _cached(config, sizes, index), sizes)
        return qwen_mlp(b, config, m, x)

    caches = tuple(cached for index in range(config.layers) for cached in _cached(config, sizes, index))
    return Target(config, source, caches, layer)


def _cached(config: Qwen3Config, sizes: Sizes, layer: int) -> tuple[Cached, Cached]:
    """Keys and values of a layer."""

    def one(kind: str) -> Cached:
        shape = (config.kv_heads, config.head_dim)
        return Cached(
            Value(f"tree.{kind}.l{layer:02d}", TensorType((sizes.rows, *shape), config.dtype), Space.ROUND),
            state(f"{kind}.l{layer:02d}", (sizes.sequences, sizes.slots, *shape), config.dtype),
        )

    return one("k"), one("v")


def qwen_heads(
    b: Builder, config: Qwen3Config | DFlashConfig, m: Module, x: Value, positions: Value, kind: str, name: str
) -> Value:
    """The queries (`kind` "q") or keys ("k") of x [R, hidden]: projected, normed per head, turned: [R, heads, d]."""
    count = config.heads if kind == "q" else config.kv_heads
    w = m.linear(f"self_attn.{kind}_proj", count * config.head_dim, config.hidden, kind, 0)
    split = b.op("heads", b.op("linear", x, w, name=f"{name}_proj"), name=f"{name}_heads", heads=count)
    gain = m.norm(f"self_attn.{kind}_norm.weight", config.head_dim, f"{kind}_norm")
    return turn(b, b.op("rms_norm", split, gain, name=f"{name}n", eps=config.eps), positions, config.rope, name)


def qwen_values(b: Builder, config: Qwen3Config | DFlashConfig, m: Module, x: Value, name: str) -> Value:
    """The values of x [R, hidden]: [R, kv_heads, d]."""
    w = m.linear("self_attn.v_proj", config.kv_heads * config.head_dim, config.hidden, "v", 0)
    return b.op("heads", b.op("linear", x, w, name=f"{name}_proj"), name=name, heads=config.kv_heads)


def qwen_out(b: Builder, config: Qwen3Config | DFlashConfig, m: Module, x: Value, attended: Value) -> Value:
    """x + o_proj(attended)."""
    w = m.linear("self_attn.o_proj", config.hidden, config.heads * config.head_dim, "o", 1)
    return b.op("add", x, b.op("linear", b.op("flat", attended, name="attended_flat"), w, name="o"), name="h")


def qwen_norm(b: Builder, config: Qwen3Config | DFlashConfig, m: Module, x: Value) -> Value:
    """input_layernorm(x)."""
    gain = m.norm("input_layernorm.weight", config.hidden, "attn_norm")
    return b.op("rms_norm", x, gain, name="n", eps=config.eps)


def qwen_mlp(b: Builder, config: Qwen3Config | DFlashConfig, m: Module, x: Value) -> Value:
    """x + MLP(post_attention_layernorm(x))."""
    with b.scope("mlp"):
        gain = m.norm("post_attention_layernorm.weight", config.hidden, "mlp_norm")
        normed = b.op("rms_norm", x, gain, name="m", eps=config.eps)
        return b.op("add", x, mlp(b, m, normed, config.hidden, config.intermediate, "mlp"), name="x")


def _attention(
    b: Builder, config: Qwen3Config, m: Module, rows: Rows, x: Value, cached: tuple[Cached, Cached], sizes: Sizes
) -> Value:
    """x + o_proj(attention(input_layernorm(x)))."""
    normed = qwen_norm(b, config, m, x)
    q = qwen_heads(b, config, m, normed, rows.positions, "q", "q")
    k = keep_kv(
        b, rows, qwen_heads(b, config, m, normed, rows.positions, "k", "k"), cached[0].cache, cached[0].tree.name
    )
    v = keep_kv(b, rows, qwen_values(b, config, m, normed, "v"), cached[1].cache, cached[1].tree.name)
    attended = attend(
        b, rows, q, cached[0].cache, cached[1].cache, k, v, scale=config.head_dim**-0.5, v_dim=config.head_dim,
        splits=sizes.splits,
    )  # fmt: skip
    return qwen_out(b, config, m, x, attended)
