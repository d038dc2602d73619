"""Kimi K2 and DeepSeek-V3 as a graph: MLA over a latent cache, dense first layers, routed and shared experts.

Semantics are those of transformers' DeepseekV3ForCausalLM. The cache holds, for each token, the normed latent and the
turned shared key: kv_lora + rope values (576 in Kimi K2). MLA is written as it is defined; the absorb pass folds the
key and value projections into the queries and outputs where that is cheaper.
"""

from __future__ import annotations

from ddtree_compile.ir.graph import Space, TensorType, Value
from ddtree_compile.models.builder import Builder, Module, Source, mlp, turn
from ddtree_compile.models.config import KimiConfig
from ddtree_compile.models.segment import Cached, Rows, Sizes, Target, keep_kv, state


def kimi(config: KimiConfig, source: Source, sizes: Sizes) -> Target:
    """The target's builders for one plan."""

    def layer(b: Builder, m: Module, rows: Rows, x: Value, index: int) -> Value:
        with b.scope("attn"):
            x = _attention(b, config, m, rows, x, _cached(config, sizes, index), sizes)
        return _dense(b, config, m, x) if index < config.dense_layers else _moe(b, config, m, rows, x)

    caches = tuple(_cached(config, sizes, index) for index in range(config.layers))
    return Target(config, source, caches, layer)


def _cached(config: KimiConfig, sizes: Sizes, layer: int) -> Cached:
    width = config.kv_lora + config.rope.dim
    return Cached(
        Value(f"tree.l{layer:02d}", TensorType((sizes.rows, 1, width), config.dtype), Space.ROUND),
        state(f"latent.l{layer:02d}", (sizes.sequences, sizes.slots, 1, width), config.dtype),
    )


def _query(b: Builder, config: KimiConfig, m: Module, x: Value, positions: Value) -> Value:
    """Queries of x [R, hidden]: [R, H, nope + rope], the last part turned."""
    heads, width = config.heads, config.nope + config.rope.dim
    inputs, module = config.hidden, "q_proj"
    if config.q_lora is not None:
        down = m.linear("self_attn.q_a_proj", config.q_lora, config.hidden, "q_a")
        gain = m.norm("self_attn.q_a_layernorm.weight", config.q_lora, "q_a_norm")
        x = b.op("rms_norm", b.op("linear", x, down, name="q_a"), gain, name="q_an", eps=config.inner_eps)
        inputs, module = config.q_lora, "q_b_proj"
    up = m.linear(f"self_attn.{module}", heads * width, inputs, "q_b", 0)
    q = b.op("heads", b.op("linear", x, up, name="q_b"), name="q_heads", heads=heads)
    content = b.op("cut", q, name="q_nope", start=0, stop=config.nope)
    last = b.op("cut", q, name="q_rope", start=config.nope, stop=width)
    return b.op("cat", content, turn(b, last, positions, config.rope, "q_pe"), name="q")


def _record(b: Builder, config: KimiConfig, m: Module, x: Value, positions: Value) -> Value:
    """What the cache holds of x [R, hidden]: the normed latent and the turned shared key, [R, 1, kv_lora + rope]."""
    width = config.kv_lora + config.rope.dim
    kv = b.op("linear", x, m.linear("self_attn.kv_a_proj_with_mqa", width, config.hidden, "kv_a"), name="kv")
    gain = m.norm("self_attn.kv_a_layernorm.weight", config.kv_lora, "kv_a_norm")
    latent = b.op("cut", kv, name="c", start=0, stop=config.kv_lora)
    latent = b.op("rms_norm", latent, gain, name="cn", eps=config.inner_eps)
    key = b.op("cut", kv, name="k", start=config.kv_lora, stop=width)
    key = turn(b, key, positions, config.rope, "k_pe")
    return b.op("heads", b.op("cat", latent, key, name="record"), name="kv_record", heads=1)


