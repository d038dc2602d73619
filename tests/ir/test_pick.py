"""Draws have the right distribution (chi-square), filters keep the right sets, and only (seed, position, token) count.

The filtered distribution is computed here in float64 from the sorted probabilities; transformers' logits processors
are the oracle from outside.
"""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.lab import SAMPLINGS, one_thread
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ddtree_compile.ir.ops.pick import NUCLEUS_TOP_K, candidates, gumbel, pick_filter, pick_greedy, pick_sample

V = 23
MIN_P_VALUE = 1e-4  # seeds are fixed: a run that passes once passes always


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def filtered(
    logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """The probability of each token, float64."""
    p = (logits.double() / temperature).softmax(0)
    order = sorted(range(len(p)), key=lambda token: (-float(p[token]), token))
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        total, mass, kept = float(p[order].sum()), 0.0, []
        for token in order:
            if mass >= top_p:
                break
            kept.append(token)
            mass += float(p[token]) / total
        order = kept
    if min_p:
        order = [token for token in order if float(p[token]) >= min_p * float(p[order[0]])]
    out = torch.zeros_like(p)
    out[order] = p[order] / p[order].sum()
    return out


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """The p-value of counts against expected counts; cells that expect fewer than 5 are joined."""
    large = expected >= 5
    observed, wanted = counts[large].double(), expected[large]
    if not large.all():
        observed = torch.cat([observed, counts[~large].sum()[None].double()])
        wanted = torch.cat([wanted, expected[~large].sum()[None]])
        observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2)) if len(wanted) > 1 else 1.0


def picks(logits: torch.Tensor, rows: int, *, seed: int = 0, first: int = 0, **own: float) -> torch.Tensor:
    """Draws of one distribution at `rows` positions."""
    sequence, position = torch.zeros(rows, dtype=torch.int32), torch.arange(first, first + rows, dtype=torch.int32)
    every = logits.expand(rows, -1)
    heat, key = torch.tensor([own.get("temperature", 0.0)]), torch.tensor([seed])
    if set(own) <= {"temperature"}:
        return pick_sample(every, sequence, position, heat, key)
    filters = (torch.tensor([own.get(name, none)]) for name, none in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)))
    return pick_filter(every, sequence, position, heat, key, *filters)


