"""What a config may ask for and we lack: each refused in one line that names file, key, value and what is supported."""

import copy
import json
from pathlib import Path

import pytest

from ddtree_compile.errors import SpecError
from ddtree_compile.models.config import drafter_from, load_config, read_drafter, read_target, target_from

CONFIGS = Path(__file__).parents[2] / "plans" / "configs"
DROP = object()  # as a new value: take the key out


def _config(name):
    return json.loads((CONFIGS / name / "config.json").read_text())


def _changed(config, path, value):
    """`config` with the value at a dotted path replaced (or dropped)."""
    config = copy.deepcopy(config)
    *parents, last = path.split(".")
    inner = config
    for key in parents:
        inner = inner[key]
    if value is DROP:
        inner.pop(last)
    else:
        inner[last] = value
    return config


def _refusal(call):
    with pytest.raises(SpecError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


KIMI = [
    (
        "model_type",
        "kimi_k3",
        "model_type = 'kimi_k3' is not supported (supported: deepseek_v3, kimi_k2, kimi_k25, qwen3)",
    ),
    ("text_config", DROP, "text_config is missing"),
    ("text_config.model_type", "kimi_linear", "text_config: model_type = 'kimi_linear' is not supported"),
    (
        "text_config.scoring_func",
        "softmax",
        "text_config: scoring_func = 'softmax' is not supported (supported: 'sigmoid')",
    ),
    ("text_config.topk_method", "greedy", "topk_method = 'greedy' is not supported (supported: 'noaux_tc')"),
    ("text_config.n_group", 8, "n_group = 8 is not supported (supported: 1)"),
    ("text_config.n_group", DROP, "n_group is missing"),
    ("text_config.topk_group", 4, "topk_group = 4 is not supported (supported: 1)"),
    ("text_config.moe_layer_freq", 2, "moe_layer_freq = 2 is not supported (supported: 1)"),
    ("text_config.attention_bias", True, "attention_bias = True is not supported (supported: False)"),
    ("text_config.hidden_act", "gelu", "hidden_act = 'gelu' is not supported (supported: 'silu')"),
    (
        "text_config.num_nextn_predict_layers",
        1,
        "num_nextn_predict_layers = 1 is not supported (supported: 0); multi-token",
    ),
    ("text_config.hidden_size", DROP, "text_config: hidden_size is missing; it is required"),
    ("text_config.hidden_size", "7168", "hidden_size = '7168' is not a whole number"),
    ("text_config.num_hidden_layers", 0, "num_hidden_layers = 0 is out of range (from 1)"),
    ("text_config.vocab_size", True, "vocab_size = True is not a whole number"),
    ("text_config.num_experts_per_tok", 385, "num_experts_per_tok = 385 is out of range (from 1 to 384)"),
    ("text_config.first_k_dense_replace", 62, "first_k_dense_replace = 62 is out of range (from 0 to 61)"),
    ("text_config.rms_norm_eps", -1.0, "rms_norm_eps = -1.0 is out of range (above 0)"),
    ("text_config.qk_rope_head_dim", 63, "the rotary dimension 63 is odd"),
    (
        "text_config.rope_scaling.type",
        "longrope",
        "rope_scaling: type = 'longrope' is not supported (supported: default, yarn)",
    ),
    ("text_config.rope_scaling.factor", DROP, "rope_scaling: factor is missing"),
    ("text_config.rope_scaling.truncate", False, "truncate = False is not supported (supported: True)"),
    ("text_config.rope_scaling.attn_factor", 0.9, "attn_factor = 0.9 is a key this version does not know"),
    ("text_config.rope_parameters", {"rope_type": "default"}, "contradicts rope_parameters"),
    ("text_config.rope_theta", DROP, "rope_theta is missing"),
    ("text_config.tie_word_embeddings", True, "tie_word_embeddings = False contradicts the one in text_config"),
    ("text_config.dtype", "float16", "dtype = 'float16' is not supported (supported: bfloat16, float32)"),
    ("text_config.mla_use_output_gate", True, "mla_use_output_gate = True is a key this version does not know"),
    ("text_config.index_topk", 2048, "index_topk = 2048 is a key this version does not know"),
    ("text_config.quantization_config.format", "marlin", "text_config: quantization_config = "),
    ("architectures", ["KimiK3ForCausalLM"], "architectures = ['KimiK3ForCausalLM'] is not supported"),
]


@pytest.mark.parametrize(("path", "value", "message"), KIMI)
def test_kimi(path, value, message):
    config = _changed(_config("kimi-k2.6"), path, value)
    found = _refusal(lambda: target_from(config, "k/config.json"))
    assert found.startswith("k/config.json: ")
    assert message in found


QUANT = "config_groups.group_0.weights"
QUANTISATION = [
    ("quant_method", "gptq", "quant_method = 'gptq' is not supported (supported: compressed-tensors pack-quantized"),
    ("quant_method", "modelopt", "quant_method = 'modelopt' is not supported"),
    ("quant_method", DROP, "quant_method is missing"),
    (
        "format",
        "nvfp4-pack-quantized",
        "format = 'nvfp4-pack-quantized' is not supported (supported: 'pack-quantized')",
    ),
    ("config_groups", {}, "config_groups = {} is not supported (supported: one group)"),
    (f"{QUANT}.num_bits", 8, "num_bits = 8 is not supported"),
    (f"{QUANT}.strategy", "channel", "strategy = 'channel' is not supported"),
    (f"{QUANT}.symmetric", False, "symmetric = False is not supported"),
    (f"{QUANT}.group_size", 20, "group_size = 20 is not a multiple of 8"),
    (f"{QUANT}.actorder", "group", "actorder = 'group' is not supported (supported: absent)"),
    ("config_groups.group_0.targets", ["Conv"], "targets = ['Conv'] is not supported (supported: ['Linear'])"),
    (
        "config_groups.group_0.input_activations",
        {"num_bits": 8},
        "input_activations = {'num_bits': 8} is not supported",
    ),
    ("ignore", ["re:("], "holds a pattern that is none: 're:('"),
    ("kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme = {'num_bits': 8} is not supported"),
    ("sparsity_config", {"format": "dense"}, "sparsity_config = {'format': 'dense'} is not supported"),
]


@pytest.mark.parametrize(("path", "value", "message"), QUANTISATION)
def test_quantisation(path, value, message):
    config = _config("kimi-k2.6")
    config.pop("quantization_config")
    changed = _changed(config, f"text_config.quantization_config.{path}", value)
    found = _refusal(lambda: target_from(changed, "k/config.json"))
    assert found.startswith("k/config.json: text_config: quantization_config: ")
    assert message in found


QWEN3 = [
    ("use_sliding_window", True, None),  # without a window it is not in effect
    ("mlp_bias", True, "mlp_bias = True is not supported"),
    ("num_key_value_heads", 5, "num_attention_heads = 32 is not a multiple of num_key_value_heads = 5"),
    (
        "layer_types",
        ["sliding_attention"] * 36,
        "is not supported in a target (supported: full attention in every layer)",
    ),
    ("layer_types", ["full_attention"] * 35, "has 35 entries for num_hidden_layers = 36"),
    ("layer_types", ["linear_attention"] * 36, "is not supported (supported: full_attention, sliding_attention)"),
    ("partial_rotary_factor", 0.5, "partial_rotary_factor = 0.5 is not supported (supported: 1.0)"),
    ("rope_scaling", {"rope_type": "linear", "factor": 2.0}, "rope_type = 'linear' is not supported"),
    ("rope_scaling", [1], "rope_scaling = [1] is not an object"),
    ("torch_dtype", DROP, "dtype is missing"),
    ("architectures", ["Qwen3ForSequenceClassification"], "is not supported (supported: Qwen3ForCausalLM"),
    ("num_experts", 128, "num_experts = 128 is a key this version does not know"),
    ("model_type", "qwen3_moe", "model_type = 'qwen3_moe' is not supported"),
]


@pytest.mark.parametrize(("path", "value", "message"), QWEN3)
def test_qwen3(path, value, message):
    config = _changed(_config("qwen3-8b"), path, value)
    if message is None:
        target_from(config, "q/config.json")
    else:
        assert message in _refusal(lambda: target_from(config, "q/config.json"))


def test_qwen3_sliding_window_in_effect():
    config = _config("qwen3-8b") | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}
    assert "use_sliding_window = True is not supported in a target" in _refusal(lambda: target_from(config, "q"))


