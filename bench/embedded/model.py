"""The embedded target and its DFlash drafter, for training: plain torch, fp32 master weights.

`Target` is DeepSeek-V3's block (MLA, sigmoid-routed MoE) in Kimi K2's shape. Its routed experts are fake-quantised to
compressed-tensors' INT4 in every forward pass, so what is trained is what is exported. All experts run on all rows:
with sixteen small ones that is faster than grouping. `Drafter` is DFlash's: a block of masks attends to the target's
features.

Shapes: B sequences, S tokens, D hidden, A heads, E experts, I expert width, V vocabulary, N anchors, K block size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP = 32  # INT4 quantisation group along a weight's input dimension


@dataclass(frozen=True)
class TargetConfig:
    """Sizes of the target; names follow the Hugging Face configuration."""

    vocab_size: int = 2048
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    q_lora_rank: int = 96
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 32
    intermediate_size: int = 384
    moe_intermediate_size: int = 128
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 50000.0
    max_position_embeddings: int = 4096


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of the drafter."""

    hidden_size: int = 256
    num_hidden_layers: int = 3
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    intermediate_size: int = 384
    rms_norm_eps: float = 1e-6
    rope_theta: float = 50000.0
    block_size: int = 8
    target_layer_ids: tuple[int, ...] = field(default=(0, 2, 4))


def fake_quantise(weight: Tensor) -> Tensor:
    """`weight` as pack-quantized INT4 would be read back (bf16 values); gradients pass straight through."""
    codes, scale = quantise(weight.detach())
    read = (codes.to(torch.bfloat16) * scale.unsqueeze(-1)).flatten(-2).float()
    return weight + (read - weight).detach()


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes in [-8, 7], shaped [..., in / 32, 32], and bf16 scales [..., in / 32] of symmetric group quantisation."""
    grouped = weight.float().unflatten(-1, (-1, GROUP))
    scale = (grouped.abs().amax(-1) / 7.5).clamp_min(1e-8).to(torch.bfloat16)
    codes = torch.clamp(torch.round(grouped / scale.float().unsqueeze(-1)), -8, 7)
    return codes, scale


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in fp32, returned in x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rope_table(length: int, dim: int, theta: float, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Cos and sin, each [length, dim / 2], fp32."""
    inverse = 1.0 / theta ** (torch.arange(0, dim, 2, device=device).float() / dim)
    angle = torch.arange(length, device=device).float()[:, None] * inverse
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the last dimension; `interleaved` pairs (0, 1), (2, 3) ... and, as DeepSeek's code, leaves halves."""
    if interleaved:
        a, b = x[..., 0::2].float(), x[..., 1::2].float()
    else:
        a, b = (half.float() for half in x.chunk(2, -1))
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Norm(nn.Module):
    """RMSNorm with a gain."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.weight, self.eps)


def linear(inputs: int, outputs: int, std: float = 0.02) -> nn.Linear:
    """A bias-free linear layer with normal weights."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(dim, width), linear(dim, width), linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Multi-head latent attention, unabsorbed."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.c = c
        heads, nope, rope, value = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        self.q_a_proj = linear(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = Norm(c.q_lora_rank, 1e-6)
        self.q_b_proj = linear(c.q_lora_rank, heads * (nope + rope))
        self.kv_a_proj_with_mqa = linear(c.hidden_size, c.kv_lora_rank + rope)
        self.kv_a_layernorm = Norm(c.kv_lora_rank, 1e-6)
        self.kv_b_proj = linear(c.kv_lora_rank, heads * (nope + value))
        self.o_proj = linear(heads * value, c.hidden_size)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, A, S, nope + rope], values [B, A, S, v]; cos and sin are [S, rope / 2]."""
        c = self.c
        q = (
            self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
            .unflatten(-1, (c.num_attention_heads, -1))
            .transpose(1, 2)
        )
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (c.num_attention_heads, -1)).transpose(1, 2)
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k_rope = rotate(k_rope.unsqueeze(1), cos, sin, interleaved=True).expand(-1, c.num_attention_heads, -1, -1)
        q = torch.cat([q_nope, rotate(q_rope, cos, sin, interleaved=True)], -1)
        return q, torch.cat([k_nope, k_rope], -1), v

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Cache | None, layer: int
    ) -> Tensor:
        """Attend causally over x alone (and fill `cache`), or under `mask` [S, slots] over all of the cache's slots."""
        q, k, v = self.project(x, cos, sin)
        if cache is not None:
            past = cache.append(layer, k, v)
        if cache is not None and mask is not None:
            k, v = past
            scores = (q @ k.mT) * q.shape[-1] ** -0.5
            out = scores.masked_fill(~mask, float("-inf")).float().softmax(-1).to(v.dtype) @ v
            return self.o_proj(out.transpose(1, 2).flatten(-2))
        padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))  # flash attention wants one head width
        out = F.scaled_dot_product_attention(q, k, padded, is_causal=True)
        return self.o_proj(out[..., : v.shape[-1]].transpose(1, 2).flatten(-2))