def _attention(b: Builder, config: KimiConfig, m: Module, rows: Rows, x: Value, cached: Cached, sizes: Sizes) -> Value:
    """x + o_proj(MLA(input_layernorm(x)))."""
    gain = m.norm("input_layernorm.weight", config.hidden, "attn_norm")
    normed = b.op("rms_norm", x, gain, name="n", eps=config.eps)
    q = _query(b, config, m, normed, rows.positions)
    record = keep_kv(b, rows, _record(b, config, m, normed, rows.positions), cached.cache, cached.tree.name)

    of = config.nope + config.v_dim
    w_uk = m.per_head("self_attn.kv_b_proj", config.heads, (0, config.nope), of, config.kv_lora, "w_uk")
    w_uv = m.per_head("self_attn.kv_b_proj", config.heads, (config.nope, of), of, config.kv_lora, "w_uv")
    if rows.bits is not None and rows.length is not None:
        kind, args = "mla_tree", (q, cached.cache, record, w_uk, w_uv, rows.length, rows.row_sequence, rows.bits)
    else:
        kind, args = "mla_causal", (q, cached.cache, w_uk, w_uv, rows.positions, rows.row_sequence)
    out = b.op(kind, *args, name="attended", scale=config.softmax_scale, splits=sizes.splits)
    o_proj = m.linear("self_attn.o_proj", config.hidden, config.heads * config.v_dim, "o", 1)
    return b.op("add", x, b.op("linear", b.op("flat", out, name="attended_flat"), o_proj, name="o"), name="h")


def _dense(b: Builder, config: KimiConfig, m: Module, x: Value) -> Value:
    """x + MLP(post_attention_layernorm(x)), the first layers."""
    with b.scope("mlp"):
        gain = m.norm("post_attention_layernorm.weight", config.hidden, "mlp_norm")
        normed = b.op("rms_norm", x, gain, name="m", eps=config.eps)
        return b.op("add", x, mlp(b, m, normed, config.hidden, config.intermediate, "mlp"), name="x")


def _moe(b: Builder, config: KimiConfig, m: Module, rows: Rows, x: Value) -> Value:
    """x + routed experts + shared expert of post_attention_layernorm(x). The router runs in fp32."""
    hidden, width, count = config.hidden, config.moe_intermediate, config.experts
    with b.scope("moe"):
        gain = m.norm("post_attention_layernorm.weight", hidden, "mlp_norm")
        normed = b.op("rms_norm", x, gain, name="m", eps=config.eps)
        with b.scope("router"):
            recipe = m.source.dense(f"{m.prefix}mlp.gate.weight", (count, hidden))  # a parameter, no Linear: never int4
            gate = b.weight(f"{m.label}.router", (count, hidden), config.dtype, recipe)
            bias = m.vector("mlp.gate.e_score_correction_bias", count, "router_bias", "f32")
            logits = b.op("linear", normed, gate, name="scores", dtype="f32")
            ids, weights = b.ops_out(
                "route", logits, bias, rows.row_sequence, outs=("expert_ids", "expert_weights"), top_k=config.top_k,
                normalise=config.norm_topk, scale=config.routed_scale,
            )  # fmt: skip
        with b.scope("experts"):
            w_gate = m.experts("mlp.experts.{}.gate_proj", count, width, hidden, "experts.gate", 1)
            w_up = m.experts("mlp.experts.{}.up_proj", count, width, hidden, "experts.up", 1)
            w_down = m.experts("mlp.experts.{}.down_proj", count, hidden, width, "experts.down", 2)
            inner = b.op(
                "swiglu",
                b.op("expert_linear", normed, ids, w_gate, name="experts.gate"),
                b.op("expert_linear", normed, ids, w_up, name="experts.up"),
                name="experts.inner",
            )
            each = b.op("expert_linear", inner, ids, w_down, name="experts.each")
            out = b.op("combine", each, ids, weights, name="routed")
        if config.shared_experts:
            with b.scope("shared"):
                shared = mlp(b, m, normed, hidden, width * config.shared_experts, "mlp.shared_experts", "shared")
                out = b.op("add", out, shared, name="experts_out")
        return b.op("add", x, out, name="x")
