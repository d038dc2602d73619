"""Qwen3 dense targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ddtree_compile.models.config_fields import Fields, check_architecture, read_dtype, read_layers
from ddtree_compile.models.config_quant import read_quantisation
from ddtree_compile.models.config_rope import read_rope
from ddtree_compile.models.config_types import Qwen3Config

FULL, SLIDING = "full_attention", "sliding_attention"

_HEAD: Final = "lm_head.weight"


def qwen3_from(config: Mapping[str, Any], where: str) -> Qwen3Config:
    """The target record of a `qwen3` config. SpecError names what we lack."""
    fields = Fields(config, where)
    check_architecture(fields, ("Qwen3ForCausalLM", "Qwen3Model"))
    fields.raw("model_type")
    for key in ("attention_bias", "mlp_bias"):
        fields.only(key, (False,))
    fields.only("hidden_act", ("silu",))
    layers = read_layers(fields)
    kinds = layer_kinds(fields, layers)
    if SLIDING in kinds:
        key = "layer_types" if fields.has("layer_types") else "use_sliding_window"
        raise fields.fail(key, "is not supported in a target (supported: full attention in every layer)")
    hidden, heads, kv_heads, head_dim = read_heads(fields)
    max_positions = fields.integer("max_position_embeddings")
    rope, _ = read_rope(fields, head_dim, max_positions, interleaved=False)
    tied = fields.boolean("tie_word_embeddings", False)
    quantisation, fp8 = read_quantisation(fields)
    record = Qwen3Config(
        prefix="model.",
        head=_HEAD,
        vocab=fields.integer("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        intermediate=fields.integer("intermediate_size"),
        eps=fields.number("rms_norm_eps"),
        max_positions=max_positions,
        tied=tied,
        dtype=read_dtype(fields),
        quantisation=quantisation,
        fp8=fp8,
        skip=(_HEAD,) if tied else (),
    )
    fields.done()
    return record


def read_heads(fields: Fields) -> tuple[int, int, int, int]:
    """(hidden, heads, kv_heads, head_dim); without `head_dim` it is hidden / heads."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.fail("num_attention_heads", f"is not a multiple of num_key_value_heads = {kv_heads}")
    if not fields.has("head_dim") and hidden % heads:
        raise fields.fail("hidden_size", f"is not a multiple of num_attention_heads = {heads}, and head_dim is absent")
    return hidden, heads, kv_heads, fields.integer("head_dim", hidden // heads)


def layer_kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    """The kind of each layer's attention: `layer_types`, or what transformers derives from `use_sliding_window`."""
    use, window = fields.boolean("use_sliding_window", False), fields.raw("sliding_window", None)
    first_sliding = fields.integer("max_window_layers", layers, low=0)
    if not fields.has("layer_types"):
        fields.seen.add("layer_types")
        slides = use and window is not None
        return tuple(SLIDING if slides and layer >= first_sliding else FULL for layer in range(layers))
    kinds = fields.listed("layer_types", str)
    if len(kinds) != layers:
        raise fields.fail("layer_types", f"has {len(kinds)} entries for num_hidden_layers = {layers}")
    if set(kinds) - {FULL, SLIDING}:
        raise fields.fail("layer_types", f"is not supported (supported: {FULL}, {SLIDING})")
    return kinds
