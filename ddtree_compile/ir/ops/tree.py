"""From draft logits to a tree of the most probable prefixes (DDTree, arXiv 2604.12989).

Legend: S sequences, L horizon (draft depths), V vocabulary, K candidates a depth, B1 = budget + 1 nodes, W words.
"""

from __future__ import annotations

import heapq

import numpy as np
import torch
from torch import Tensor

from ddtree_compile.ir.graph import Op, TensorType
from ddtree_compile.ir.ops.record import OpRecord, table

Ranks = tuple[int, ...]


def top_log_probs(logits: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row's fp32 log-softmax, at temperature 1 whatever the sampling temperature is.

    logits [S * L, V]: log-probs fp32 [S * L, k], falling, and token ids int32; ties go to the lower id.
    """
    values = torch.empty(logits.shape[0], k)
    ids = torch.empty(logits.shape[0], k, dtype=torch.int32)
    for row, line in enumerate(logits.float()):
        best = (line >= line.topk(k).values[-1]).nonzero()[:, 0]
        order = line[best].sort(descending=True, stable=True).indices[:k]
        ids[row] = best[order].int()
        values[row] = line[best[order]] - line.logsumexp(0)
    return values, ids


def best_prefixes(log_probs: np.ndarray, budget: int, spine: bool, chain: bool) -> list[Ranks]:
    """The `budget` most probable non-empty prefixes, as tuples of ranks, best first.

    log_probs fp32 [L, K]. score(child) = score(parent) + log-prob(depth, rank) in fp32; ties go to the smaller tuple.
    Every prefix of the list is closed under parents. `spine` puts the top-1 chain first; `chain` takes nothing else.
    Fewer come back when there are no more.
    """
    depths, candidates = log_probs.shape
    top = [(0,) * depth for depth in range(1, depths + 1)]
    if chain:
        return top[:budget]
    found = top[:budget] if spine else []
    scores: dict[Ranks, np.float32] = {(): np.float32(0.0)}
    heap: list[tuple[np.float32, Ranks]] = []

    def push(ranks: Ranks) -> None:
        score = np.float32(scores[ranks[:-1]] + log_probs[len(ranks) - 1, ranks[-1]])
        scores[ranks] = score
        heapq.heappush(heap, (np.float32(-score), ranks))

    push((0,))
    while heap and len(found) < budget:
        _, ranks = heapq.heappop(heap)
        if not (spine and not any(ranks)):
            found.append(ranks)
        if ranks[-1] + 1 < candidates:
            push((*ranks[:-1], ranks[-1] + 1))
        if len(ranks) < depths:
            push((*ranks, 0))
    return found


def best_first(
    log_probs: Tensor, ids: Tensor, root: Tensor, active: Tensor, *, budget: int, spine: bool, chain: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The tree of each active sequence. log_probs, ids [S * L, K], root, active [S].

    tokens, parents, depths int32 [S, B1] (node 0 is the root, its parent -1; parents precede children), ancestor bits
    int32 [S, B1, W] (lowest bit first, a node's own set), scores fp32 [S, B1] (log-probability of the prefix).
    A node that does not exist has parent -1, no bits and score -inf.
    """
    sequences = root.shape[0]
    horizon = log_probs.shape[0] // sequences
    nodes = budget + 1
    tokens = torch.zeros(sequences, nodes, dtype=torch.int32)
    parents = torch.full((sequences, nodes), -1, dtype=torch.int32)
    depths = torch.zeros(sequences, nodes, dtype=torch.int32)
    bits = np.zeros((sequences, nodes, -(-nodes // 32)), dtype=np.uint32)
    scores = torch.full((sequences, nodes), -torch.inf)
    for s in range(sequences):
        if not active[s]:
            continue
        own = slice(s * horizon, (s + 1) * horizon)
        table_of, names = log_probs[own].numpy(), ids[own].tolist()
        index: dict[Ranks, int] = {(): 0}
        tokens[s, 0], scores[s, 0], bits[s, 0, 0] = root[s], 0.0, 1
        for node, ranks in enumerate(best_prefixes(table_of, budget, spine, chain), start=1):
            index[ranks] = node
            parent, depth = index[ranks[:-1]], len(ranks)
            tokens[s, node] = names[depth - 1][ranks[-1]]
            parents[s, node], depths[s, node] = parent, depth
            scores[s, node] = scores[s, parent] + log_probs[s * horizon + depth - 1, ranks[-1]]
            bits[s, node] = bits[s, parent]
            bits[s, node, node // 32] |= np.uint32(1 << node % 32)
    return tokens, parents, depths, torch.from_numpy(bits.view(np.int32)), scores


def _top_shape(op: Op) -> tuple[TensorType, ...]:
    k = op.attr("k")
    assert isinstance(k, int)
    shape = (op.args[0].shape[0], k)
    return TensorType(shape, "f32"), TensorType(shape, "i32")


def _tree_shape(op: Op) -> tuple[TensorType, ...]:
    budget = op.attr("budget")
    assert isinstance(budget, int)
    flat = (op.args[2].shape[0], budget + 1)
    integers = TensorType(flat, "i32")
    return (
        integers, integers, integers, TensorType((*flat, -(-flat[1] // 32)), "i32"), TensorType(flat, "f32"),
    )  # fmt: skip


TREE = table(
    OpRecord("top_log_probs", top_log_probs, _top_shape, tolerance=1e-5),
    OpRecord("best_first", best_first, _tree_shape, tolerance=0.0),
)
