"""The published DFlash drafter and the published DDTree loop, written again in plain torch: no code of the engine.

Everything is recomputed each round: the target's hidden states over the whole context, the drafter over context and
block, the target over every path of the tree. Rotary embedding and YaRN are transformers' own.

Legend: T context tokens, B block, V vocabulary.
"""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

Tokens = tuple[int, ...]


class Target:
    """The official model as the loop needs it: logits, tapped hidden states, embedding and head."""

    def __init__(self, model: Any, taps: list[int]) -> None:
        self.model, self.taps = model, taps
        self.layers = model.config.get_text_config().num_hidden_layers
        self._last: list[Tensor] = []
        decoder = model.get_decoder()
        decoder.layers[self.layers - 1].register_forward_hook(self._keep_last)

    def _keep_last(self, _module: Any, _args: Any, out: Any) -> None:
        self._last.append(out[0] if isinstance(out, tuple) else out)

    def tapped(self, context: Tokens) -> Tensor:
        """[T, taps * hidden]: the output of each tapped layer, the last one's before the final norm."""
        self._last = []
        with torch.no_grad():
            states = self.model(torch.tensor([context]), use_cache=False, output_hidden_states=True).hidden_states
        each = [self._last[-1] if tap == self.layers - 1 else states[tap + 1] for tap in self.taps]
        return torch.cat([state[0] for state in each], dim=-1)

    def picks(self, context: Tokens, paths: list[Tokens]) -> list[int]:
        """The greedy token after context and each path."""
        picked = [0] * len(paths)
        for length in {len(path) for path in paths}:
            here = [i for i, path in enumerate(paths) if len(path) == length]
            with torch.no_grad():
                logits = self.model(torch.tensor([context + paths[i] for i in here]), use_cache=False).logits[:, -1]
            for i, token in zip(here, logits.argmax(-1).tolist(), strict=True):
                picked[i] = token
        return picked


