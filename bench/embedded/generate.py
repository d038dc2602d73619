"""Batched generation with a static cache; on a GPU one decode step is captured in a CUDA graph and replayed."""

from __future__ import annotations

import numpy as np
import torch
from model import Cache, Target
from tokenizer import BOS, IM_MIDDLE
from torch import Tensor


@torch.no_grad()
def generate(target: Target, prompts: Tensor, new: int, temperature: Tensor) -> Tensor:
    """Continue prompts [B, P] by `new` tokens with a frozen target -> [B, P + new]; temperature [B], 0 is greedy."""
    batch, length = prompts.shape
    device, dtype = prompts.device, target.norm.weight.dtype
    cache = Cache(target.c, batch, length + new, device, dtype)
    out = torch.zeros(batch, length + new, dtype=torch.long, device=device)
    out[:, :length] = prompts
    slots = torch.arange(length + new, device=device)
    heat = temperature.unsqueeze(-1).float()

    def pick(hidden: Tensor) -> Tensor:
        logits = target.lm_head(hidden).float()
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-10, 1 - 1e-7)))
        return (logits + heat * noise).argmax(-1)

    token = pick(target(prompts, cache=cache)[0][:, -1])
    cache.position.fill_(length)
    out[:, length] = token

    def step() -> None:
        mask = (slots <= cache.position).unsqueeze(0)
        hidden, _ = target(token.unsqueeze(1), positions=cache.position, mask=mask, cache=cache)
        token.copy_(pick(hidden[:, -1]))
        cache.position.add_(1)
        out.index_copy_(1, cache.position, token.unsqueeze(1))

    run = step
    if prompts.is_cuda and new > 4:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    while int(cache.position) < length + new - 1:
        run()
    return out


def windows(ids: np.ndarray, count: int, length: int, rng: np.random.Generator, dialogue_share: float = 0.1) -> Tensor:
    """Random prompts [count, length], each starting with [BOS]; a share of them ends where a chat answer begins."""
    ends = rng.integers(length, len(ids), count)
    answers = np.flatnonzero(ids[-2_000_000:] == IM_MIDDLE)[1::2] + max(0, len(ids) - 2_000_000) + 1
    answers = answers[answers > length]
    chats = int(count * dialogue_share) if len(answers) else 0
    ends[:chats] = rng.choice(answers, chats) if chats else ends[:0]
    prompts = np.stack([ids[end - length : end] for end in ends]).astype(np.int64)
    prompts[:, 0] = BOS
    return torch.from_numpy(prompts)
