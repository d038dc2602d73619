"""Small random checkpoints in Hugging Face layout, targets made by transformers itself.

A target's weights are spread wide enough that its greedy text is not one repeated token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

KIMI: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 8,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "qk_nope_head_dim": 16, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "attention_bias": False, "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
}  # fmt: skip

QWEN3: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip


def make_kimi(directory: Path, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A DeepseekV3ForCausalLM saved as fp32, and itself. Its router bias is random too."""
    model = _make(DeepseekV3ForCausalLM, DeepseekV3Config(**{**KIMI, **changes}), directory, seed)
    return model


def make_qwen3(directory: Path, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A Qwen3ForCausalLM saved as fp32, and itself."""
    return _make(Qwen3ForCausalLM, Qwen3Config(**{**QWEN3, **changes}), directory, seed)


def _make(kind: type, config: Any, directory: Path, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = kind(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("norm.weight"):
                tensor.copy_(1 + 0.1 * torch.randn(tensor.shape, generator=generator))
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
            elif tensor.dim() > 1:
                gain = 1.0 if "embed" in name else 1.5 * tensor.shape[-1] ** -0.5
                tensor.copy_(gain * torch.randn(tensor.shape, generator=generator))
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    return model


def make_drafter(directory: Path, target: Mapping[str, Any], seed: int = 1, **changes: Any) -> dict[str, Any]:
    """A random DFlash drafter for a target's config; its config. `changes` go into the config as they are."""
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": target["hidden_size"],
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": target["vocab_size"], "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 512, "block_size": 8, "num_target_layers": target["num_hidden_layers"],
        "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu", "dtype": "float32",
        "dflash_config": {
            "mask_token_id": target["vocab_size"] - 1, "target_layer_ids": [0, target["num_hidden_layers"] - 1],
        },
        **changes,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    def gain(width: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(width, generator=generator)

    hidden, inner, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    taps = len(config["dflash_config"]["target_layer_ids"])
    tensors = {"fc.weight": weight(hidden, taps * hidden), "hidden_norm.weight": gain(hidden), "norm.weight": gain(hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}."
        tensors |= {
            f"{at}input_layernorm.weight": gain(hidden),
            f"{at}post_attention_layernorm.weight": gain(hidden),
            f"{at}self_attn.q_proj.weight": weight(config["num_attention_heads"] * d, hidden),
            f"{at}self_attn.k_proj.weight": weight(config["num_key_value_heads"] * d, hidden),
            f"{at}self_attn.v_proj.weight": weight(config["num_key_value_heads"] * d, hidden),
            f"{at}self_attn.o_proj.weight": weight(hidden, config["num_attention_heads"] * d),
            f"{at}self_attn.q_norm.weight": gain(d),
            f"{at}self_attn.k_norm.weight": gain(d),
            f"{at}mlp.gate_proj.weight": weight(inner, hidden),
            f"{at}mlp.up_proj.weight": weight(inner, hidden),
            f"{at}mlp.down_proj.weight": weight(hidden, inner),
        }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return config


def make_spec(root: Path, buckets: list[int], **tables: dict[str, Any]) -> dict[str, Any]:
    """Spec tables for `root/target` and `root/drafter`; `tables` are merged in (cache=..., prefill=..., tree=...)."""
    spec: dict[str, Any] = {
        "model": {"target": str(root / "target"), "drafter": str(root / "drafter")},
        "tree": {"buckets": buckets},
        "cache": {"max_seq_len": 256},
        "prefill": {"chunks": [8, 32]},
    }
    for name, table in tables.items():
        spec[name] = {**spec.get(name, {}), **table}
    return spec
