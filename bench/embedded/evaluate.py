"""Measure the pair: tokens a round of DDTree and of the chain, and how much the target repeats itself.

Speculation never changes what the target emits, so a text is written first and the rounds are replayed along it: at a
round's root the drafter sees the features of everything before it, the tree is the best-first tree over its per-depth
log-probabilities, and the round takes the longest prefix of the text that is a path in the tree, plus the bonus
token.
"""

from __future__ import annotations

import argparse
import heapq
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import SEED
from export import load_drafter, load_target
from generate import generate
from model import Drafter, Target
from tokenizer import BOS, MASK
from tokenizers import Tokenizer
from torch import Tensor

BUDGETS = (7, 15, 31, 63)
GRAM = 8


def tree(logs: list[list[float]], budget: int) -> list[tuple[int, ...]]:
    """DDTree's heap: the `budget` most probable rank tuples under per-depth log-probabilities sorted falling."""
    heap: list[tuple[float, tuple[int, ...]]] = [(-logs[0][0], (0,))]
    nodes: list[tuple[int, ...]] = []
    while heap and len(nodes) < budget:
        cost, ranks = heapq.heappop(heap)
        nodes.append(ranks)
        depth, last = len(ranks) - 1, ranks[-1]
        if last + 1 < len(logs[depth]):
            heapq.heappush(heap, (cost + logs[depth][last] - logs[depth][last + 1], (*ranks[:-1], last + 1)))
        if depth + 1 < len(logs):
            heapq.heappush(heap, (cost - logs[depth + 1][0], (*ranks, 0)))
    return nodes


@torch.no_grad()
def drafts(target: Target, drafter: Drafter, text: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Top log-probabilities and tokens [N, K - 1, top] of the blocks at `anchors` [N] along text [S]."""
    size = drafter.c.block_size
    _, features = target(text.unsqueeze(0), drafter.c.target_layer_ids)
    blocks = torch.full((len(anchors), size), MASK, dtype=torch.long, device=text.device)
    blocks[:, 0] = text[anchors]
    out = drafter(target.embed_tokens(blocks.view(1, -1)), features, anchors.unsqueeze(0))
    logits = target.lm_head(out.view(len(anchors), size, -1)[:, 1:]).float()
    top = F.log_softmax(logits, -1).topk(max(BUDGETS), -1)
    return top.values.cpu(), top.indices.cpu()


def rounds(
    text: list[int], prompt: int, logs: list[list[list[float]]], tokens: list[list[list[int]]], budget: int
) -> list[int]:
    """Tokens that each round adds; budget 0 is the chain. Row i belongs to the root at prompt + i."""
    added: list[int] = []
    root, depth = prompt, len(logs[0])
    while root + depth + 1 < len(text):
        row = tokens[root - prompt]
        nodes = set(tree(logs[root - prompt], budget)) if budget else {(0,) * d for d in range(1, depth + 1)}
        ranks: tuple[int, ...] = ()
        for d in range(depth):
            if text[root + 1 + d] not in row[d]:
                break
            longer = (*ranks, row[d].index(text[root + 1 + d]))
            if longer not in nodes:
                break
            ranks = longer
        added.append(len(ranks) + 1)
        root += len(ranks) + 1
    return added


def repetition(text: list[int]) -> float:
    """1 - distinct / total over the n-grams of GRAM tokens."""
    grams = [tuple(text[i : i + GRAM]) for i in range(len(text) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams)


def measure(
    target: Target, drafter: Drafter, prompts: list[list[int]], new: int, heat: float, device: str
) -> dict[str, object]:
    """Figures at one temperature, and the texts."""
    totals = {budget: [0, 0] for budget in (0, *BUDGETS)}
    repeats, texts = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        text = generate(target, ids, new, torch.full((1,), heat, device=device))[0]
        texts.append(text.tolist())
        repeats.append(repetition(texts[-1][len(prompt) :]))
        anchors = torch.arange(len(prompt), len(text) - drafter.c.block_size, device=device)
        logs, tokens = (x.tolist() for x in drafts(target, drafter, text, anchors))
        for budget, total in totals.items():
            added = rounds(texts[-1], len(prompt), logs, tokens, budget)
            total[0] += sum(added)
            total[1] += len(added)
    per_round = {("chain" if b == 0 else str(b)): round(t / max(n, 1), 3) for b, (t, n) in totals.items()}
    return {"tokens_per_round": per_round, "repeated_8grams": round(sum(repeats) / len(repeats), 4), "texts": texts}


def main() -> None:
    """Print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, default=Path(__file__).parent / "heldout.json")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--new", type=int, default=192)
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 0.8])
    parser.add_argument("--show", type=int, default=2, help="texts to print at each temperature")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    tokenizer = Tokenizer.from_file(str(args.assets / "target" / "tokenizer.json"))
    target = load_target(args.assets / "target", device, torch.bfloat16)
    drafter = load_drafter(args.assets / "drafter", device, torch.bfloat16)
    entries = json.loads(args.heldout.read_text())[: args.limit]
    prompts = [[BOS, *tokenizer.encode(e["prompt"], add_special_tokens=False).ids] for e in entries]
    report = {}
    for heat in args.temperatures:
        figures = measure(target, drafter, prompts, args.new, heat, device)
        for text, prompt in list(zip(figures.pop("texts"), prompts, strict=True))[: args.show]:
            print(
                "-" * 40,
                f"T={heat}\n",
                tokenizer.decode(text[: len(prompt)]),
                "\n>>>",
                tokenizer.decode(text[len(prompt) :]),
            )
        report[f"T={heat}"] = figures
        print(heat, figures, flush=True)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