DRAFT = "dflash_config"
DRAFTER = [
    ("architectures", ["DFlash2DraftModel"], "is not supported (supported: DFlashDraftModel)"),
    ("architectures", ["Qwen3DSparkModel"], "is not supported (supported: DFlashDraftModel)"),
    ("model_type", "llama", "model_type = 'llama' is not supported (supported: 'qwen3')"),
    ("dflash_config", DROP, "block_size"),
    (f"{DRAFT}.mask_token_id", DROP, "dflash_config: mask_token_id is missing"),
    (f"{DRAFT}.target_layer_ids", DROP, "dflash_config: target_layer_ids is missing"),
    (f"{DRAFT}.target_layer_ids", [1, 9, 36], "is out of range (target layers 0 to 35)"),
    (f"{DRAFT}.target_layer_ids", [1, 9, 9], "names a layer twice"),
    (f"{DRAFT}.target_layer_ids", [], "is empty"),
    (f"{DRAFT}.target_layer_ids", ["1"], "holds something that is not a int"),
    (f"{DRAFT}.mask_token_id", 151936, "mask_token_id = 151936 is out of range (from 0 to 151935)"),
    (f"{DRAFT}.block_size", 8, "block_size = 8 contradicts the top level's 16"),
    ("block_size", 1, "block_size = 1 is out of range (from 2)"),
    ("block_size", DROP, "block_size is missing"),
    (f"{DRAFT}.conv_kernel_size", 2, "conv_kernel_size = 2 is not supported (supported: 0); a DFlash2 drafter"),
    (f"{DRAFT}.selector_rank", 256, "selector_rank = 256 is not supported"),
    (f"{DRAFT}.markov_rank", 256, "markov_rank = 256 is not supported (supported: 0); a DSpark drafter"),
    (f"{DRAFT}.projector_type", "domino", "projector_type = 'domino' is not supported (supported: absent)"),
    (f"{DRAFT}.sample_from_anchor", True, "sample_from_anchor = True is not supported"),
    (f"{DRAFT}.attention_sink_bias", True, "attention_sink_bias = True is not supported"),
    (f"{DRAFT}.output_multiplier", 0.196, "output_multiplier = 0.196 is not supported (supported: 1.0)"),
    (f"{DRAFT}.final_logit_softcapping", 20.0, "final_logit_softcapping = 20.0 is not supported"),
    (f"{DRAFT}.input_embedding_scale", 2.0, "input_embedding_scale = 2.0 is not supported (supported: 1.0)"),
    (f"{DRAFT}.shift_label", True, "shift_label = True is not supported"),
    (f"{DRAFT}.use_swa", True, "use_swa = True contradicts layer_types"),
    (f"{DRAFT}.something_new", 3, "dflash_config: something_new = 3 is a key this version does not know"),
    ("causal_head", True, "causal_head = True is not supported"),
    ("mask_embedding", True, "a mask embedding of its own"),
    ("speculators_model_type", "dflash", "the speculators format"),
    ("draft_vocab_size", 32000, "draft_vocab_size = 32000 differs from the target's vocabulary, 151936"),
    ("vocab_size", 248320, "vocab_size = 248320 differs from the target's vocabulary, 151936"),
    ("hidden_size", 2560, "hidden_size = 2560 differs from the target's, 4096"),
    ("num_target_layers", 64, "num_target_layers = 64 differs from the target's layers, 36"),
    ("attention_bias", True, "attention_bias = True is not supported"),
    ("quantization_config", {"quant_method": "fp8"}, "a quantised drafter"),
    ("layer_types", ["sliding_attention"] * 5, "sliding_window is missing"),
]


