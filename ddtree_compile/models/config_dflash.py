"""DFlash drafters (arXiv 2602.06036) in the forms in which they are published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ddtree_compile.errors import SpecError
from ddtree_compile.models.config_fields import Fields, check_architecture, read_dtype, read_layers
from ddtree_compile.models.config_qwen3 import FULL, SLIDING, layer_kinds, read_heads
from ddtree_compile.models.config_rope import read_rope
from ddtree_compile.models.config_types import DFlashConfig, TargetConfig

# What other drafters ask for, with the values that mean "no". Each may stand at the top level or in `dflash_config`.
_REFUSED: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "attention_sink_bias": ((False,), ""),
    "attention_value_scale": ((1.0,), ""),
    "causal_head": ((False,), ""),
    "confidence_head_with_markov": ((False,), "a DSpark drafter"),
    "conv_group_size": ((0,), "a DFlash2 drafter"),
    "conv_kernel_size": ((0,), "a DFlash2 drafter"),
    "enable_confidence_head": ((False,), "a DSpark drafter"),
    "final_logit_softcapping": ((), ""),
    "input_embedding_scale": ((1.0,), ""),
    "markov_head_type": ((), "a DSpark drafter"),
    "markov_rank": ((0,), "a DSpark drafter"),
    "mask_embedding": ((False,), "a mask embedding of its own; the target's row of mask_token_id is used"),
    "output_multiplier": ((1.0,), ""),
    "projector_type": ((), "a Domino or DSpark drafter"),
    "sample_from_anchor": ((False,), "each slot predicts its own position"),
    "selector_rank": ((0,), "a DFlash2 drafter"),
    "selector_top_k": ((0,), "a DFlash2 drafter"),
    "shift_label": ((False,), "each slot predicts its own position"),
    "speculators_model_type": ((), "the speculators format; convert it to a DFlash checkpoint"),
    "use_confidence_head": ((False,), "a DSpark drafter"),
    "use_mask_embedding": ((False,), "a mask embedding of its own; the target's row of mask_token_id is used"),
    "use_qk_norm": ((True,), ""),
}

# A drafter has neither embedding nor head, so tying says nothing; names and training records say nothing either.
_HARMLESS: Final = frozenset(
    {"mask_token", "max_position_embeddings", "mlp_ratio", "num_anchors", "target_model_id", "tie_word_embeddings"}
)


def drafter_from(
    config: Mapping[str, Any],
    target: TargetConfig,
    where: str,
    *,
    rope_amplitude: float | None = None,
    window: int | None = None,
) -> DFlashConfig:
    """The record of a DFlash drafter, checked against its target.

    A full-attention layer sees its whole block, a sliding one is causal, unless `is_causal` or `dflash_config.causal`
    says otherwise. `mask_token_id` and `target_layer_ids` are never guessed: a wrong guess drafts without an error
    and is accepted rarely. `rope_amplitude` replaces the config's YaRN factor on cos and sin; `window` caps the
    context every layer sees. SpecError names what is missing, contradictory or something we lack.
    """
    fields = Fields(config, where)
    nested = fields.table("dflash_config", {})
    _refuse_other_drafters(fields, nested, target)
    hidden, heads, kv_heads, head_dim = read_heads(fields)
    if hidden != target.hidden:
        raise fields.fail("hidden_size", f"differs from the target's, {target.hidden}; they share embedding and head")
    layers = read_layers(fields)
    kinds, windows = _attention(fields, nested, layers, window)
    max_positions = fields.integer("max_position_embeddings", target.max_positions)
    rope, _ = read_rope(fields, head_dim, max_positions, interleaved=False, amplitude=rope_amplitude)
    record = DFlashConfig(
        vocab=target.vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        intermediate=fields.integer("intermediate_size"),
        eps=fields.number("rms_norm_eps"),
        block=_either(fields, nested, "block_size").integer("block_size", low=2),
        mask_token=_either(fields, nested, "mask_token_id").integer("mask_token_id", low=0, high=target.vocab - 1),
        taps=_taps(_either(fields, nested, "target_layer_ids"), target),
        causal=_causal(fields, nested, kinds),
        window=windows,
        dtype=read_dtype(fields, default=target.dtype),
    )
    nested.done(_HARMLESS)
    fields.done(_HARMLESS)
    return record


def _refuse_other_drafters(fields: Fields, nested: Fields, target: TargetConfig) -> None:
    check_architecture(fields, ("DFlashDraftModel",))
    fields.only("model_type", ("qwen3",))
    for table in (fields, nested):
        for key, (neutral, note) in _REFUSED.items():
            table.only(key, neutral, note)
    for key in ("attention_bias", "mlp_bias"):
        fields.only(key, (False,))
    fields.only("hidden_act", ("silu",))
    fields.only("quantization_config", (), "a quantised drafter")
    for key in ("vocab_size", "draft_vocab_size"):
        if fields.raw(key, target.vocab) != target.vocab:
            raise fields.fail(key, f"differs from the target's vocabulary, {target.vocab}; they share one head")
    for key, size in (("target_hidden_size", target.hidden), ("target_vocab_size", target.vocab)):
        fields.only(key, (size,), "it must be the target's")
    for key in ("num_target_layers", "target_num_hidden_layers"):
        if fields.raw(key, target.layers) != target.layers:
            raise fields.fail(key, f"differs from the target's layers, {target.layers}; is this drafter for another?")


def _either(fields: Fields, nested: Fields, key: str) -> Fields:
    """The table that holds `key`: `dflash_config` or the top level; both must agree when both do."""
    fields.seen.add(key)
    if nested.has(key) and fields.has(key) and nested.values[key] != fields.values[key]:
        raise nested.fail(key, f"contradicts the top level's {fields.values[key]!r}")
    return fields if fields.has(key) and not nested.has(key) else nested


def _attention(
    fields: Fields, nested: Fields, layers: int, window: int | None
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Kind and window of each layer. The window is the narrowest of the config's (sliding layers) and the caller's."""
    if window is not None and window < 1:
        raise SpecError(f"{fields.where}: a draft window of {window} tokens is out of range (from 1)")
    kinds = layer_kinds(fields, layers)
    if nested.boolean("use_swa", False) and SLIDING not in kinds:
        if fields.has("layer_types"):
            raise nested.fail("use_swa", "contradicts layer_types, which has no sliding_attention")
        kinds = (SLIDING,) * layers
    holder, key = (nested, "swa_window_size") if nested.has("swa_window_size") else (fields, "sliding_window")
    nested.seen.add("swa_window_size")
    own = holder.integer(key) if SLIDING in kinds else 0
    limits = ([w for w in (own if kind == SLIDING else 0, window or 0) if w] for kind in kinds)
    windows = tuple(min(limit, default=0) for limit in limits)
    return kinds, windows


def _causal(fields: Fields, nested: Fields, kinds: tuple[str, ...]) -> tuple[bool, ...]:
    said = {table.boolean(key) for table, key in ((fields, "is_causal"), (nested, "causal")) if table.has(key)}
    fields.seen.add("is_causal")
    nested.seen.add("causal")
    if len(said) > 1:
        raise nested.fail("causal", f"contradicts is_causal = {fields.values['is_causal']!r}")
    return tuple(next(iter(said)) if said else kind != FULL for kind in kinds)


def _taps(table: Fields, target: TargetConfig) -> tuple[int, ...]:
    taps = table.listed("target_layer_ids", int)
    if not taps:
        raise table.fail("target_layer_ids", "is empty; a drafter reads at least one target layer")
    if len(set(taps)) < len(taps):
        raise table.fail("target_layer_ids", "names a layer twice")
    if any(not 0 <= tap < target.layers for tap in taps):
        raise table.fail("target_layer_ids", f"is out of range (target layers 0 to {target.layers - 1})")
    return taps
