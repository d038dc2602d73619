"""Planted drafters: what a random drafter never does, guess right, at drawn depths and ranks among decoys.

`Planted` wraps an executor: before a tree is grown it overwrites the drafter's candidates, so that the target's own
continuation lies where a goal wants it, and checks afterwards that the round accepted what an oracle of the tree says.
`Coverage` counts what occurred.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ddtree_compile.runtime.cpu import CpuExecutor

Ranks = tuple[int, ...]


def ranked_prefixes(log_probs: np.ndarray, budget: int, *, spine: bool = False, chain: bool = False) -> list[Ranks]:
    """The best `budget` prefixes without a heap: the best of each depth grown from the best of the one before, and all
    of them sorted by (score falling, rank tuple). A node among the best B has no ancestor outside the best B."""
    depths, candidates = log_probs.shape
    top: list[Ranks] = [(0,) * depth for depth in range(1, depths + 1)]
    if chain:
        return top[:budget]
    wanted = budget + depths * spine
    level: list[tuple[float, Ranks]] = [(0.0, ())]
    every: list[tuple[float, Ranks]] = []
    for depth in range(depths):
        grown = [
            (-float(np.float32(np.float32(-score) + log_probs[depth, rank])), (*ranks, rank))
            for score, ranks in level
            for rank in range(candidates)
        ]
        level = sorted(grown)[:wanted]
        every += level
    order = [ranks for _, ranks in sorted(every)]
    if not spine:
        return order[:budget]
    return (top[:budget] + [ranks for ranks in order if any(ranks)])[:budget]


@dataclass(frozen=True)
class Goal:
    """Accept `accepted` nodes, all of rank 0 but that of depth `depth` (from 1), which has rank `rank`."""

    accepted: int
    depth: int = 0
    rank: int = 0

    def log_probs(self, horizon: int, candidates: int, rng: random.Random) -> np.ndarray:
        """Candidates of which those up to the goal's ranks are near certain and all others far away, fp32 [L, K]."""
        table = np.empty((horizon, candidates), np.float32)
        for depth in range(1, horizon + 1):
            near = (self.rank if depth == self.depth else 0) + 1 if depth <= self.accepted else 0
            far = candidates - near
            row = sorted((-0.05 * rng.random() for _ in range(near)), reverse=True)
            table[depth - 1] = row + sorted((-12 - 8 * rng.random() for _ in range(far)), reverse=True)
        return table

    def ranks(self) -> Ranks:
        return tuple(self.rank if depth == self.depth else 0 for depth in range(1, self.accepted + 1))


@lru_cache
def goals(horizon: int, candidates: int, bucket: int, *, spine: bool, chain: bool) -> tuple[Goal, ...]:
    """Every goal that a bucket's tree can hold."""
    rng = random.Random(0)
    every = [Goal(0)] + [
        Goal(accepted, depth, rank)
        for accepted in range(1, horizon + 1)
        for depth in range(1, accepted + 1)
        for rank in range(0 if depth == 1 else 1, candidates)
        if (depth - 1) + (rank + 1) * (accepted - depth + 1) <= bucket
    ]
    return tuple(
        goal
        for goal in every
        if not goal.accepted
        or goal.ranks() in ranked_prefixes(goal.log_probs(horizon, candidates, rng), bucket, spine=spine, chain=chain)
    )


@dataclass
class Coverage:
    """How often each (bucket, shape) accepted a length, and took a child of a rank."""

    accepted: Counter[tuple[int, str, int]] = field(default_factory=Counter)
    ranks: Counter[tuple[int, str, int]] = field(default_factory=Counter)
    rounds: int = 0

    def lacking(self, bucket: int, shape: str, wanted: Sequence[Goal]) -> list[Goal]:
        """The goals whose accepted length, or whose rank, has not occurred yet."""
        return [
            goal
            for goal in wanted
            if not self.accepted[bucket, shape, goal.accepted]
            or (goal.accepted and not self.ranks[bucket, shape, goal.rank])
        ]

    def __str__(self) -> str:
        lines = [f"{self.rounds} planted rounds"]
        for bucket, shape in sorted({key[:2] for key in self.accepted}):
            for name, counts in (("accepted", self.accepted), ("rank", self.ranks)):
                seen = {key[2]: n for key, n in sorted(counts.items()) if key[:2] == (bucket, shape)}
                lines.append(f"  {shape} {bucket:3d} {name:8s} " + " ".join(f"{k}:{n}" for k, n in seen.items()))
        return "\n".join(lines)


