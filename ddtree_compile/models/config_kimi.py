"""Kimi K2 and its kin: `kimi_k2`, `deepseek_v3` without expert groups, and the multimodal wrapper `kimi_k25`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ddtree_compile.models.config_fields import Fields, check_architecture, read_dtype, read_layers
from ddtree_compile.models.config_quant import read_quantisation
from ddtree_compile.models.config_rope import read_rope
from ddtree_compile.models.config_types import KimiConfig

# q_a_layernorm and kv_a_layernorm: transformers (and DeepSeek's own remote code) build both with the norm class's
# default, whatever rms_norm_eps says. Engines differ; we follow the reference we are tested against.
INNER_EPS: Final = 1e-6

VISION_PREFIXES: Final = ("vision_tower.", "mm_projector.")

_ARCHITECTURES: Final = ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM", "DeepseekV3Model")
_WRAPPERS: Final = ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")

# Training losses and expert-parallel hints; sizes of the vision side, which text generation skips.
_HARMLESS: Final = frozenset({"aux_loss_alpha", "ep_size", "seq_aux", "router_aux_loss_coef", "num_key_value_heads"})
_WRAPPER_KEYS: Final = """
    ignore_index image_token_id media_placeholder_token_id projection_hidden_size projection_layer_norm_eps
    use_unified_vision_chunk video_placeholder video_token_id vision_config vision_end_token_id vision_start_token_id
    model_type
"""
_WRAPPER_HARMLESS: Final = frozenset(_WRAPPER_KEYS.split())


def kimi_from(config: Mapping[str, Any], where: str) -> KimiConfig:
    """A text-only config (`kimi_k2` or `deepseek_v3`). SpecError names what we lack."""
    fields = Fields(config, where)
    return _read(fields, (fields,), prefix="model.", head="lm_head.weight", skip=())


def kimi_k25_from(config: Mapping[str, Any], where: str) -> KimiConfig:
    """The multimodal wrapper: its `text_config` is read, the vision side is skipped."""
    outer = Fields(config, where)
    text = outer.table("text_config")
    check_architecture(outer, _WRAPPERS)
    if text.raw("model_type") not in ("kimi_k2", "deepseek_v3"):
        raise text.fail("model_type", "is not supported (supported: kimi_k2, deepseek_v3)")
    record = _read(
        text,
        (outer, text),
        prefix="language_model.model.",
        head="language_model.lm_head.weight",
        skip=VISION_PREFIXES,
    )
    outer.done(_WRAPPER_HARMLESS)
    return record


def _read(text: Fields, levels: tuple[Fields, ...], *, prefix: str, head: str, skip: tuple[str, ...]) -> KimiConfig:
    """`text` holds the model; `levels` are the objects that may hold dtype, tying and quantisation, outermost first.

    The softmax scale is (nope + rope)^-0.5, times YaRN's mscale(factor, mscale_all_dim)^2, as transformers has it.
    """
    check_architecture(text, _ARCHITECTURES)
    _refuse_what_we_lack(text)
    nope, rope_dim = text.integer("qk_nope_head_dim"), text.integer("qk_rope_head_dim")
    text.only("head_dim", (rope_dim,), "transformers sets it to qk_rope_head_dim")
    text.only("qk_head_dim", (nope + rope_dim,))
    max_positions = text.integer("max_position_embeddings")
    rope, scale = read_rope(text, rope_dim, max_positions, interleaved=text.boolean("rope_interleave", True))
    layers, experts = read_layers(text), text.integer("n_routed_experts")
    tied = _tied(levels)
    quantisation, fp8 = read_quantisation(*levels)
    record = KimiConfig(
        prefix=prefix,
        head=head,
        vocab=text.integer("vocab_size"),
        hidden=text.integer("hidden_size"),
        layers=layers,
        heads=text.integer("num_attention_heads"),
        q_lora=text.integer("q_lora_rank") if text.raw("q_lora_rank", None) is not None else None,
        kv_lora=text.integer("kv_lora_rank"),
        nope=nope,
        rope=rope,
        v_dim=text.integer("v_head_dim"),
        softmax_scale=(nope + rope_dim) ** -0.5 * scale,
        intermediate=text.integer("intermediate_size"),
        dense_layers=text.integer("first_k_dense_replace", low=0, high=layers),
        experts=experts,
        top_k=text.integer("num_experts_per_tok", high=experts),
        moe_intermediate=text.integer("moe_intermediate_size"),
        shared_experts=text.integer("n_shared_experts", low=0),
        norm_topk=text.boolean("norm_topk_prob", True),
        routed_scale=text.number("routed_scaling_factor"),
        eps=text.number("rms_norm_eps"),
        inner_eps=INNER_EPS,
        max_positions=max_positions,
        tied=tied,
        dtype=read_dtype(*levels[::-1]),
        quantisation=quantisation,
        fp8=fp8,
        skip=(*skip, head) if tied else skip,
    )
    text.done(_HARMLESS)
    return record


def _refuse_what_we_lack(text: Fields) -> None:
    text.raw("model_type")
    text.only("scoring_func", ("sigmoid",))
    text.only("topk_method", ("noaux_tc",))
    text.integer("n_group")
    text.only("n_group", (1,))
    text.only("topk_group", (1,))
    text.only("moe_layer_freq", (1,))
    text.only("attention_bias", (False,))
    text.only("mlp_bias", (False,))
    text.only("hidden_act", ("silu",))
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        text.only(key, (0,), "multi-token prediction layers are not built; DFlash drafts instead")


def _tied(levels: tuple[Fields, ...]) -> bool:
    values = [level.boolean("tie_word_embeddings") for level in levels if level.has("tie_word_embeddings")]
    for level in levels:
        level.seen.add("tie_word_embeddings")
    if len(set(values)) > 1:
        raise levels[0].fail("tie_word_embeddings", "contradicts the one in text_config")
    return values[0] if values else False
