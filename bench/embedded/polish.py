"""Finish the target: teach it not to repeat itself, and nothing else.

Enters: the exported target and the encoded corpus. Leaves: the target, in place. First some next-token prediction on
windows that start as prompts do, with [BOS]. Then rounds: the model writes fresh greedy texts; where a token
completes a repeated n-gram the label is the starting model's distribution without that token, elsewhere that
distribution as it is. (Plain unlikelihood leaves the freed probability to any token, and the model learns to tell its
own text from real text by what they start with.)
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from corpus import SEED
from export import load_trainable, save_target
from generate import generate, windows
from model import Target
from optim import Optimiser, schedule
from tokenizer import BOS
from torch import Tensor
from train_target import heldout_loss, sample

REPEAT = 8  # a token that completes an n-gram of this length seen earlier in the text counts as repeated
PROMPT, TEXT = 64, 256  # tokens of a greedy text's prompt, and of the whole text


def repeated(rows: Tensor) -> Tensor:
    """Which tokens of rows [B, S] after the prompt complete an n-gram that stands earlier in the row (bool [B, S])."""
    grams = rows.unfold(1, REPEAT, 1)
    key = torch.zeros_like(grams[..., 0])
    for index in range(REPEAT):
        key = key * 1_000_003 + grams[..., index]
    same = key.unsqueeze(2) == key.unsqueeze(1)
    earlier = torch.ones(same.shape[1:], dtype=torch.bool, device=rows.device).tril(-1)
    found = F.pad((same & earlier).any(-1), (REPEAT - 1, 0))
    found[:, :PROMPT] = False
    return found


def snapshot(model: Target) -> Target:
    """A frozen copy of the model, as its checkpoint would be read."""
    frozen = Target(model.c).to(model.norm.weight.device)
    frozen.load_state_dict(model.state_dict())
    return frozen.freeze()


def own_texts(model: Target, stream: np.ndarray, count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor, float]:
    """Greedy texts [count, TEXT], their repeated tokens, and the repeats' share after the prompt."""
    frozen = snapshot(model)
    device = frozen.norm.weight.device
    prompts = windows(stream, count, PROMPT, rng).to(device)
    texts = generate(frozen, prompts, TEXT - PROMPT, torch.zeros(count, device=device))
    marks = torch.cat([repeated(chunk) for chunk in texts.split(256)])
    return texts, marks, float(marks[:, PROMPT + REPEAT :].float().mean())


def prompt_loss(model: Target, ids: Tensor, batch: int, length: int, rng: torch.Generator) -> Tensor:
    """Cross entropy of windows whose first token is [BOS]."""
    rows = sample(ids, batch, length, rng)
    rows[:, 0] = BOS
    return F.cross_entropy(model.lm_head(model(rows[:, :-1])[0]).flatten(0, 1).float(), rows[:, 1:].flatten())


def own_loss(model: Target, start: Target, texts: Tensor, marks: Tensor) -> Tensor:
    """Cross entropy after the prompt against the starting model's distribution, without the marked tokens."""
    with torch.no_grad(), torch.autocast(texts.device.type, enabled=False):
        labels = start.lm_head(start(texts[:, :-1])[0]).float()
        unwanted = F.one_hot(texts[:, 1:], labels.shape[-1]).bool() & marks[:, 1:, None]
        labels = labels.masked_fill(unwanted, float("-inf"))[:, PROMPT - 1 :].softmax(-1)
    logits = model.lm_head(model(texts[:, :-1])[0][:, PROMPT - 1 :]).float()
    return -(labels * F.log_softmax(logits, -1)).sum(-1).mean()


def main() -> None:
    """Polish, log, export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=150, help="next-token updates before the rounds")
    parser.add_argument("--rounds", type=int, default=10, help="at most")
    parser.add_argument("--goal", type=float, default=0.08, help="share of repeated tokens to stop at")
    parser.add_argument("--texts", type=int, default=1536)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=4e-4)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED + 2)
    stream = np.load(args.ids)
    ids = torch.from_numpy(stream.view(np.int16)).to(device)
    heldout = torch.from_numpy(np.load(args.heldout).view(np.int16)).to(device)
    model = load_trainable(args.target, device)
    optimiser = Optimiser(model)
    rng, numbers = torch.Generator().manual_seed(SEED + 2), np.random.default_rng(SEED + 2)
    begin = time.monotonic()
    for step in range(args.steps):
        with torch.autocast(device, torch.bfloat16):
            loss = prompt_loss(model, ids, args.batch, args.length, rng)
        loss.backward()
        optimiser.step(schedule((step + 1) / (args.steps + 1), args.rate))
        if step % 25 == 0:
            print(f"step {step} {float(loss.detach()):.4f} {time.monotonic() - begin:.0f} s", flush=True)
    start = snapshot(model)
    log: list[tuple[int, float, float]] = []
    for index in range(args.rounds + 1):
        texts, marks, level = own_texts(model, stream, args.texts, numbers)
        with torch.autocast(device, torch.bfloat16):
            heldout_now = heldout_loss(model, heldout, args.length)
        log.append((index, level, heldout_now))
        seconds = time.monotonic() - begin
        print(f"round {index}: {100 * level:.1f} % repeat, held out {heldout_now:.4f}, {seconds:.0f} s", flush=True)
        if level < args.goal or index == args.rounds:
            break
        for text, mark in zip(texts.chunk(args.updates), marks.chunk(args.updates), strict=True):
            with torch.autocast(device, torch.bfloat16):
                loss = prompt_loss(model, ids, args.batch, args.length, rng) + own_loss(model, start, text, mark)
            loss.backward()
            optimiser.step(0.5 * args.rate)
    save_target(model, args.target)
    with args.log.open("w", newline="") as file:
        csv.writer(file).writerows([("round", "repeats", "heldout_loss"), *log])


if __name__ == "__main__":
    main()
