"""Small random checkpoints in Hugging Face layout, targets made by transformers itself.

A target's weights are spread wide enough that its greedy text is not one repeated token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Kimi_K25ForConditionalGeneration,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

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


def make_kimi(directory: Path, seed: int = 0, shard_size: str = "50GB", **changes: Any) -> PreTrainedModel:
    """A DeepseekV3ForCausalLM saved as fp32, and itself. Its router bias is random too.

    A config without shared experts is saved without their tensors (transformers keeps them with no rows).
    """
    model = _make(DeepseekV3ForCausalLM, DeepseekV3Config(**{**KIMI, **changes}), directory, seed, shard_size)
    if not model.config.n_shared_experts:
        rewrite(directory, lambda tensors: {name: t for name, t in tensors.items() if "shared_experts" not in name})
    return model


def make_qwen3(directory: Path, seed: int = 0, shard_size: str = "50GB", **changes: Any) -> PreTrainedModel:
    """A Qwen3ForCausalLM saved as fp32, and itself."""
    return _make(Qwen3ForCausalLM, Qwen3Config(**{**QWEN3, **changes}), directory, seed, shard_size)


def make_kimi_k25(directory: Path, seed: int = 0, shard_size: str = "50GB", **changes: Any) -> PreTrainedModel:
    """The multimodal wrapper as K2.5 and K2.6 are published, read back by transformers' own class.

    Written by hand: transformers' own `save_pretrained` renames the text model's layers to "blocks".
    """
    make_kimi(directory, seed, shard_size, **changes)
    text = json.loads((directory / "config.json").read_text())
    vision, drawn = _vision(text["hidden_size"], seed)
    rewrite(directory, lambda tensors: {f"language_model.{name}": tensor for name, tensor in tensors.items()})
    as_kimi_k2(directory)
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "tie_word_embeddings": False,
        "text_config": json.loads((directory / "config.json").read_text()), "vision_config": vision,
        "projection_hidden_size": vision["hidden_size"], "dtype": "float32", "ignore_index": -100,
        "media_placeholder_token_id": text["vocab_size"] - 1,
    }  # fmt: skip
    rewrite(directory, lambda tensors: tensors | drawn)
    (directory / "config.json").write_text(json.dumps(config))
    model = Kimi_K25ForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    model.generation_config.eos_token_id = None
    return model


def as_kimi_k2(directory: Path) -> None:
    """Respell a saved deepseek_v3 config as K2-Thinking's: its model_type, and the older names of rope and dtype."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    scaling = None if kind == "default" else {"type": kind, **rope}
    config |= {
        "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "rope_theta": theta,
        "rope_scaling": scaling, "torch_dtype": config.pop("dtype"), "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "moe_layer_freq": 1, "seq_aux": True, "ep_size": 1, "aux_loss_alpha": 0.001,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    }  # fmt: skip
    path.write_text(json.dumps(config))


Tensors = dict[str, torch.Tensor]


def rewrite(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Save a checkpoint's tensors anew after `change`, in as many shards, with an index."""
    files = sorted(directory.glob("*.safetensors"))
    tensors: Tensors = {}
    for file in files:
        tensors |= load_file(file)
        file.unlink()
    tensors = change(tensors)
    index = directory / "model.safetensors.index.json"
    index.unlink(missing_ok=True)
    if len(files) == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    places = {name: names[i % len(files)] for i, name in enumerate(sorted(tensors))}
    for file in names:
        part = {name: tensor for name, tensor in tensors.items() if places[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    index.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": places}))


def _vision(text_hidden: int, seed: int) -> tuple[dict[str, Any], Tensors]:
    """A vision side's config and tensors, in the published spelling; text generation skips them."""
    width, inner, patch, merged = 16, 24, 4, 64
    config = {
        "hidden_size": width, "intermediate_size": inner, "num_attention_heads": 2, "num_hidden_layers": 1,
        "patch_size": patch, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2, "merge_kernel_size": [2, 2],
    }  # fmt: skip
    block = "vision_tower.encoder.blocks.0."
    shapes = {
        "vision_tower.patch_embed.proj.weight": (width, 3, patch, patch),
        "vision_tower.patch_embed.proj.bias": (width,),
        "vision_tower.patch_embed.pos_emb.weight": (4, 4, width),
        f"{block}norm0.weight": (width,), f"{block}norm0.bias": (width,),
        f"{block}norm1.weight": (width,), f"{block}norm1.bias": (width,),
        f"{block}wqkv.weight": (3 * width, width), f"{block}wqkv.bias": (3 * width,),
        f"{block}wo.weight": (width, width), f"{block}wo.bias": (width,),
        f"{block}mlp.fc0.weight": (inner, width), f"{block}mlp.fc0.bias": (inner,),
        f"{block}mlp.fc1.weight": (width, inner), f"{block}mlp.fc1.bias": (width,),
        "vision_tower.encoder.final_layernorm.weight": (width,), "vision_tower.encoder.final_layernorm.bias": (width,),
        "mm_projector.pre_norm.weight": (width,), "mm_projector.pre_norm.bias": (width,),
        "mm_projector.proj.0.weight": (merged, merged), "mm_projector.proj.0.bias": (merged,),
        "mm_projector.proj.2.weight": (text_hidden, merged), "mm_projector.proj.2.bias": (text_hidden,),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    return config, {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _make(kind: type, config: Any, directory: Path, seed: int, shard_size: str) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = kind(config).float().eval()
    model.set_experts_implementation("eager")  # the default, grouped_mm, refuses widths that are no multiple of 4
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("norm.weight"):
                tensor.copy_(1 + 0.1 * torch.randn(tensor.shape, generator=generator))
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
            elif tensor.dim() > 1:
                gain = 1.0 if "embed" in name else 1.5 * max(tensor.shape[-1], 1) ** -0.5
                tensor.copy_(gain * torch.randn(tensor.shape, generator=generator))
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory, max_shard_size=shard_size)
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
    tensors = {
        "fc.weight": weight(hidden, taps * hidden),
        "hidden_norm.weight": gain(hidden),
        "norm.weight": gain(hidden),
    }
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
