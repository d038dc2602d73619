"""The tree is the best prefixes in order: against enumeration, and against growth depth by depth, which has no heap.

Both oracles are written from the papers' description: a node is a tuple of ranks, its score the sum of its depths'
log-probs, and the tree of budget B is the B nodes of the highest scores, ties by rank tuple.
"""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planted import Ranks, ranked_prefixes

from ddtree_compile.ir.ops.attention import ancestors
from ddtree_compile.ir.ops.tree import best_first, best_prefixes, top_log_probs


def enumerated(log_probs: np.ndarray, budget: int) -> list[Ranks]:
    """Every prefix there is, sorted."""
    depths, candidates = log_probs.shape
    scored = []
    for depth in range(1, depths + 1):
        for ranks in product(range(candidates), repeat=depth):
            score = np.float32(0)
            for at, rank in enumerate(ranks):
                score = np.float32(score + log_probs[at, rank])
            scored.append((-float(score), ranks))
    return [ranks for _, ranks in sorted(scored)[:budget]]


def distribution(rng: np.random.Generator, depths: int, candidates: int) -> np.ndarray:
    """Falling log-probs, one time in two coarse ones that tie within and across depths, some of them 0."""
    spread = rng.choice([0.1, 1.0, 4.0])
    logits = rng.normal(0, spread, (depths, candidates + int(rng.integers(0, 4))))
    if rng.random() < 0.5:
        return -np.sort(rng.integers(0, rng.choice([2, 4, 9]), (depths, candidates)), axis=1).astype(np.float32) / 4
    table = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return np.minimum(-np.sort(-table, axis=1)[:, :candidates], 0).astype(np.float32)


def test_small_trees_are_what_enumeration_gives():
    rng = np.random.default_rng(0)
    for _ in range(1500):
        depths, candidates = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        table = distribution(rng, depths, candidates)
        total = sum(candidates**depth for depth in range(1, depths + 1))
        budget = int(rng.integers(1, total + 3))  # beyond a depth's candidates, and beyond all there are
        expected = enumerated(table, budget)
        assert best_prefixes(table, budget, spine=False, chain=False) == expected
        assert ranked_prefixes(table, budget) == expected


@pytest.mark.parametrize("spine", [False, True])
def test_large_trees_are_what_growth_by_depth_gives(spine):
    rng = np.random.default_rng(1 + spine)
    for _ in range(200):
        depths, candidates = int(rng.integers(1, 16)), int(rng.integers(1, 24))
        table = distribution(rng, depths, candidates)
        total = sum(candidates**depth for depth in range(1, depths + 1))
        budget = min(int(rng.integers(1, 80)), total)
        assert best_prefixes(table, budget, spine, False) == ranked_prefixes(table, budget, spine=spine)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("spine", [False, True])
def test_trees_in_full(spine):
    rng = np.random.default_rng(11 + spine)
    for _ in range(1000):
        table = distribution(rng, int(rng.integers(1, 16)), int(rng.integers(1, 40)))
        budget = int(rng.integers(1, 128))
        assert best_prefixes(table, budget, spine, False) == ranked_prefixes(table, budget, spine=spine)


def test_a_budget_of_one_is_the_likeliest_first_token():
    rng = np.random.default_rng(2)
    for _ in range(50):
        table = distribution(rng, 5, 7)
        for spine, chain in product([False, True], repeat=2):
            assert best_prefixes(table, 1, spine, chain) == [(0,)]


def test_all_equal_is_lexicographic():
    table = np.full((3, 2), -0.5, np.float32)
    assert best_prefixes(table, 6, False, False) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    assert best_prefixes(np.zeros((2, 2), np.float32), 6, False, False) == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]


def test_impossible_candidates_still_have_an_order():
    """A vocabulary padded with -inf logits gives log-probs of -inf; they come last and the list stays full."""
    table = np.array([[-0.5, -np.inf], [-0.25, -np.inf]], np.float32)
    expected = [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]
    assert best_prefixes(table, 6, False, False) == enumerated(table, 6) == expected


@given(st.data())
@settings(max_examples=40)
def test_nodes_parents_bits_and_scores(data):
    sequences = data.draw(st.integers(1, 3))
    horizon, candidates = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    budget = data.draw(st.integers(1, 70))
    spine, chain = data.draw(st.booleans()), data.draw(st.booleans())
    active = data.draw(st.lists(st.integers(0, 1), min_size=sequences, max_size=sequences))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    tables = [distribution(rng, horizon, candidates) for _ in active]
    log_probs = torch.from_numpy(np.concatenate(tables))
    ids = torch.stack([torch.randperm(50)[:candidates] for _ in range(sequences * horizon)]).int()
    root = torch.randint(50, (sequences,), dtype=torch.int32)
    tokens, parents, depths, bits, scores = best_first(
        log_probs, ids, root, torch.tensor(active), budget=budget, spine=spine, chain=chain
    )
    for s, table in enumerate(tables):
        nodes = [(), *ranked_prefixes(table, budget, spine=spine, chain=chain)] if active[s] else []
        for node, ranks in enumerate(nodes):
            at = s * horizon + len(ranks) - 1
            assert tokens[s, node] == (ids[at, ranks[-1]] if ranks else root[s])
            assert parents[s, node] == (nodes.index(ranks[:-1]) if ranks else -1)
            assert depths[s, node] == len(ranks)
            assert ancestors(bits[s, node]) == sorted(nodes.index(ranks[:i]) for i in range(len(ranks) + 1))
            score = np.float32(0)
            for depth, rank in enumerate(ranks):
                score = np.float32(score + table[depth, rank])
            assert float(scores[s, node]) == float(score)
        absent = slice(len(nodes), None)
        assert (parents[s, absent] == -1).all()
        assert not bits[s, absent].any()
        assert (scores[s, absent] == -torch.inf).all()


@pytest.mark.parametrize("vocabulary", [1, 3, 97, 1000])
def test_candidates_of_a_depth(vocabulary):
    """Against a sort of all log-probs in float64; ties go to the lower id."""
    logits = torch.randn(6, vocabulary) * 4
    logits[0] = logits[0].round()
    logits[1] = 2.5
    for k in {1, min(7, vocabulary), vocabulary}:
        values, ids = top_log_probs(logits, k=k)
        exact = logits.double().log_softmax(1)
        for row in range(6):
            order = sorted(range(vocabulary), key=lambda token: (-float(logits[row, token]), token))[:k]
            assert ids[row].tolist() == order
            assert torch.allclose(values[row].double(), exact[row, order], atol=1e-5)
            assert (values[row].diff() <= 0).all()
            assert (values[row] <= 0).all()
