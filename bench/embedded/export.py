"""Write and read the embedded model in Hugging Face layout.

The target's experts are compressed-tensors `pack-quantized` INT4: `weight_packed` int32 with eight offset-binary
nibbles a word, the lowest first, `weight_scale` bf16 and `weight_shape`. Everything else is bf16, the router's
selection bias fp32.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from model import GROUP, Drafter, DrafterConfig, MoE, Target, TargetConfig, quantise
from safetensors.torch import load_file, save_file
from tokenizer import BOS, EOS, IM_END, MASK, PAD
from torch import Tensor

IGNORED = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
QUANTIZATION = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": GROUP,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": IGNORED,
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def pack(codes: Tensor) -> Tensor:
    """Codes [out, in] in [-8, 7] -> int32 words [out, in / 8]."""
    nibbles = (codes.to(torch.int64) + 8).unflatten(-1, (-1, 8))
    words = (nibbles << (4 * torch.arange(8, device=codes.device))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(words: Tensor) -> Tensor:
    """Words [out, in / 8] -> codes [out, in]."""
    nibbles = (words.to(torch.int64).unsqueeze(-1) >> (4 * torch.arange(8))) & 15
    return (nibbles - 8).flatten(-2)


def target_config(c: TargetConfig) -> dict[str, object]:
    """config.json of the target, with the fields that Kimi K2's carries."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "ep_size": 1,
        "first_k_dense_replace": c.first_k_dense_replace,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": c.intermediate_size,
        "kv_lora_rank": c.kv_lora_rank,
        "max_position_embeddings": c.max_position_embeddings,
        "model_type": "kimi_k2",
        "moe_intermediate_size": c.moe_intermediate_size,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": c.n_routed_experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": c.num_attention_heads,
        "num_experts_per_tok": c.num_experts_per_tok,
        "num_hidden_layers": c.num_hidden_layers,
        "num_key_value_heads": c.num_attention_heads,
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "q_lora_rank": c.q_lora_rank,
        "qk_nope_head_dim": c.qk_nope_head_dim,
        "qk_rope_head_dim": c.qk_rope_head_dim,
        "quantization_config": QUANTIZATION,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_interleave": True,
        "rope_scaling": None,
        "rope_theta": c.rope_theta,
        "routed_scaling_factor": c.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": c.v_head_dim,
        "vocab_size": c.vocab_size,
    }


def drafter_config(c: DrafterConfig, target: TargetConfig) -> dict[str, object]:
    """config.json of the drafter, as published DFlash drafters write it."""
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": c.block_size,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(c.target_layer_ids)},
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": c.intermediate_size,
        "layer_types": ["full_attention"] * c.num_hidden_layers,
        "max_position_embeddings": target.max_position_embeddings,
        "max_window_layers": c.num_hidden_layers,
        "model_type": "qwen3",
        "num_attention_heads": c.num_attention_heads,
        "num_hidden_layers": c.num_hidden_layers,
        "num_key_value_heads": c.num_key_value_heads,
        "num_target_layers": target.num_hidden_layers,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": c.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": target.vocab_size,
    }