@pytest.mark.parametrize(("path", "value", "message"), DRAFTER)
def test_drafter(path, value, message):
    config = _config("qwen3-8b-dflash-b16")
    if path == "dflash_config":
        config.pop("block_size")
    changed = _changed(config, path, value)
    target = read_target(CONFIGS / "qwen3-8b")
    found = _refusal(lambda: drafter_from(changed, target, "d/config.json"))
    assert found.startswith("d/config.json: ")
    assert message in found


def test_contradictions_about_causality_and_windows():
    target, config = read_target(CONFIGS / "qwen3-8b"), _config("qwen3-8b-dflash-b16")
    both = _changed(config, "dflash_config.causal", True) | {"is_causal": False}
    assert "causal = True contradicts is_causal = False" in _refusal(lambda: drafter_from(both, target, "d"))
    assert "window of 0 tokens" in _refusal(lambda: drafter_from(config, target, "d", window=0))


def test_a_drafter_of_another_target():
    kimi = read_target(CONFIGS / "kimi-k2.6")
    assert "differs from the target's" in _refusal(lambda: read_drafter(CONFIGS / "qwen3-8b-dflash-b16", kimi))


def test_files(tmp_path):
    path = tmp_path / "config.json"
    assert f"{path}: no such file" in _refusal(lambda: load_config(path))
    path.write_text("{")
    assert f"{path}: is not JSON" in _refusal(lambda: load_config(path))
    path.write_text("[1]")
    assert "holds a list, not a JSON object" in _refusal(lambda: load_config(path))
    path.write_text((CONFIGS / "qwen3-8b-dflash-b16" / "config.json").read_text())
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    target = read_target(CONFIGS / "qwen3-8b")
    assert "own mask embedding is not supported" in _refusal(lambda: read_drafter(tmp_path, target))


@pytest.mark.parametrize("name", ["cross_attention_hidden_size", "some_new_switch", "another"])
@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_unknown_keys_that_are_off_pass(name, value):
    config = _config("qwen3-8b")
    assert target_from(config | {name: value}, "q") == target_from(config, "q")