@pytest.mark.parametrize("draws", [1500, pytest.param(20_000, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("sampling", [name for name in SAMPLINGS if name != "greedy"])
def test_draws_follow_softmax(sampling, draws, capsys):
    own = {**SAMPLINGS[sampling]}
    if own.get("top_k", 0) > V:
        own["top_k"] = 15
    logits = torch.randn(V) * 2
    by_position = picks(logits, draws, seed=5, **own).long().bincount(minlength=V)
    by_seed = torch.stack([picks(logits, 1, seed=seed, first=77, **own) for seed in range(draws // 3)])
    expected = filtered(logits, **own)
    values = []
    for counts in (by_position, by_seed.flatten().long().bincount(minlength=V)):
        assert not counts[expected == 0].any()
        values.append(chi_square(counts, expected * counts.sum()))
    with capsys.disabled():
        print(f"\nchi-square p-values, {sampling}: over positions {values[0]:.3f}, over seeds {values[1]:.3f}")
    assert min(values) > MIN_P_VALUE


def test_the_chi_square_sees_a_wrong_distribution():
    logits = torch.randn(V) * 2
    counts = picks(logits, 1000, temperature=0.6).long().bincount(minlength=V)
    assert chi_square(counts, filtered(logits, 1.0) * 1000) < MIN_P_VALUE


def test_noise_is_gumbel():
    """Its distribution function exp(-exp(-x)) makes it uniform: chi-square over 50 cells, over tokens and positions."""
    for noise in (gumbel(3, 11, torch.arange(20_000)), torch.cat([gumbel(9, p, torch.arange(8)) for p in range(1000)])):
        uniform = (-(-noise.double()).exp()).exp()
        counts = (uniform * 50).long().clamp(max=49).bincount(minlength=50)
        assert chi_square(counts, torch.full((50,), len(noise) / 50, dtype=torch.float64)) > MIN_P_VALUE


def kept_by_transformers(logits: torch.Tensor, heat: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    scores = TemperatureLogitsWarper(heat)(None, logits[None]) if heat != 1 else logits[None]
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return set(scores[0].isfinite().nonzero()[:, 0].tolist())


@given(
    st.integers(0, 10_000),
    st.sampled_from([0.3, 0.8, 1.0, 1.7]),
    st.sampled_from([0, 1, 5, 50, 200]),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_filters_keep_what_transformers_keeps(seed, heat, top_k, top_p, min_p):
    logits = torch.randn(97, generator=torch.Generator().manual_seed(seed)) * 3
    kept = candidates(logits / heat, top_k, top_p, min_p)
    assert set(kept.tolist()) == kept_by_transformers(logits, heat, top_k, top_p, min_p)
    assert set(kept.tolist()) == set(filtered(logits, heat, top_k, top_p, min_p).nonzero()[:, 0].tolist())


def test_top_k_ties_go_to_the_lower_id():
    logits = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0])
    assert candidates(logits, 2, 1.0, 0.0).tolist() == [1, 2]
    assert candidates(logits, 2, 0.99, 0.0).tolist() == [1, 2]


def test_top_p_looks_at_1024_tokens_unless_top_k_is_smaller():
    logits = torch.zeros(5000)
    assert len(candidates(logits, 0, 0.999999, 0.0)) == NUCLEUS_TOP_K
    assert len(candidates(logits, 3000, 0.999999, 0.0)) == NUCLEUS_TOP_K
    assert len(candidates(logits, 3000, 1.0, 0.0)) == 3000
    assert len(candidates(logits, 10, 0.5, 0.0)) == 5
    assert len(candidates(logits, 0, 0.5, 0.0)) == NUCLEUS_TOP_K // 2  # renormalised after the 1,024 were taken


def test_temperature_zero_is_greedy_whatever_the_filters_say():
    logits = torch.randn(50, V)
    expected = pick_greedy(logits, torch.zeros(50, dtype=torch.int32))
    assert expected.tolist() == logits.argmax(1).tolist()
    zeros, position = torch.zeros(50, dtype=torch.int32), torch.arange(50, dtype=torch.int32)
    heat, key = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    assert pick_sample(logits, zeros, position, heat, key).equal(expected)
    filters = torch.tensor([3]), torch.tensor([0.5]), torch.tensor([0.5])
    assert pick_filter(logits, zeros, position, heat, key, *filters).equal(expected)


def test_greedy_ties_go_to_the_lower_id():
    logits = torch.tensor([[1.0, 4.0, 4.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    assert pick_greedy(logits, torch.tensor([0, 0])).tolist() == [1, 0]


@given(st.data())
def test_a_draw_depends_on_seed_position_and_token_alone(data):
    """Rows moved to other places, among other rows and in other slots, draw what they drew alone."""
    torch.manual_seed(data.draw(st.integers(0, 100)))
    sequences, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    logits = torch.randn(rows, V) * 2
    sequence = torch.tensor(data.draw(st.lists(st.integers(-1, sequences - 1), min_size=rows, max_size=rows)))
    position = torch.randint(0, 10_000, (rows,))
    state = (
        torch.tensor([0.0, 0.7, 1.3, 2.0])[:sequences], torch.randint(0, 1 << 62, (sequences,)),
        torch.tensor([0, 4, 0, 9])[:sequences], torch.tensor([1.0, 0.9, 0.8, 1.0])[:sequences],
        torch.tensor([0.0, 0.0, 0.1, 0.05])[:sequences],
    )  # fmt: skip
    drawn = pick_filter(logits, sequence, position, *state)
    for row, s in enumerate(sequence.tolist()):
        if s < 0:
            assert drawn[row] == -1
            continue
        own = tuple(value[s : s + 1] for value in state)
        assert pick_filter(logits[row : row + 1], torch.tensor([0]), position[row : row + 1], *own) == drawn[row]
    order = torch.randperm(rows)
    assert pick_filter(logits[order], sequence[order], position[order], *state).equal(drawn[order])


def test_unfiltered_rows_draw_alike_in_both_picks():
    """A batch in which one request filters takes the filtering pick for all of its rows."""
    logits, sequence, position = torch.randn(40, V), torch.arange(40) % 2, torch.arange(40)
    heat, seed = torch.tensor([0.9, 1.4]), torch.tensor([1, 2])
    none = torch.tensor([0, 0]), torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.0])
    filtering = pick_filter(logits, sequence, position, heat, seed, *none)
    assert filtering.equal(pick_sample(logits, sequence, position, heat, seed))


def test_64_bits_of_seed_count():
    logits = torch.zeros(V)
    drawn = {seed: tuple(picks(logits, 20, seed=seed, temperature=1.0).tolist()) for seed in (0, 1, 1 << 32, 1 << 62)}
    assert len(set(drawn.values())) == 4


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked_for():
    every = gumbel(42, 7, torch.arange(1000))
    some = torch.tensor([999, 3, 4, 512, 0])
    assert gumbel(42, 7, some).equal(every[some])
    assert math.isfinite(float(every.min()))
