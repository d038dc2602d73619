"""The DFlash drafter as a graph (arXiv 2602.06036): `draft` the block, and `extend` its context caches.

The context of a token is hidden_norm(fc(the target's tapped hidden states)); it enters each layer's k_proj and v_proj
as it is, past the layer's input norm. Keys are normed and turned before they are cached. Embedding and head are the
target's.
"""

from __future__ import annotations

from ddtree_compile.ir.graph import Value
from ddtree_compile.models.builder import Builder, Module, Source
from ddtree_compile.models.config import DFlashConfig
from ddtree_compile.models.qwen3 import qwen_heads, qwen_mlp, qwen_norm, qwen_out, qwen_values
from ddtree_compile.models.segment import Sizes, Target, round_value, state


def context_caches(config: DFlashConfig, sizes: Sizes, dtype: str, layer: int) -> tuple[Value, Value]:
    """Keys and values of the context, a layer: [S, T, kv_heads, head_dim]."""
    shape = (sizes.sequences, sizes.slots, config.kv_heads, config.head_dim)
    return state(f"ctx.k.l{layer:02d}", shape, dtype), state(f"ctx.v.l{layer:02d}", shape, dtype)


def _module(b: Builder, config: DFlashConfig, source: Source, layer: int | None = None) -> Module:
    if layer is None:
        return Module(b, source, "", "drafter", config.dtype)
    return Module(b, source, f"layers.{layer}.", f"drafter.l{layer:02d}", config.dtype)


def draft(
    b: Builder, config: DFlashConfig, source: Source, sizes: Sizes, target: Target, root: Value, length: Value,
    active: Value, top_k: int,
) -> None:  # fmt: skip
    """From roots to the `top_k` candidates of each depth, `draft.lp` and `draft.ids` [S * horizon, k] in ROUND."""
    ids, positions = b.ops_out(
        "block_rows", root, length, active, outs=("block_ids", "block_positions"), block=config.block,
        mask=config.mask_token,
    )  # fmt: skip
    with b.scope("embed"):
        x = b.op("embed", ids, target.embed(b), name="x")
    for layer in range(config.layers):
        with b.layer(f"d{layer:02d}"):
            m = _module(b, config, source, layer)
            with b.scope("attn"):
                normed = qwen_norm(b, config, m, x)
                part, lse = b.ops_out(
                    "attend_block",
                    qwen_heads(b, config, m, normed, positions, "q", "q"),
                    *context_caches(config, sizes, target.dtype, layer),
                    qwen_heads(b, config, m, normed, positions, "k", "k"),
                    qwen_values(b, config, m, normed, "v"),
                    length,
                    active,
                    outs=("part", "lse"),
                    scale=config.head_dim**-0.5,
                    causal=config.causal[layer],
                    window=config.window[layer],
                    splits=sizes.splits,
                )
                attended = b.op("merge", part, lse, name="attended", dtype=x.dtype)
                x = qwen_out(b, config, m, x, attended)
            x = qwen_mlp(b, config, m, x)
    with b.scope("head"):
        drafts = b.op("draft_rows", x, name="drafts", block=config.block)
        gain = _module(b, config, source).norm("norm.weight", config.hidden, "norm")
        normed = b.op("rms_norm", drafts, gain, name="final", eps=config.eps)
        logits = b.op("linear", normed, target.head(b), name="draft_logits", dtype="f32")
        b.ops_out("top_log_probs", logits, outs=(round_value("draft.lp"), round_value("draft.ids")), k=top_k)


def extend(
    b: Builder, config: DFlashConfig, source: Source, sizes: Sizes, taps: tuple[Value, ...], positions: Value,
    row_sequence: Value,
) -> None:  # fmt: skip
    """Context K/V of rows from their taps (each [R, hidden]), written at their sequences' positions."""
    dtype = taps[0].dtype
    m = _module(b, config, source)
    joined = b.op("cat", *taps, name="taps")
    fc = m.linear("fc", config.hidden, len(taps) * config.hidden, "fc")
    gain = m.norm("hidden_norm.weight", config.hidden, "hidden_norm")
    context = b.op("rms_norm", b.op("linear", joined, fc, name="fc"), gain, name="context", eps=config.eps)
    for layer in range(config.layers):
        with b.layer(f"d{layer:02d}"):
            m = _module(b, config, source, layer)
            keys, values = context_caches(config, sizes, dtype, layer)
            k = qwen_heads(b, config, m, context, positions, "k", "ck")
            b.update("write_chunk", k, keys, positions, row_sequence)
            b.update("write_chunk", qwen_values(b, config, m, context, "cv"), values, positions, row_sequence)