class Drafter:
    """A DFlash checkpoint. `window` caps every layer's context, `amplitude` replaces YaRN's factor on cos and sin."""

    def __init__(self, directory: Path, window: int | None = None, amplitude: float | None = None) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.weights = load_file(directory / "model.safetensors")
        self.nested = self.config["dflash_config"]
        self.block = self.config.get("block_size") or self.nested["block_size"]
        self.window = window
        plain = {"rope_type": "default"}
        rope = self.config.get("rope_parameters") or {
            **(self.config.get("rope_scaling") or plain), "rope_theta": self.config["rope_theta"]
        }  # fmt: skip
        if amplitude is not None:
            rope = {**rope, "attention_factor": amplitude}
        shape = {key: self.config[key] for key in ("head_dim", "hidden_size", "num_attention_heads")}
        positions = self.config["max_position_embeddings"]
        self.rope = Qwen3RotaryEmbedding(Qwen3Config(**shape, max_position_embeddings=positions, rope_parameters=rope))

    def log_probs(self, tapped: Tensor, root: int, embed: Tensor, head: Tensor) -> Tensor:
        """[B - 1, V]: what each masked slot says of the token at its own position."""
        mask = self.nested["mask_token_id"]
        x = embed[[root, *[mask] * (self.block - 1)]]
        context = self._norm(linear(tapped, self.weights["fc.weight"]), "hidden_norm")
        positions = torch.arange(len(tapped) + self.block)
        cos, sin = self.rope(x[None], positions[None])
        for layer in range(self.config["num_hidden_layers"]):
            x = x + self._attend(layer, x, context, positions, (cos, sin))
            at = f"layers.{layer}."
            n = self._norm(x, f"{at}post_attention_layernorm")
            gate, up, down = (self.weights[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            x = x + linear(silu(linear(n, gate)) * linear(n, up), down)
        return linear(self._norm(x[1:], "norm"), head).log_softmax(-1)

    def _attend(self, layer: int, x: Tensor, context: Tensor, positions: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Block queries over context and block keys; the context enters k_proj and v_proj as it is."""
        at, d = f"layers.{layer}.self_attn.", self.config["head_dim"]
        n = self._norm(x, f"layers.{layer}.input_layernorm")
        both = torch.cat([context, n])
        q = self._norm(linear(n, self.weights[f"{at}q_proj.weight"]).unflatten(-1, (-1, d)), f"{at}q_norm")
        k = self._norm(linear(both, self.weights[f"{at}k_proj.weight"]).unflatten(-1, (-1, d)), f"{at}k_norm")
        v = linear(both, self.weights[f"{at}v_proj.weight"]).unflatten(-1, (-1, d))
        padded = torch.cat([torch.zeros(len(context), *q.shape[1:]), q])  # so that queries are turned as keys are
        q, k = apply_rotary_pos_emb(padded.transpose(0, 1)[None], k.transpose(0, 1)[None], *turn)
        q, v = q[:, :, len(context) :], v.transpose(0, 1)[None]
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        scores = q @ k.transpose(-1, -2) * d**-0.5
        scores = scores.masked_fill(~self._seen(layer, positions, len(context)), -torch.inf)
        out = (scores.softmax(-1) @ v)[0].transpose(0, 1).flatten(1)
        return linear(out, self.weights[f"{at}o_proj.weight"])

    def _seen(self, layer: int, positions: Tensor, start: int) -> Tensor:
        """[B, T + B]: sliding layers are causal and others are not, unless the config says otherwise."""
        kinds = self.config.get("layer_types") or ["full_attention"] * self.config["num_hidden_layers"]
        sliding = self.nested.get("use_swa", kinds[layer] == "sliding_attention")
        causal = self.config.get("is_causal", self.nested.get("causal", sliding))
        own_window = self.nested.get("swa_window_size") or self.config.get("sliding_window")
        windows = [w for w in (own_window if sliding else None, self.window) if w]
        own, key = positions[start:, None], positions[None]
        seen = key <= own if causal else torch.ones(self.block, len(positions), dtype=torch.bool)
        return seen & (key > own - min(windows)) if windows else seen

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return (
            x
            * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
            * self.weights[f"{name}.weight"]
        )


@dataclass(frozen=True)
class Round:
    """How many tokens a round emitted, and by how much the tree's worst node beat the best one left out."""

    tokens: Tokens
    margin: float


def best_first(log_probs: Tensor, budget: int, width: int) -> tuple[list[Tokens], float]:
    """The published heap: paths of the `budget` best nodes, best first, and the margin at the cut."""
    values, ids = log_probs.topk(min(width, log_probs.shape[1]), dim=-1)
    values, ids = values.tolist(), ids.tolist()
    heap = [(-values[0][0], (0,))]
    nodes: list[tuple[float, Tokens]] = []
    while heap and len(nodes) <= budget:
        score, ranks = heapq.heappop(heap)
        nodes.append((-score, ranks))
        depth, rank = len(ranks) - 1, ranks[-1]
        if rank + 1 < len(values[0]):
            heapq.heappush(heap, (score + values[depth][rank] - values[depth][rank + 1], (*ranks[:-1], rank + 1)))
        if depth + 1 < len(values):
            heapq.heappush(heap, (score - values[depth + 1][0], (*ranks, 0)))
    margin = nodes[budget - 1][0] - nodes[budget][0] if len(nodes) > budget else float("inf")
    paths = [tuple(ids[depth][rank] for depth, rank in enumerate(ranks)) for _, ranks in nodes[:budget]]
    return paths, margin


def ddtree(target: Target, drafter: Drafter, prompt: Tokens, count: int, budget: int, width: int) -> list[Round]:
    """The published loop at temperature 0; the first round is the prefill's pick. `width` candidates a depth."""
    embed = target.model.get_input_embeddings().weight.detach()
    head = target.model.get_output_embeddings().weight.detach()
    root = target.picks(prompt, [()])[0]
    rounds, context, left = [Round((root,), float("inf"))], prompt, count - 1
    while left:
        nodes, margin = best_first(drafter.log_probs(target.tapped(context), root, embed, head), budget, width)
        paths = [(root,), *((root, *node) for node in nodes)]
        posterior = dict(zip(paths, target.picks(context, paths), strict=True))
        path: Tokens = (root,)
        emitted = [posterior[path]]
        while (path := (*path, emitted[-1])) in posterior:
            emitted.append(posterior[path])
        emitted = emitted[:left]
        rounds.append(Round(tuple(emitted), margin))
        context, root, left = (*context, root, *emitted[:-1]), emitted[-1], left - len(emitted)
    return rounds
