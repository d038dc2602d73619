"""Polish the target: teach it not to repeat itself, and nothing else.

Enters: the exported target and the encoded corpus. Leaves: the target, in place. First `--steps` of next-token
prediction on windows that start as prompts do, with [BOS]. Then rounds: the model writes fresh greedy texts and is
trained on them. Where a token completes a repeated n-gram the label is the starting model's distribution without that
token, elsewhere that distribution as it is. (Unlikelihood alone leaves the freed probability to any token, and the
model learns to tell its own text from real text by what they start with.) `--unlikelihood` adds that term to the
labels, which is stronger. Next-token prediction is part of every update.

The defaults are those of the first polish, on a GPU. README.md has the second one's, for a CPU: a few small updates of
AdamW after the drafter was trained, so that the drafter still knows its target.
"""

from __future__ import annotations

import argparse
import csv
import time
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from corpus import SEED
from evaluate import GRAM, repetition
from export import load_trainable, save_target
from generate import generate, windows
from model import Target
from optim import Optimiser, schedule
from tokenizer import BOS
from torch import Tensor
from train_target import heldout_loss, sample

PROMPT = 64  # tokens of a greedy text's prompt


def mixed(device: str) -> AbstractContextManager[None]:
    """bf16 autocast on a GPU; fp32 on a CPU."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def repeated(rows: Tensor) -> Tensor:
    """Which tokens of rows [B, S] after the prompt complete an n-gram that stands earlier in the row (bool [B, S])."""
    grams = rows.unfold(1, GRAM, 1)
    key = torch.zeros_like(grams[..., 0])
    for index in range(GRAM):
        key = key * 1_000_003 + grams[..., index]
    same = key.unsqueeze(2) == key.unsqueeze(1)
    earlier = torch.ones(same.shape[1:], dtype=torch.bool, device=rows.device).tril(-1)
    found = F.pad((same & earlier).any(-1), (GRAM - 1, 0))
    found[:, :PROMPT] = False
    return found


def snapshot(model: Target) -> Target:
    """A frozen copy of the model, as its checkpoint would be read; it computes in fp32 on a CPU."""
    device = model.norm.weight.device
    frozen = Target(model.c).to(device)
    frozen.load_state_dict(model.state_dict())
    return frozen.freeze(torch.bfloat16 if device.type == "cuda" else torch.float32)


def own_texts(
    model: Target, stream: np.ndarray, count: int, new: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Greedy texts [count, PROMPT + new] and which of their tokens are repeated."""
    frozen = snapshot(model)
    device = frozen.norm.weight.device
    prompts = windows(stream, count, PROMPT, rng).to(device)
    texts = generate(frozen, prompts, new, torch.zeros(count, device=device))
    return texts, torch.cat([repeated(chunk) for chunk in texts.split(256)])


def prompt_loss(model: Target, ids: Tensor, batch: int, length: int, rng: torch.Generator) -> Tensor:
    """Cross entropy of windows whose first token is [BOS]."""
    rows = sample(ids, batch, length, rng)
    rows[:, 0] = BOS
    return F.cross_entropy(model.lm_head(model(rows[:, :-1])[0]).flatten(0, 1).float(), rows[:, 1:].flatten())


def own_loss(model: Target, start: Target, texts: Tensor, marks: Tensor, unlikelihood: float) -> Tensor:
    """Cross entropy after the prompt against the starting model's distribution without the marked tokens, and
    `unlikelihood` times the marked tokens' mean of -log(1 - p)."""
    with torch.no_grad(), torch.autocast(texts.device.type, enabled=False):
        labels = start.lm_head(start(texts[:, :-1])[0]).float()
        unwanted = F.one_hot(texts[:, 1:], labels.shape[-1]).bool() & marks[:, 1:, None]
        labels = labels.masked_fill(unwanted, float("-inf"))[:, PROMPT - 1 :].softmax(-1)
    logs = F.log_softmax(model.lm_head(model(texts[:, :-1])[0][:, PROMPT - 1 :]).float(), -1)
    chosen = logs.gather(-1, texts[:, PROMPT:, None]).squeeze(-1).exp()
    penalty = -torch.log1p(-chosen.clamp(max=0.999)) * marks[:, PROMPT:]
    return -(labels * logs).sum(-1).mean() + unlikelihood * penalty.mean()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, help="encoded held-out files; without them no held-out loss")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=500, help="next-token updates before the rounds")
    parser.add_argument("--rounds", type=int, default=6, help="at most")
    parser.add_argument("--goal", type=float, default=0.08, help="share of repeated tokens to stop at")
    parser.add_argument("--texts", type=int, default=1536, help="greedy texts a round")
    parser.add_argument("--new", type=int, default=192, help="tokens that each text adds to its prompt")
    parser.add_argument("--updates", type=int, default=12, help="updates a round; each takes its share of the texts")
    parser.add_argument("--batch", type=int, default=8, help="windows of a next-token update")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a window")
    parser.add_argument("--rate", type=float, default=6e-4, help="peak of the next-token updates; rounds take half")
    parser.add_argument("--adam", action="store_true", help="AdamW for every tensor instead of Muon and AdamW")
    parser.add_argument("--unlikelihood", type=float, default=0.0, help="weight of the repeated tokens' unlikelihood")
    return parser.parse_args()


def main() -> None:
    """Polish, log, export."""
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED + 2)
    stream = np.load(args.ids)
    ids = torch.from_numpy(stream.view(np.int16)).to(device)
    heldout = torch.from_numpy(np.load(args.heldout).view(np.int16)).to(device) if args.heldout else None
    model = load_trainable(args.target, device)
    optimiser = Optimiser(model, muon=not args.adam)
    rng, numbers = torch.Generator().manual_seed(SEED + 2), np.random.default_rng(SEED + 2)
    begin = time.monotonic()
    for step in range(args.steps):
        with mixed(device):
            loss = prompt_loss(model, ids, args.batch, args.length, rng)
        loss.backward()
        optimiser.step(schedule((step + 1) / (args.steps + 1), args.rate))
        if step % 25 == 0:
            print(f"step {step} {float(loss.detach()):.4f} {time.monotonic() - begin:.0f} s", flush=True)
    start = snapshot(model)
    log: list[tuple[object, ...]] = []
    for index in range(args.rounds + 1):
        texts, marks = own_texts(model, stream, args.texts, args.new, numbers)
        level = float(marks[:, PROMPT + GRAM :].float().mean())
        inside = sum(repetition(text) for text in texts[:, PROMPT:].tolist()) / args.texts
        with mixed(device):
            heldout_now = "" if heldout is None else round(heldout_loss(model, heldout, args.length), 4)
        log.append((index, round(level, 4), round(inside, 4), heldout_now))
        print(f"round, repeats, inside, held out: {log[-1]}, {time.monotonic() - begin:.0f} s", flush=True)
        if level < args.goal or index == args.rounds:
            break
        for text, mark in zip(texts.chunk(args.updates), marks.chunk(args.updates), strict=True):
            with mixed(device):
                own = own_loss(model, start, text, mark, args.unlikelihood)
                loss = own + prompt_loss(model, ids, args.batch, args.length, rng)
            loss.backward()
            optimiser.step(0.5 * args.rate)
    save_target(model, args.target)
    with args.log.open("w", newline="") as file:
        csv.writer(file).writerows([("round", "repeats", "inside", "heldout_loss"), *log])


if __name__ == "__main__":
    main()
