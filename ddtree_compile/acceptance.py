"""The acceptance prior: from per-depth hit probabilities to the tokens that a round of a bucket is expected to emit.

`hit[d][r]` is the probability that the drafter's rank-r candidate at depth d + 1 is the target's token, given that the
prefix is right. A prefix's probability is the product along it; every prefix of the node list is a tree, so a bucket
emits 1 + the sum of its nodes' probabilities (DDTree, arXiv 2604.12989, proposition 1).
"""

from __future__ import annotations

import math

import numpy as np

from ddtree_compile.ir.ops.tree import best_prefixes
from ddtree_compile.spec import CompileSpec


def expected_tokens(spec: CompileSpec, shape: str, nodes: int, horizon: int, vocabulary: int) -> float | None:
    """Tokens a round of `shape` ("plain", "chain" or "tree") with `nodes` nodes emits; None without a prior."""
    if shape == "plain":
        return 1.0
    if spec.acceptance is None:
        return None
    hit = spec.acceptance.hit[:horizon]
    width = min(spec.top_k(vocabulary), max(map(len, hit)))
    log_probs = np.full((len(hit), width), -np.inf, dtype=np.float32)
    for depth, row in enumerate(hit):
        for rank, probability in enumerate(row[:width]):
            if probability > 0:
                log_probs[depth, rank] = math.log(probability)
    prefixes = best_prefixes(log_probs, nodes, spec.tree.keep_top1_chain and shape == "tree", shape == "chain")
    return 1.0 + sum(_probability(hit, ranks) for ranks in prefixes)


def _probability(hit: tuple[tuple[float, ...], ...], ranks: tuple[int, ...]) -> float:
    """The product of the ranks' probabilities; a rank that the prior does not list has none."""
    product = 1.0
    for row, rank in zip(hit, ranks, strict=False):
        product *= row[rank] if rank < len(row) else 0.0
    return product
