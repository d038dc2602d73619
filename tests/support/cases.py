"""Hypothesis strategies for whole small cases: a target's config, a drafter's, a spec and prompts.

Sizes are odd on purpose: head widths, ranks and vocabularies that fill no tile, chunks that divide no prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from ddtree_compile.spec import tree_capacity

BUCKETS = (1, 2, 3, 5, 7, 11, 15, 22, 31)
CHUNKS = ((4,), (8,), (3, 16), (8, 32), (1, 5))
ROUNDS = 128  # tokens a case generates, in full
LONGEST = 70  # tokens of a prompt
VOCABULARIES = (5, 11, 23, 37, 61, 97)

Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass(frozen=True)
class Case:
    """One random model pair and what to ask of it."""

    target: dict[str, Any]
    drafter: dict[str, Any]
    buckets: tuple[int, ...]
    top_k: int
    chunks: tuple[int, ...]
    spine: bool
    prompts: tuple[tuple[int, ...], ...]
    shard_size: str
    seed: int
    kimi_k2: bool = False


def rope(draw: Draw, *, mscale: bool) -> dict[str, Any]:
    """Plain rope or YaRN, with the amplitude's fields where `mscale` says that the family reads them."""
    theta = draw(st.sampled_from([100.0, 10000.0, 50000.0]))
    if not draw(st.booleans()):
        return {"rope_theta": theta, "rope_type": "default"}
    yarn = {
        "rope_type": "yarn", "rope_theta": theta, "factor": draw(st.sampled_from([1.5, 4.0, 32.0])),
        "original_max_position_embeddings": draw(st.sampled_from([16, 48, 200])),
    }  # fmt: skip
    if draw(st.booleans()):
        yarn |= {"beta_fast": draw(st.sampled_from([4.0, 32.0])), "beta_slow": 1.0}
    fields = draw(st.sampled_from(["none", "both", "all"])) if mscale else "none"
    if fields != "none":
        yarn["mscale_all_dim"] = draw(st.sampled_from([0.5, 1.0]))
    if fields == "both":
        yarn["mscale"] = draw(st.sampled_from([0.707, 1.0]))
    if fields == "none" and draw(st.booleans()):
        yarn["attention_factor"] = 1.25
    return yarn


@st.composite
def deepseek_targets(draw: Draw) -> dict[str, Any]:
    """Changes to `checkpoints.KIMI`."""
    layers = draw(st.integers(1, 3))
    heads = draw(st.sampled_from([1, 2, 3, 4]))
    experts = draw(st.integers(2, 9))
    return {
        "vocab_size": draw(st.sampled_from(VOCABULARIES)),
        "hidden_size": draw(st.sampled_from([16, 24, 36, 48, 64])),
        "intermediate_size": draw(st.sampled_from([20, 33, 64])),
        "moe_intermediate_size": draw(st.sampled_from([8, 13, 24])),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_shared_experts": draw(st.sampled_from([0, 1, 2])),
        "n_routed_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, min(experts, 4))),
        "first_k_dense_replace": draw(st.integers(0, layers)),
        "norm_topk_prob": draw(st.booleans()),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "kv_lora_rank": draw(st.sampled_from([8, 12, 32])),
        "q_lora_rank": draw(st.sampled_from([None, 10, 32])),
        "qk_rope_head_dim": draw(st.sampled_from([2, 6, 8])),
        "qk_nope_head_dim": draw(st.sampled_from([3, 8, 16])),
        "v_head_dim": draw(st.sampled_from([5, 8, 16])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "rope_interleave": draw(st.booleans()),
        "rope_parameters": rope(draw, mscale=True),
    }


@st.composite
def qwen3_targets(draw: Draw) -> dict[str, Any]:
    """Changes to `checkpoints.QWEN3`."""
    groups = draw(st.sampled_from([1, 2, 3]))
    return {
        "vocab_size": draw(st.sampled_from(VOCABULARIES)),
        "hidden_size": draw(st.sampled_from([16, 24, 36, 48, 64])),
        "intermediate_size": draw(st.sampled_from([20, 33, 64])),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": groups * draw(st.sampled_from([1, 2, 4])),
        "num_key_value_heads": groups,
        "head_dim": draw(st.sampled_from([4, 6, 10, 16])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": rope(draw, mscale=False),
    }


def drafters(draw: Draw, target: dict[str, Any]) -> dict[str, Any]:
    """Changes to the config that `make_drafter` starts from."""
    layers, taps = draw(st.integers(1, 2)), draw(st.permutations(range(target["num_hidden_layers"])))
    groups = draw(st.sampled_from([1, 2]))
    mask = draw(st.integers(0, target["vocab_size"] - 1))
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": groups * draw(st.sampled_from([1, 2])),
        "num_key_value_heads": groups,
        "head_dim": draw(st.sampled_from([4, 8, 10])),
        "intermediate_size": draw(st.sampled_from([12, 40])),
        "block_size": draw(st.integers(2, 8)),
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps[: draw(st.integers(1, len(taps)))]},
    }


@st.composite
def cases(draw: Draw, targets: st.SearchStrategy[dict[str, Any]], sequences: tuple[int, ...] = (1, 3)) -> Case:
    """A case over `targets`, with one sequence or three."""
    target = draw(targets)
    drafter = drafters(draw, target)
    vocab, horizon = target["vocab_size"], drafter["block_size"] - 1
    top_k = draw(st.integers(1, min(vocab, 31)))
    legal = [bucket for bucket in BUCKETS if bucket <= tree_capacity(top_k, horizon)]
    buckets = draw(st.lists(st.sampled_from(legal), min_size=1, max_size=2, unique=True))
    length = st.one_of(st.sampled_from([1, 2]), st.integers(3, 20), st.integers(20, LONGEST))
    prompt = length.flatmap(lambda n: st.lists(st.integers(0, vocab - 1), min_size=n, max_size=n).map(tuple))
    count = draw(st.sampled_from(sequences))
    return Case(
        target=target,
        drafter=drafter,
        buckets=tuple(sorted(buckets)),
        top_k=top_k,
        chunks=draw(st.sampled_from(CHUNKS)),
        spine=draw(st.booleans()),
        prompts=tuple(draw(prompt) for _ in range(count)),
        shard_size=draw(st.sampled_from(["50GB", "20KB"])),
        seed=draw(st.integers(0, 1 << 16)),
        kimi_k2=draw(st.booleans()),
    )
