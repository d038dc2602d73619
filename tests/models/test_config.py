"""Published configs, read; the numbers against transformers' own."""

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from ddtree_compile.models.config import (
    DFlashConfig,
    KimiConfig,
    Quantisation,
    Rope,
    drafter_from,
    read_drafter,
    read_target,
    target_from,
)
from ddtree_compile.models.config_quant import covers

CONFIGS = Path(__file__).parents[2] / "plans" / "configs"

# moonshotai/Kimi-K2-Thinking, without bookkeeping keys.
K2_THINKING = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "dtype": "bfloat16",
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 262144,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": json.loads((CONFIGS / "kimi-k2.6" / "config.json").read_text())["quantization_config"],
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 64.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 163840,
}

# moonshotai/Kimi-K2-Instruct: fp8 blocks, factor 32.
K2_INSTRUCT = K2_THINKING | {
    "max_position_embeddings": 131072,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": K2_THINKING["rope_scaling"] | {"factor": 32.0},
    "torch_dtype": "bfloat16",
}

# z-lab/Qwen3.6-27B-DFlash's attention (four sliding layers and a full one), put on Qwen3-8B's sizes.
SLIDING_DRAFT = {
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048,
    "use_sliding_window": True,
}


@pytest.fixture(scope="module")
def kimi():
    return read_target(CONFIGS / "kimi-k2.6")


@pytest.fixture(scope="module")
def qwen():
    return read_target(CONFIGS / "qwen3-8b")


@pytest.fixture
def qwen_draft():
    return json.loads((CONFIGS / "qwen3-8b-dflash-b16" / "config.json").read_text())


def _hf_deepseek(config):
    small = {key: config[key] for key in ("rope_theta", "max_position_embeddings")}
    rope = copy.deepcopy(config["rope_scaling"])
    return DeepseekV3Config(
        **small, rope_scaling=rope, qk_nope_head_dim=128, qk_rope_head_dim=64, num_hidden_layers=1, hidden_size=64
    )


@pytest.mark.parametrize(("config", "expected"), [(K2_THINKING, 0.144679626), (K2_INSTRUCT, 0.130860800)])
def test_softmax_scale_is_what_transformers_computes(config, expected):
    ours = target_from(config, "config.json")
    assert isinstance(ours, KimiConfig)
    with torch.device("meta"):
        theirs = DeepseekV3Attention(_hf_deepseek(config), 0).scaling
    assert ours.softmax_scale == theirs
    assert ours.softmax_scale == pytest.approx(expected, abs=5e-10)
    assert ours.rope.amplitude == 1.0


