"""Pretrain the target on the encoded corpus: next-token prediction with the INT4 experts in the loop.

Enters: ids (uint16 .npy of tokenizer.py). Leaves: the target in Hugging Face layout and its loss curve. polish.py
comes next.
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
from export import save_target
from model import Target, TargetConfig
from optim import Optimiser, schedule
from torch import Tensor

BALANCE_RATE = 1e-3
BALANCE_UNTIL = 0.9  # share of the run after which the routers' biases stand still


def sample(ids: Tensor, batch: int, length: int, rng: torch.Generator) -> Tensor:
    """Random windows [batch, length + 1]."""
    starts = torch.randint(len(ids) - length - 1, (batch, 1), generator=rng).to(ids.device)
    return ids[starts + torch.arange(length + 1, device=ids.device)].long()


def next_token_loss(model: Target, rows: Tensor) -> Tensor:
    """Cross entropy of rows [B, S + 1] in nats a token."""
    hidden, _ = model(rows[:, :-1])
    return F.cross_entropy(model.lm_head(hidden).flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def heldout_loss(model: Target, ids: Tensor, length: int) -> float:
    """Cross entropy over 131,072 tokens of the held-out stream."""
    rows = ids[: len(ids) // (length + 1) * (length + 1)].view(-1, length + 1).long()[: 131072 // length]
    losses = [float(next_token_loss(model, chunk)) for chunk in rows.split(8)]
    return sum(losses) / len(losses)


def main() -> None:
    """Train, log, export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, required=True, help="encoded held-out files")
    parser.add_argument("--out", type=Path, required=True, help="model folder; must hold the tokenizer already")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="the learning rate's schedule follows the clock")
    parser.add_argument("--steps", type=int, default=10**9, help="or this many steps, whichever comes first")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=3e-3)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    ids = torch.from_numpy(np.load(args.ids).view(np.int16)).to(device)
    heldout = torch.from_numpy(np.load(args.heldout).view(np.int16)).to(device)
    model = Target(TargetConfig()).to(device)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.2f} M parameters, {len(ids) / 1e6:.1f} M tokens", flush=True)
    optimiser = Optimiser(model)
    rng = torch.Generator().manual_seed(SEED)
    loss_of = torch.compile(next_token_loss) if device == "cuda" else next_token_loss
    log: list[tuple[str, int, float, float]] = []
    begin, step = time.monotonic(), 0
    while True:
        progress = max((time.monotonic() - begin) / args.seconds, step / args.steps)
        if progress >= 1:
            break
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(model, sample(ids, args.batch, args.length, rng))
        loss.backward()
        optimiser.step(schedule(progress, args.rate))
        model.balance(BALANCE_RATE if progress < BALANCE_UNTIL else 0.0)
        step += 1
        if step == 1:
            begin = time.monotonic()  # the first step compiled
        if step % 50 == 0:
            log.append(("train", step, float(loss.detach()), time.monotonic() - begin))
            if step % 500 == 0:
                print(f"{step} {log[-1][2]:.4f} {log[-1][3]:.0f} s", flush=True)
    model.eval()
    with torch.autocast(device, torch.bfloat16):
        log.append(("heldout", step, heldout_loss(model, heldout, args.length), time.monotonic() - begin))
    print(f"{step} steps; held out {log[-1][2]:.4f}")
    save_target(model, args.out)
    with args.log.open("w", newline="") as file:
        csv.writer(file).writerows([("series", "step", "value", "seconds"), *log])


if __name__ == "__main__":
    main()
