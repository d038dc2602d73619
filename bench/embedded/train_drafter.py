"""Train the DFlash drafter on text that the target wrote.

Enters: the exported target. Leaves: the drafter in Hugging Face layout and its loss curve. The published recipe
scaled down: random anchors, blocks [anchor, MASK ...] that do not see each other, weights exp(-(k - 1) / gamma),
embedding and head frozen. A slot's label is the distribution its token was drawn from: softmax(target logits /
temperature), one-hot where greedy.
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
from export import load_target, save_drafter
from generate import generate, windows
from model import Drafter, DrafterConfig, Target
from optim import Optimiser, schedule
from safetensors.torch import load_file
from tokenizer import MASK
from torch import Tensor

LENGTH = 512  # tokens of a training text, prompt included
PROMPTS = (64, 128, 256)
TEMPERATURES = (0.0, 0.0, 0.8, 0.9)
GAMMA = 4.0  # for block 8, as published


def write_texts(
    target: Target, stream: np.ndarray, count: int, rows: int, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Texts [count, LENGTH] (int16), the length of each prompt and each text's temperature."""
    rng = np.random.default_rng(SEED + 1)
    texts, prompts, heats = [], [], []
    for index in range(-(-count // rows)):
        length = PROMPTS[index % len(PROMPTS)]
        heat = torch.tensor(TEMPERATURES, device=device).repeat(-(-rows // len(TEMPERATURES)))[:rows]
        heat = heat[torch.randperm(rows).to(device)]
        text = generate(target, windows(stream, rows, length, rng).to(device), LENGTH - length, heat)
        texts.append(text.to(torch.int16))
        prompts.append(torch.full((rows,), length, device=device))
        heats.append(heat)
    return torch.cat(texts), torch.cat(prompts), torch.cat(heats)


@torch.no_grad()
def teach(target: Target, ids: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The target's features [B, S, taps * D] and its final hidden states [B, S, D]."""
    hidden, features = target(ids, taps)
    assert features is not None
    return features, hidden


def drafter_loss(
    drafter: Drafter, target: Target, ids: Tensor, features: Tensor, hidden: Tensor, anchors: Tensor, heat: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy against the labels, and the share of greedy-text slots [K - 1] whose top token is right.

    ids [B, S], features [B, S, taps * D], hidden [B, S, D], anchors [B, N], heat [B].
    """
    size = drafter.c.block_size
    batch, count = anchors.shape
    blocks = torch.full((batch, count, size), MASK, dtype=torch.long, device=ids.device)
    blocks[..., 0] = ids.gather(1, anchors)
    embedded = target.embed_tokens(blocks.flatten(1)).float()
    out = drafter(embedded, features, anchors).unflatten(1, (count, size))[:, :, 1:]
    logs = F.log_softmax(F.linear(out, target.lm_head.weight).float(), -1)
    places = anchors.unsqueeze(-1) + torch.arange(
        1, size, device=ids.device
    )  # the label of place p comes from state p - 1
    tokens = ids.gather(1, places.flatten(1)).view_as(places)
    states = hidden.gather(1, (places.flatten(1) - 1).unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
    logits = F.linear(states, target.lm_head.weight).float().view_as(logs)
    soft = (logits / heat.clamp_min(0.1).view(-1, 1, 1, 1)).softmax(-1)
    soft_loss = -(soft * logs).sum(-1)
    hard_loss = -logs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    loss = torch.where(heat.view(-1, 1, 1) > 0, soft_loss, hard_loss)
    weight = torch.exp(-torch.arange(size - 1, device=ids.device) / GAMMA)
    greedy = (heat == 0).float().view(-1, 1, 1)
    right = ((logs.argmax(-1) == tokens).float() * greedy).sum((0, 1)) / (greedy.sum() * count).clamp_min(1)
    return (loss * weight).mean() / weight.mean(), right


def main() -> None:
    """Write texts, train, export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="drafter folder to start from")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, required=True, help="length of the training; its schedule follows the clock"
    )
    parser.add_argument("--steps", type=int, default=10**9, help="or this many steps, whichever comes first")
    parser.add_argument("--texts", type=int, default=40960)
    parser.add_argument("--rows", type=int, default=4096, help="texts written at once")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--rate", type=float, default=3e-3)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    target = load_target(args.target, device, torch.bfloat16)
    c = DrafterConfig()
    drafter = Drafter(c).to(device)
    if args.init:
        drafter.load_state_dict(load_file(args.init / "model.safetensors"))
    print(f"drafter: {sum(p.numel() for p in drafter.parameters()) / 1e6:.2f} M parameters", flush=True)
    begin = time.monotonic()
    texts, prompts, heats = write_texts(target, np.load(args.ids), args.texts, args.rows, device)
    print(f"{texts.numel() / 1e6:.1f} M tokens written in {time.monotonic() - begin:.0f} s", flush=True)

    optimiser = Optimiser(drafter)
    fast = device == "cuda"
    loss_of = torch.compile(drafter_loss) if fast else drafter_loss
    features_of = torch.compile(teach) if fast else teach
    log: list[tuple[object, ...]] = []
    begin, step, order = time.monotonic(), 0, torch.empty(0, dtype=torch.long)
    while True:
        progress = max((time.monotonic() - begin) / args.seconds, step / args.steps)
        if progress >= 1:
            break
        if len(order) < args.batch:
            order = torch.randperm(len(texts)).to(device)
        rows, order = order[: args.batch], order[args.batch :]
        ids, heat, prompt = texts[rows].long(), heats[rows], prompts[rows].unsqueeze(1)
        spread = torch.rand(len(rows), args.anchors, device=device) * (LENGTH - c.block_size - prompt + 1)
        features, hidden = features_of(target, ids, c.target_layer_ids)
        with torch.autocast(device, torch.bfloat16):
            loss, right = loss_of(drafter, target, ids, features, hidden, (prompt - 1 + spread).long(), heat)
        loss.backward()
        optimiser.step(schedule(progress, args.rate))
        step += 1
        if step == 1:
            begin = time.monotonic()  # the first step compiled
        if step % 50 == 0:
            loss = loss.detach()
            log.append((step, float(loss), time.monotonic() - begin, *(round(float(r), 4) for r in right)))
            if step % 500 == 0:
                shares = " ".join(f"{100 * float(r):.0f}" for r in right)
                print(
                    f"{step} {float(loss):.4f} right by depth {shares} % {time.monotonic() - begin:.0f} s", flush=True
                )
    print(f"{step} steps", flush=True)
    save_drafter(drafter, target.c, args.out)
    with args.log.open("w", newline="") as file:
        header = ("step", "loss", "seconds", *(f"right_{d}" for d in range(1, c.block_size)))
        csv.writer(file).writerows([header, *log])


if __name__ == "__main__":
    main()