@dataclass
class Planted:
    """An executor that plants. `truths`: the whole continuation (prompt, then new tokens) of the request of each seed.

    The tree is grown only when the bucket is known, since what to plant depends on it.
    """

    inner: CpuExecutor
    truths: Mapping[int, Sequence[int]]
    rng: random.Random
    coverage: Coverage = field(default_factory=Coverage)
    wild: float = 0.25  # of all rounds: any distribution, the truth at any rank
    _shape: str = ""
    _expected: dict[int, tuple[int, Ranks, bool]] = field(default_factory=dict)
    _bucket: int = 0

    def write(self, name: str, values: Any, at: int = 0) -> None:
        self.inner.write(name, values, at)

    def read(self, name: str) -> torch.Tensor:
        return self.inner.read(name)

    def close(self) -> None:
        self.inner.close()

    def run(self, segment: str) -> None:
        if segment in ("tree", "chain"):
            self._shape = segment
            return
        if segment.startswith("verify"):
            self._bucket = int(segment[7:-1])
            self._plant()
            self.inner.run(self._shape)
        self.inner.run(segment)
        if segment == "commit":
            self._check()

    @property
    def spine(self) -> bool:
        return bool(self.inner.plan.spec["tree"]["keep_top1_chain"])

    def wanted(self, bucket: int, shape: str) -> tuple[Goal, ...]:
        """All goals of a bucket."""
        horizon, candidates = self._sizes()
        return goals(horizon, candidates, bucket, spine=self.spine and shape == "tree", chain=shape == "chain")

    def _sizes(self) -> tuple[int, int]:
        rows, candidates = self.read("draft.lp").shape
        return rows // len(self.read("length")), candidates

    def _plant(self) -> None:
        horizon, candidates = self._sizes()
        log_probs, ids = self.read("draft.lp"), self.read("draft.ids")
        self._expected = {}
        for s, (active, length, seed) in enumerate(
            zip(*(self.read(name).tolist() for name in ("active", "length", "seed")), strict=True)
        ):
            if not active:
                continue
            truth = list(self.truths[seed][length + 1 : length + 1 + horizon])
            own, ranks = self._draw(horizon, candidates)
            names = self._names(truth, ranks, horizon, candidates)
            at = slice(s * horizon, (s + 1) * horizon)
            log_probs[at], ids[at] = torch.from_numpy(own), torch.tensor(names, dtype=torch.int32)
            self._expected[s] = self._oracle(s, own, names, self.truths[seed], length)
        self.write("draft.lp", log_probs)
        self.write("draft.ids", ids)

    def _draw(self, horizon: int, candidates: int) -> tuple[np.ndarray, list[int]]:
        """Log-probs, and the rank of the truth at each depth (-1: not among the candidates)."""
        if self.rng.random() < self.wild:
            logits = torch.tensor([[self.rng.gauss(0, 3) for _ in range(candidates + 8)] for _ in range(horizon)])
            best = logits.log_softmax(1).sort(dim=1, descending=True).values[:, :candidates]
            return best.numpy(), [min(int(self.rng.expovariate(0.7)), candidates - 1) for _ in range(horizon)]
        wanted = self.wanted(self._bucket, self._shape)
        goal = self.rng.choice(self.coverage.lacking(self._bucket, self._shape, wanted) or wanted)
        after = [self.rng.randrange(candidates) for _ in range(horizon - goal.accepted - 1)]
        ranks = [*goal.ranks(), *[-1] * (goal.accepted < horizon), *after]
        return goal.log_probs(horizon, candidates, self.rng), ranks

    def _names(self, truth: list[int], ranks: list[int], horizon: int, candidates: int) -> list[list[int]]:
        vocab = int(self.inner.plan.model["vocab"])
        rows = []
        for depth in range(horizon):
            right = truth[depth] if depth < len(truth) else -1
            decoys = self.rng.sample([token for token in range(vocab) if token != right], candidates)
            if right >= 0 and ranks[depth] >= 0:
                decoys[ranks[depth]] = right
            rows.append(decoys)
        return rows

    def _oracle(
        self, s: int, log_probs: np.ndarray, names: list[list[int]], truth: Sequence[int], length: int
    ) -> tuple[int, Ranks, bool]:
        """Rows that this round must accept, the ranks of its path, and whether only the tree ended it."""
        spine, chain = self.spine and self._shape == "tree", self._shape == "chain"
        nodes = set(ranked_prefixes(log_probs, self._bucket, spine=spine, chain=chain))
        path: Ranks = ()
        for depth, row in enumerate(names):
            after = length + 1 + depth
            if after >= len(truth) or truth[after] not in row or (*path, row.index(truth[after])) not in nodes:
                break
            path = (*path, row.index(truth[after]))
        stops = set(self.read("stops")[s].tolist())
        first_stop = next((i for i, token in enumerate(truth[length + 1 :]) if token in stops), len(truth))
        room = int(self.inner.plan.spec["cache"]["max_seq_len"]) - length - 1
        depth = min(len(path), first_stop, int(self.read("remaining")[s]) - 1, room)
        return 1 + depth, path[:depth], depth == len(path)

    def _check(self) -> None:
        accepted = self.read("accepted").tolist()
        for s, (rows, ranks, free) in self._expected.items():
            assert accepted[s] == rows, f"slot {s} accepted {accepted[s]} rows; the oracle's tree gives {rows}"
            self.coverage.rounds += 1
            self.coverage.accepted[self._bucket, self._shape, rows - 1] += free
            for rank in ranks:
                self.coverage.ranks[self._bucket, self._shape, rank] += 1