def _yarn_inv_freq(rope: Rope) -> torch.Tensor:
    """The record's meaning, from the paper: interpolate slow pairs, keep fast ones, a ramp between."""
    import math

    pairs = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)

    def place(rotations):
        return rope.dim * math.log(rope.original_max / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = max(math.floor(place(rope.beta_fast)), 0), min(math.ceil(place(rope.beta_slow)), rope.dim - 1)
    ramp = ((torch.arange(rope.dim // 2) - low) / (high - low if high > low else 0.001)).clamp(0, 1)
    return ramp / (rope.factor * pairs) + (1 - ramp) / pairs


@pytest.mark.parametrize("config", [K2_THINKING, K2_INSTRUCT])
def test_rope_record_gives_transformers_frequencies(config):
    rope = target_from(config, "config.json").rope
    theirs, amplitude = ROPE_INIT_FUNCTIONS["yarn"](_hf_deepseek(config))
    torch.testing.assert_close(_yarn_inv_freq(rope), theirs, rtol=1e-6, atol=0)
    assert rope.amplitude == amplitude
    assert rope.interleaved


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"attention_factor": 1.25},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
        {"mscale": 1.0},
        {"mscale": 0.707, "mscale_all_dim": 0.707},
        {"beta_fast": 16, "beta_slow": 2},
    ],
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_qwen3_yarn_is_what_transformers_computes(extra, spelling):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768} | extra
    config = json.loads((CONFIGS / "qwen3-8b" / "config.json").read_text())
    del config["rope_scaling"]
    if spelling == "rope_parameters":
        yarn["rope_theta"] = config.pop("rope_theta")
    config[spelling] = yarn
    config["max_position_embeddings"] = 131072
    rope = target_from(config, "config.json").rope
    theirs, amplitude = ROPE_INIT_FUNCTIONS["yarn"](Qwen3Config(**copy.deepcopy(config)))
    torch.testing.assert_close(_yarn_inv_freq(rope), theirs, rtol=1e-6, atol=0)
    assert rope.amplitude == amplitude
    assert not rope.interleaved


def test_kimi_k26_wrapper(kimi):
    assert (kimi.prefix, kimi.head) == ("language_model.model.", "language_model.lm_head.weight")
    assert kimi.skip == ("vision_tower.", "mm_projector.")
    assert (kimi.layers, kimi.dense_layers, kimi.experts, kimi.top_k) == (61, 1, 384, 8)
    assert (kimi.eps, kimi.inner_eps) == (1e-5, 1e-6)
    assert kimi.softmax_scale == pytest.approx(0.144679626, abs=5e-10)
    assert isinstance(kimi.quantisation, Quantisation)
    assert kimi.quantisation.group == 32
    assert "re:.*self_attn.*" in kimi.quantisation.ignore
    assert kimi.dtype == "bf16"


def test_which_modules_are_int4(kimi):
    layer = "language_model.model.layers.3."
    assert covers(kimi.quantisation, layer + "mlp.experts.17.down_proj")
    for module in ("self_attn.o_proj", "mlp.shared_experts.up_proj", "mlp.gate_proj"):
        assert not covers(kimi.quantisation, layer + module)
    assert not covers(kimi.quantisation, kimi.head.removesuffix(".weight"))
    assert not covers(None, "model.layers.0.mlp.up_proj")


def test_the_dump_of_the_wrapper_by_transformers_reads_the_same(kimi):
    """transformers 5 writes rope_parameters, dtype at both levels, and deepseek_v3 for kimi_k2."""
    config = json.loads((CONFIGS / "kimi-k2.6" / "config.json").read_text())
    text = config["text_config"]
    text["rope_parameters"] = text.pop("rope_scaling") | {"rope_type": "yarn", "rope_theta": text["rope_theta"]}
    text |= {"model_type": "deepseek_v3", "_name_or_path": "", "top_k": 50, "id2label": {"0": "LABEL_0"}}
    assert target_from(config, "config.json") == kimi
    config["torch_dtype"] = config.pop("dtype")
    del text["dtype"], text["quantization_config"], text["tie_word_embeddings"]
    assert target_from(config, "config.json") == kimi


def test_text_only_checkpoints_have_no_prefix():
    thinking = target_from(K2_THINKING, "config.json")
    assert (thinking.prefix, thinking.head, thinking.skip) == ("model.", "lm_head.weight", ())
    instruct = target_from(K2_INSTRUCT, "config.json")
    assert instruct.fp8
    assert instruct.quantisation is None


def test_transformers_own_dictionaries_are_read():
    """What `save_pretrained` writes holds derived and default keys; all must be known."""
    deepseek = DeepseekV3Config(n_group=1, topk_group=1, num_nextn_predict_layers=0, dtype="float32").to_dict()
    target = target_from(deepseek, "config.json")
    assert (target.dtype, target.rope.factor, target.rope.interleaved) == ("f32", 1.0, True)
    assert target.softmax_scale == 192**-0.5
    assert not target_from(deepseek | {"rope_interleave": False}, "config.json").rope.interleaved
    assert target_from(deepseek | {"q_lora_rank": None}, "config.json").q_lora is None
    qwen3 = target_from(Qwen3Config(dtype="bfloat16").to_dict(), "config.json")
    assert qwen3.rope == Rope(dim=128, theta=10000.0)


def test_tied_head_is_skipped():
    config = json.loads((CONFIGS / "qwen3-8b" / "config.json").read_text()) | {"tie_word_embeddings": True}
    target = target_from(config, "config.json")
    assert target.tied
    assert target.skip == ("lm_head.weight",)


def test_qwen3_8b(qwen):
    assert (qwen.hidden, qwen.layers, qwen.heads, qwen.kv_heads, qwen.head_dim) == (4096, 36, 32, 8, 128)
    assert qwen.rope == Rope(dim=128, theta=1000000.0)
    assert qwen.dtype == "bf16"


def test_qwen3_drafter(qwen):
    drafter = read_drafter(CONFIGS / "qwen3-8b-dflash-b16", qwen)
    assert (drafter.block, drafter.horizon, drafter.mask_token) == (16, 15, 151669)
    assert drafter.taps == (1, 9, 17, 25, 33)
    assert drafter.causal == (False,) * 5
    assert drafter.window == (0,) * 5


def test_kimi_drafter_and_its_rope_amplitude(kimi):
    drafter = read_drafter(CONFIGS / "kimi-k2.6-dflash", kimi)
    assert (drafter.block, drafter.taps) == (8, (1, 12, 24, 35, 47, 58))
    assert drafter.rope.amplitude == 1.0
    old = read_drafter(CONFIGS / "kimi-k2.6-dflash", kimi, rope_amplitude=1.4158883, window=4096)
    assert old.rope.amplitude == 1.4158883
    assert old.window == (4096,) * 6
    assert old.causal == drafter.causal


def _draft(config, target, **options) -> DFlashConfig:
    return drafter_from(config, target, "drafter/config.json", **options)


def test_sliding_layers_are_causal_and_keep_the_narrower_window(qwen, qwen_draft):
    config = qwen_draft | SLIDING_DRAFT
    plain = _draft(config, qwen)
    assert plain.causal == (True, True, True, True, False)
    assert plain.window == (2048, 2048, 2048, 2048, 0)
    assert _draft(config, qwen, window=4096).window == (2048, 2048, 2048, 2048, 4096)
    assert _draft(config, qwen, window=512).window == (512,) * 5
    assert _draft(config | {"is_causal": False}, qwen).causal == (False,) * 5
    nested = config | {"dflash_config": config["dflash_config"] | {"causal": True}}
    assert _draft(nested, qwen).causal == (True,) * 5


def test_every_published_spelling_of_the_block(qwen, qwen_draft):
    expected = _draft(qwen_draft, qwen)
    nested = {key: value for key, value in qwen_draft.items() if key not in ("block_size", "layer_types", "dtype")}
    nested["dflash_config"] = nested["dflash_config"] | {"block_size": 16, "mask_token": "<|MASK|>", "use_swa": False}
    assert _draft(nested, qwen) == expected
    flat = qwen_draft | qwen_draft["dflash_config"]
    del flat["dflash_config"]
    assert _draft(flat, qwen) == expected
    parameters = qwen_draft | {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}
    del parameters["rope_theta"], parameters["rope_scaling"]
    assert _draft(parameters, qwen) == expected


def test_use_swa_makes_every_layer_slide(qwen, qwen_draft):
    config = {key: value for key, value in qwen_draft.items() if key != "layer_types"}
    config["dflash_config"] = config["dflash_config"] | {"use_swa": True, "swa_window_size": 1024}
    drafter = _draft(config, qwen)
    assert drafter.window == (1024,) * 5
    assert drafter.causal == (True,) * 5