class MoE(nn.Module):
    """Sigmoid routing with a selection bias, one shared expert, routed experts fake-quantised to INT4."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.c = c
        experts, dim, width = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size
        self.router = nn.Parameter(torch.randn(experts, dim) * 0.02)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts))
        self.frozen = False
        self.gate, self.up = (nn.Parameter(torch.randn(experts, width, dim) * 0.02) for _ in range(2))
        self.down = nn.Parameter(torch.randn(experts, dim, width) * 0.02)
        self.shared_experts = SwiGLU(dim, width)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Combine weights [T, E] (zero for experts not chosen) and how many rows chose each expert [E]."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.router.float()).sigmoid()
        chosen = (scores.detach() + self.bias).topk(self.c.num_experts_per_tok, -1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        weights = scores * mask
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.c.routed_scaling_factor, mask.sum(0)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        flat = x.flatten(0, 1)
        weights, count = self.route(flat)
        if self.training:
            self.load.add_(count.detach())
        gate, up, down = (w if self.frozen else fake_quantise(w) for w in (self.gate, self.up, self.down))
        hidden = F.silu(F.linear(flat, gate.flatten(0, 1))) * F.linear(flat, up.flatten(0, 1))
        hidden = hidden.unflatten(-1, (self.c.n_routed_experts, -1)) * weights.unsqueeze(-1).to(hidden.dtype)
        routed = F.linear(hidden.flatten(1), down.transpose(0, 1).flatten(1))
        return (routed + self.shared_experts(flat)).view_as(x)


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, c: TargetConfig, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size) if dense else MoE(c)


class Cache:
    """Keys and values of a static length; `position` [1] is where the next row goes."""

    def __init__(
        self, c: TargetConfig, batch: int, length: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        shape = (c.num_hidden_layers, batch, c.num_attention_heads, length)
        self.keys = torch.zeros(*shape, c.qk_nope_head_dim + c.qk_rope_head_dim, device=device, dtype=dtype)
        self.values = torch.zeros(*shape, c.v_head_dim, device=device, dtype=dtype)
        self.position = torch.zeros(1, dtype=torch.long, device=device)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write rows at `position` onwards and return the whole layer."""
        slots = self.position + torch.arange(k.shape[2], device=k.device)
        self.keys[layer].index_copy_(2, slots, k.to(self.keys.dtype))
        self.values[layer].index_copy_(2, slots, v.to(self.values.dtype))
        return self.keys[layer], self.values[layer]