def write_json(path: Path, value: object) -> None:
    """Indented JSON with a newline at the end."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def target_tensors(model: Target) -> dict[str, Tensor]:
    """The checkpoint's tensors under K2's names."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if ".mlp." in name and name.split(".mlp.")[1] in ("router", "bias", "load", "gate", "up", "down"):
            continue
        tensors[name if name.startswith("lm_head") else f"model.{name}"] = value.to(torch.bfloat16)
    for index, layer in enumerate(model.layers):
        if not isinstance(layer.mlp, MoE):
            continue
        prefix = f"model.layers.{index}.mlp"
        tensors[f"{prefix}.gate.weight"] = layer.mlp.router.to(torch.bfloat16)
        tensors[f"{prefix}.gate.e_score_correction_bias"] = layer.mlp.bias.float()
        for kind in ("gate", "up", "down"):
            weight = getattr(layer.mlp, kind)
            codes, scales = quantise(weight)
            for expert in range(len(weight)):
                name = f"{prefix}.experts.{expert}.{kind}_proj"
                tensors[f"{name}.weight_packed"] = pack(codes[expert].flatten(-2))
                tensors[f"{name}.weight_scale"] = scales[expert]
                tensors[f"{name}.weight_shape"] = torch.tensor(weight.shape[1:], dtype=torch.int32)
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def save_target(model: Target, folder: Path) -> None:
    """Write config, generation config and weights of a trained (not frozen) target."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", target_config(model.c))
    generation = {
        "bos_token_id": BOS,
        "eos_token_id": [EOS, IM_END],
        "pad_token_id": PAD,
        "max_length": model.c.max_position_embeddings,
    }
    write_json(folder / "generation_config.json", generation)
    save_file(target_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})


def save_drafter(model: Drafter, target: TargetConfig, folder: Path) -> None:
    """Write the drafter's config and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", drafter_config(model.c, target))
    tensors = {name: value.detach().to(torch.bfloat16).cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def dequantised(folder: Path) -> dict[str, Tensor]:
    """The target's tensors with `.weight` in bf16 for each packed expert."""
    tensors = load_file(folder / "model.safetensors")
    for name in [n.removesuffix(".weight_packed") for n in tensors if n.endswith(".weight_packed")]:
        codes, scale = unpack(tensors.pop(f"{name}.weight_packed")), tensors.pop(f"{name}.weight_scale")
        tensors.pop(f"{name}.weight_shape")
        tensors[f"{name}.weight"] = codes.to(torch.bfloat16) * scale.repeat_interleave(GROUP, -1)
    return tensors


def load_target(folder: Path, device: str, dtype: torch.dtype) -> Target:
    """A frozen target from its checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    c = TargetConfig(**{name: config[name] for name in TargetConfig.__dataclass_fields__})
    tensors = dequantised(folder)
    model = Target(c)
    state = model.state_dict()
    for name in state:
        if ".mlp." in name and (kind := name.split(".mlp.")[1]) in ("gate", "up", "down"):
            prefix = f"model.{name.removesuffix(kind)}experts"
            state[name] = torch.stack([tensors[f"{prefix}.{e}.{kind}_proj.weight"] for e in range(c.n_routed_experts)])
        elif name.endswith("mlp.router"):
            state[name] = tensors[f"model.{name.replace('router', 'gate.weight')}"]
        elif name.endswith("mlp.bias"):
            state[name] = tensors[f"model.{name.replace('bias', 'gate.e_score_correction_bias')}"]
        elif not name.endswith("mlp.load"):
            state[name] = tensors[name if name.startswith("lm_head") else f"model.{name}"]
    model.load_state_dict(state)
    for layer in model.layers:
        if isinstance(layer.mlp, MoE):
            layer.mlp.frozen = True
    return model.to(device).freeze(dtype)


def master(codes: Tensor, scale: Tensor) -> Tensor:
    """Weights that `quantise` maps back to these codes [..., 32] and scales [...], to train on from a checkpoint."""
    edge = torch.where(codes == 7, 7.5, torch.where(codes == -8, -7.5, codes.float()))
    lone = (edge.abs().amax(-1, keepdim=True) < 7.5) & (codes == -7)  # bf16 rounded this group's scale up
    return (torch.where(lone, -7.49, edge) * scale.float().unsqueeze(-1)).flatten(-2)


def load_trainable(folder: Path, device: str) -> Target:
    """A target to train on from its checkpoint: fp32 weights that quantise to what the checkpoint holds."""
    model = load_target(folder, "cpu", torch.float32)
    tensors = load_file(folder / "model.safetensors")
    for index, layer in enumerate(model.layers):
        if isinstance(layer.mlp, MoE):
            for kind in ("gate", "up", "down"):
                for expert, weight in enumerate(getattr(layer.mlp, kind).data):
                    name = f"model.layers.{index}.mlp.experts.{expert}.{kind}_proj"
                    codes = unpack(tensors[f"{name}.weight_packed"]).unflatten(-1, (-1, GROUP))
                    weight.copy_(master(codes, tensors[f"{name}.weight_scale"]))
            layer.mlp.frozen = False
    return model.to(device).train().requires_grad_(True)


def load_drafter(folder: Path, device: str, dtype: torch.dtype) -> Drafter:
    """A drafter from its checkpoint, for inference."""
    config = json.loads((folder / "config.json").read_text())
    values = {**config, "target_layer_ids": tuple(config["dflash_config"]["target_layer_ids"])}
    model = Drafter(DrafterConfig(**{name: values[name] for name in DrafterConfig.__dataclass_fields__}))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.to(device, dtype).eval().requires_grad_(False)
