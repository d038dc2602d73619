"""What a model's `config.json` says, as frozen records. `models.config` fills them; builders use nothing else.
Sizes are counts of elements; ids are 0-based."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the last `dim` features: pair i turns by position * inv_freq[i].

    `factor` 1 is plain rope; otherwise YaRN (arXiv 2309.00071) between `original_max` positions, `beta_fast` and
    `beta_slow`. `amplitude` multiplies cos and sin. `interleaved`: pairs (0,1),(2,3).. instead of halves.
    """

    dim: int
    theta: float
    interleaved: bool = False
    factor: float = 1.0
    original_max: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    amplitude: float = 1.0


@dataclass(frozen=True, slots=True)
class Quantisation:
    """compressed-tensors "pack-quantized" int4, symmetric: which Linear modules it covers, `group` inputs a scale.

    `ignore` holds module names or `re:` patterns, as in the checkpoint's config.
    """

    ignore: tuple[str, ...]
    group: int = 32


@dataclass(frozen=True, slots=True)
class KimiConfig:
    """A DeepSeek-V3 block as Kimi K2 uses it: MLA, dense first layers, then routed experts plus a shared one."""

    prefix: str  # "model." or "language_model.model."
    head: str  # "lm_head.weight" or "language_model.lm_head.weight"
    vocab: int
    hidden: int
    layers: int
    heads: int
    q_lora: int | None  # None: one q_proj
    kv_lora: int
    nope: int
    rope: Rope  # of the last rope.dim features of a head, and of the shared key
    v_dim: int
    softmax_scale: float
    intermediate: int  # dense MLP
    dense_layers: int
    experts: int
    top_k: int
    moe_intermediate: int
    shared_experts: int
    norm_topk: bool
    routed_scale: float
    eps: float
    inner_eps: float  # q_a_layernorm and kv_a_layernorm: 1e-6 whatever the config says, as transformers has it
    max_positions: int
    tied: bool
    dtype: str  # "bf16" or "f32": of weights and activations
    quantisation: Quantisation | None
    fp8: bool = False  # planned with a warning, refused by run and build
    skip: tuple[str, ...] = ()  # prefixes of checkpoint tensors that text generation does not use


@dataclass(frozen=True, slots=True)
class Qwen3Config:
    """Qwen3 dense: GQA with per-head norms of q and k, SwiGLU."""

    prefix: str
    head: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    intermediate: int
    eps: float
    max_positions: int
    tied: bool
    dtype: str
    quantisation: Quantisation | None = None
    fp8: bool = False
    skip: tuple[str, ...] = ()


TargetConfig = KimiConfig | Qwen3Config


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """A DFlash drafter (arXiv 2602.06036): Qwen3 layers over a block, the target's tapped hidden states as context."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    intermediate: int
    eps: float
    block: int
    mask_token: int
    taps: tuple[int, ...]  # target layers after which the hidden state is captured
    causal: tuple[bool, ...]  # per layer: is the block causal within itself
    window: tuple[int, ...]  # per layer: context tokens seen, 0 for all
    dtype: str

    @property
    def horizon(self) -> int:
        """Tokens drafted a round."""
        return self.block - 1