class Target(nn.Module):
    """The target language model."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(c, i < c.first_k_dense_replace) for i in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = linear(c.hidden_size, c.vocab_size)

    def forward(
        self,
        ids: Tensor,
        taps: tuple[int, ...] = (),
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Ids [B, S] -> final hidden states after the norm [B, S, D], and the taps' outputs [B, S, taps * D]."""
        c = self.c
        cos, sin = rope_table(c.max_position_embeddings, c.qk_rope_head_dim, c.rope_theta, ids.device)
        rows = torch.arange(ids.shape[1], device=ids.device) if positions is None else positions
        cos, sin = cos[rows], sin[rows]
        x = self.embed_tokens(ids)
        tapped: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            x = x + layer.self_attn(layer.input_layernorm(x), cos, sin, mask, cache, index)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if index in taps:
                tapped.append(x)
        return self.norm(x), torch.cat(tapped, -1) if tapped else None

    @torch.no_grad()
    def freeze(self, dtype: torch.dtype = torch.bfloat16) -> Target:
        """Put in place what the checkpoint will hold (INT4 experts read back, bf16 elsewhere) and stop training."""
        for layer in self.layers:
            if isinstance(layer.mlp, MoE) and not layer.mlp.frozen:
                for weight in (layer.mlp.gate, layer.mlp.up, layer.mlp.down):
                    weight.copy_(fake_quantise(weight))
                layer.mlp.frozen = True
        biases = [layer.mlp.bias.clone() for layer in self.layers if isinstance(layer.mlp, MoE)]
        self.to(torch.bfloat16).to(dtype)
        for mlp, bias in zip((x.mlp for x in self.layers if isinstance(x.mlp, MoE)), biases, strict=True):
            mlp.bias = bias
        return self.eval().requires_grad_(False)

    def balance(self, rate: float) -> None:
        """Move each selection bias towards an even load (DeepSeek-V3's rule)."""
        for layer in self.layers:
            if isinstance(layer.mlp, MoE):
                load = layer.mlp.load
                layer.mlp.bias.add_(rate * torch.sign(load.mean() - load))
                load.zero_()


class DraftAttention(nn.Module):
    """Queries from the block; keys and values from the context features and the block, through the same projections."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.c = c
        self.q_proj = linear(c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj = linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = linear(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.q_norm, self.k_norm = Norm(c.head_dim, c.rms_norm_eps), Norm(c.head_dim, c.rms_norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D] -> rotated keys and values [B, kv heads, S, head_dim]; cos and sin are [B, 1, S, head_dim / 2]."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.c.head_dim))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (-1, self.c.head_dim)).transpose(1, 2)
        return rotate(k, cos, sin, interleaved=False), v

    def forward(
        self, x: Tensor, context: Tensor, table: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """X [B, N * K, D], context [B, S, D], mask [B, 1, N * K, S + N * K] (True where visible)."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.c.head_dim))).transpose(1, 2)
        q = rotate(q, *block, interleaved=False)
        ctx_k, ctx_v = self.keys_values(context, *table)
        own_k, own_v = self.keys_values(x, *block)
        k, v = torch.cat([ctx_k, own_k], 2), torch.cat([ctx_v, own_v], 2)
        repeat = self.c.num_attention_heads // self.c.num_key_value_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(-2))


class DraftLayer(nn.Module):
    """One drafter layer."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = DraftAttention(c)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size)


class Drafter(nn.Module):
    """DFlash's block drafter; embedding and head are the target's."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.c = c
        self.fc = linear(c.hidden_size * len(c.target_layer_ids), c.hidden_size)
        self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(c) for _ in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)

    def forward(self, embedded: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states of every block slot.

        embedded: [B, N * K, D], the anchor's and the masks' embeddings. features: [B, S, taps * D] of all positions.
        anchors: [B, N] positions; a block sees the features strictly before its anchor and itself, in both directions.
        """
        size, length = self.c.block_size, features.shape[1]
        device = embedded.device
        places = (anchors.unsqueeze(-1) + torch.arange(size, device=device)).flatten(1)
        owner = torch.arange(places.shape[1], device=device) // size
        seen = torch.arange(length, device=device) < anchors.repeat_interleave(size, 1).unsqueeze(-1)
        own = (owner[:, None] == owner).expand(len(anchors), -1, -1)
        mask = torch.cat([seen, own], -1).unsqueeze(1)
        cos, sin = rope_table(length + size, self.c.head_dim, self.c.rope_theta, device)
        table, block = (cos[:length], sin[:length]), (cos[places].unsqueeze(1), sin[places].unsqueeze(1))
        context = self.hidden_norm(self.fc(features))
        x = embedded
        for layer in self.layers:
            x = x + layer.self_attn(layer.input_layernorm(x), context, table, block, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)
