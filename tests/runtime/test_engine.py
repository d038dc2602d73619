"""Requests: how they end, what is refused, and that streams, batches and cancellations give what single runs give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.lab import Lab, make_models, one_thread, prompts_of

from ddtree_compile.errors import DeviceError, PromptError
from ddtree_compile.runtime.cpu import memory_needed
from ddtree_compile.runtime.engine import Engine, refuse_unrunnable
from ddtree_compile.runtime.sampling import MAX_SEED, Generation, SamplingParams

SLOTS = 48
PROMPT = [5, 17, 2]
SEED = 9
ROUNDS = {"plain": {"speculate": False}, "tree": {"bucket": 9}, "chain": {"bucket": 9, "shape": "chain"}}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Lab]:
    """A plan with so many sequences."""
    root = make_models(tmp_path_factory.mktemp("engine"), "qwen3", block=5)
    cache = {"max_seq_len": SLOTS}
    made = {
        n: Lab.make(root, [4, 9], cache={**cache, "max_sequences": n}, prefill={"chunks": [4, 8]}) for n in (1, 2, 3)
    }
    return made.__getitem__


@pytest.fixture(scope="module")
def truth(lab: Callable[[int], Lab]) -> tuple[int, ...]:
    """What the model says after PROMPT until the cache is full."""
    engine, _ = lab(1).watched()
    with engine:
        return engine.generate([PROMPT], SamplingParams(speculate=False, max_new_tokens=100))[0].token_ids


def ended(lab: Lab, truth: tuple[int, ...], rounds: str, stops: tuple[int, ...] = (), **own: Any) -> Generation:
    """One request, with a drafter planted where there is one: ends lie in the middle of accepted paths."""
    engine, _ = lab.watched({SEED: (*PROMPT, *truth)}, stops=stops)
    with engine:
        (made,) = engine.generate([PROMPT], SamplingParams(seed=SEED, **{**ROUNDS[rounds], **own}))
    assert 1 + sum(made.accept_lengths) == len(made.token_ids)
    assert made.rounds == len(made.accept_lengths)
    assert made.context == (*PROMPT, *made.token_ids)
    assert made.token_ids == truth[: len(made.token_ids)]
    return made


@pytest.mark.parametrize("rounds", ROUNDS)
class TestEnds:
    @pytest.mark.parametrize("limit", [1, 2, 3, 7, 20])
    def test_limit(self, lab, truth, rounds, limit):
        made = ended(lab(1), truth, rounds, max_new_tokens=limit)
        assert (made.finish_reason, made.stop_reason) == ("length", "max_new_tokens")
        assert len(made.token_ids) == limit

    @pytest.mark.parametrize("at", [0, 1, 2, 3, 5, 8, 13])
    def test_any_of_several_stop_tokens(self, lab, truth, rounds, at):
        absent = next(token for token in range(97) if token not in truth)
        token = truth[at]
        first = truth.index(token)
        made = ended(lab(1), truth, rounds, stop_token_ids=(absent, token), max_new_tokens=40)
        assert (made.finish_reason, made.stop_reason) == ("stop", token)
        assert len(made.token_ids) == first + 1

    def test_the_earliest_of_two_stops(self, lab, truth, rounds):
        early, late = next(
            (truth[i], truth[i + 2]) for i in range(3, 20) if truth.index(truth[i]) == i < truth.index(truth[i + 2])
        )
        made = ended(lab(1), truth, rounds, stop_token_ids=(late, early), max_new_tokens=40)
        assert made.stop_reason == early

    def test_the_checkpoints_own_end(self, lab, truth, rounds):
        end = truth[6]
        made = ended(lab(1), truth, rounds, stops=(end,), max_new_tokens=30)
        assert (made.finish_reason, made.stop_reason) == ("stop", end)
        made = ended(lab(1), truth, rounds, stops=(end,), ignore_eos=True, max_new_tokens=30)
        assert (made.finish_reason, len(made.token_ids)) == ("length", 30)

    def test_stop_and_limit_at_once_is_a_stop(self, lab, truth, rounds):
        first = truth.index(truth[4])
        made = ended(lab(1), truth, rounds, stop_token_ids=(truth[4],), max_new_tokens=first + 1)
        assert (made.finish_reason, made.stop_reason) == ("stop", truth[4])

    def test_the_end_of_the_cache(self, lab, truth, rounds):
        made = ended(lab(1), truth, rounds, max_new_tokens=1000)
        assert (made.finish_reason, made.stop_reason) == ("length", "context_full")
        assert len(made.context) == SLOTS + 1  # the last token is picked from the last slot and never run

    def test_limit_at_the_end_of_the_cache_is_the_limit(self, lab, truth, rounds):
        made = ended(lab(1), truth, rounds, max_new_tokens=SLOTS + 1 - len(PROMPT))
        assert (made.stop_reason, len(made.context)) == ("max_new_tokens", SLOTS + 1)

    def test_a_prompt_that_fills_the_cache(self, lab, rounds):
        (prompt,) = prompts_of([SLOTS])
        engine, _ = lab(1).watched()
        with engine:
            (made,) = engine.generate([prompt], SamplingParams(**ROUNDS[rounds]))
        assert (made.finish_reason, made.stop_reason, len(made.token_ids)) == ("length", "context_full", 1)
        assert made.accept_lengths == ()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 20, SLOTS - 1])
def test_prompts_of_every_length(lab, length):
    """Of one token, of a chunk, longer than any; against the same model with chunks of one token."""
    (prompt,) = prompts_of([length], seed=length)
    params = SamplingParams(max_new_tokens=5)
    runs = [lab(n).run([prompt], [replace(params, speculate=speculate)]) for n, speculate in ((1, True), (2, False))]
    runs[0][0].same(runs[1][0], context=False)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[]], {}, "prompt 0 is empty"),
        ([[1], [2] * (SLOTS + 1)], {}, f"prompt 1 has {SLOTS + 1} tokens, but the cache holds {SLOTS}"),
        ([[97]], {}, "prompt 0 holds token id 97: ids go from 0 to 96"),
        ([[-1]], {}, "holds token id -1"),
        ([[1.0]], {}, "holds token id 1.0"),
        ([[True]], {}, "holds token id True"),
        ([[1]], {"bucket": 5}, "bucket = 5: this plan has buckets 4, 9"),
        ([[1]], {"stop_token_ids": tuple(range(17))}, "17 stop tokens: at most 16"),
    ],
)
def test_refused_prompts(lab, prompts, params, message):
    engine, watched = lab(1).watched()
    with engine, pytest.raises(PromptError, match=message):
        engine.generate(prompts, SamplingParams(**params))
    assert not watched.segments  # nothing ran


def test_one_params_a_prompt(lab):
    engine, _ = lab(1).watched()
    with engine, pytest.raises(PromptError, match="2 prompts but 1 sampling parameters"):
        engine.generate([[1], [2]], [SamplingParams()])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-0.1, math.nan, math.inf, "1", True, 101)],
        *[("top_p", value) for value in (0.0, 1.1, -1, math.nan)],
        *[("min_p", value) for value in (-0.1, 1.01, math.nan)],
        *[("top_k", value) for value in (-1, 1.5, True)],
        *[("seed", value) for value in (-1, MAX_SEED + 1, 0.5)],
        *[("max_new_tokens", value) for value in (0, -3, 2.0)],
        *[("stop_token_ids", value) for value in ((-1,), (1.5,), ("a",))],
        ("shape", "forest"),
    ],
)
def test_refused_sampling_parameters(name, value):
    with pytest.raises(PromptError, match=f"sampling parameter {name}"):
        SamplingParams(**{name: value})


def test_extreme_sampling_parameters_run(lab):
    engine, _ = lab(1).watched()
    greedy = SamplingParams(max_new_tokens=4)
    with engine:
        for own in (
            {"temperature": 100.0}, {"seed": MAX_SEED, "temperature": 1.0}, {"top_k": 1 << 30, "temperature": 1.0},
            {"top_p": 1e-9, "temperature": 1.0}, {"min_p": 1.0, "temperature": 1.0},
        ):  # fmt: skip
            (made,) = engine.generate([PROMPT], replace(greedy, **own))
            assert len(made.token_ids) == 4
        (expected,) = engine.generate([PROMPT], greedy)
        for own in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
            assert engine.generate([PROMPT], replace(greedy, temperature=1.0, **own))[0].token_ids == expected.token_ids


@pytest.mark.parametrize("temperature", [1e-5, 1e-20, 1e-38, 1e-44, 1e-60])
def test_the_coldest_draw_is_greedy(lab, temperature):
    """Logits over a temperature near zero are infinite in fp32, and all infinite scores tie."""
    engine, _ = lab(1).watched()
    with engine:
        (expected,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=12))
        for own in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
            cold = SamplingParams(max_new_tokens=12, temperature=temperature, **own)
            assert engine.generate([PROMPT], cold)[0].token_ids == expected.token_ids


def test_request_i_has_seed_plus_i(lab):
    engine, _ = lab(2).watched()
    hot = SamplingParams(temperature=1.5, seed=40, max_new_tokens=10)
    with engine:
        together = engine.generate([PROMPT] * 3, hot)
        assert len({made.token_ids for made in together}) == 3
        for i, made in enumerate(together):
            assert engine.generate([PROMPT], replace(hot, seed=40 + i))[0].token_ids == made.token_ids
        each = engine.generate([PROMPT] * 2, [hot, hot])
        assert each[0].token_ids == each[1].token_ids == together[0].token_ids


def test_more_prompts_than_sequences(lab):
    prompts = prompts_of([3, 11, 1, 7, 5])
    each = [
        SamplingParams(seed=i, max_new_tokens=4 + 3 * i, temperature=0.4 * i, top_k=i, speculate=i != 2)
        for i in range(5)
    ]
    engine, _ = lab(1).watched()
    with engine:
        alone = [engine.generate([prompt], own)[0] for prompt, own in zip(prompts, each, strict=True)]
    for sequences in (1, 2, 3):
        engine, _ = lab(sequences).watched()
        with engine:
            together = engine.generate(prompts, each)
        assert [made.token_ids for made in together] == [made.token_ids for made in alone]
        assert [made.accept_lengths for made in together] == [made.accept_lengths for made in alone]


def test_a_stream_says_what_generate_says(lab):
    prompts = prompts_of([3, 11, 6])
    params = SamplingParams(max_new_tokens=12, seed=3, temperature=0.8)
    engine, _ = lab(2).watched()
    with engine:
        expected = engine.generate(prompts, params)
        said: dict[int, list[int]] = {0: [], 1: [], 2: []}
        last: dict[int, Generation] = {}
        for piece in engine.stream(prompts, params):
            assert piece.index not in last
            said[piece.index] += piece.token_ids
            if piece.generation is not None:
                last[piece.index] = piece.generation
    assert [tuple(said[i]) for i in range(3)] == [made.token_ids for made in expected]
    assert [last[i].token_ids for i in range(3)] == [made.token_ids for made in expected]


def test_cancelled_requests_end_and_the_others_do_not_notice(lab):
    prompts = prompts_of([3, 11, 6, 2])
    params = SamplingParams(max_new_tokens=12, temperature=0.8)
    engine, _ = lab(2).watched()
    with engine:
        expected = engine.generate(prompts, params)
        stream = engine.stream(prompts, params)
        last: dict[int, Generation] = {}
        pieces = 0
        for piece in stream:
            pieces += piece.index == 0
            if pieces == 3:
                stream.cancel(0)  # while it runs
                stream.cancel(3)  # while it waits
            if piece.generation is not None:
                last[piece.index] = piece.generation
        assert (last[0].finish_reason, last[0].stop_reason) == ("cancelled", None)
        assert 0 < len(last[0].token_ids) < 12
        assert last[0].token_ids == expected[0].token_ids[: len(last[0].token_ids)]
        assert (last[3].finish_reason, last[3].token_ids, last[3].rounds) == ("cancelled", (), 0)
        assert [last[i].token_ids for i in (1, 2)] == [expected[i].token_ids for i in (1, 2)]
        again = engine.generate(prompts, params)
        assert [made.token_ids for made in again] == [made.token_ids for made in expected]


def test_a_cancelled_request_runs_no_more(lab):
    """Cancelling took effect a round late for a request of another group, and after its prefill for a waiting one."""
    engine, watched = lab(2).watched()
    each = [SamplingParams(max_new_tokens=30), SamplingParams(max_new_tokens=30, speculate=False)]
    with engine:
        stream = engine.stream([[1, 2], [3, 4]], each)
        next(stream), next(stream), next(stream)
        stream.cancel(1)
        plain = watched.segments["plain"]
        assert next(stream).generation.finish_reason == "cancelled"
        assert watched.segments["plain"] == plain == 0
        stream = engine.stream([[50], [60]], each)
        next(stream)
        before = sum(count for name, count in watched.segments.items() if name.startswith("prefill"))
        stream.cancel(1)
        assert next(stream).index == 0
        assert before == sum(count for name, count in watched.segments.items() if name.startswith("prefill"))


def test_cancel_before_anything_ran(lab):
    engine, watched = lab(1).watched()
    with engine:
        stream = engine.stream([PROMPT, PROMPT])
        stream.cancel()
        assert [piece.generation.finish_reason for piece in stream] == ["cancelled", "cancelled"]
    assert not watched.segments


def test_a_new_call_ends_an_unfinished_stream(lab):
    engine, _ = lab(1).watched()
    with engine:
        (expected,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=9))
        first = engine.stream([[1, 2]], SamplingParams(max_new_tokens=9))
        next(first)
        assert engine.generate([PROMPT], SamplingParams(max_new_tokens=9))[0].token_ids == expected.token_ids
        assert list(first) == []


def test_a_closed_engine_says_so(lab):
    engine, _ = lab(1).watched()
    stream = engine.stream([PROMPT])
    next(stream)
    engine.close()
    engine.close()
    assert list(stream) == []
    with pytest.raises(DeviceError, match="closed"):
        engine.generate([PROMPT])


def test_from_spec_runs_on_the_cpu_alone(tmp_path):
    path = tmp_path / "spec.toml"
    path.write_text('[model]\ntarget = "t"\ndrafter = "d"\n[tree]\nbuckets = [7]\n')
    with pytest.raises(DeviceError, match="device"):
        Engine.from_spec(path, device="cuda")


def test_the_default_bucket_holds_the_chain(lab):
    engine, watched = lab(1).watched()
    with engine:
        engine.generate([PROMPT], SamplingParams(max_new_tokens=6))
    assert watched.segments["verify[4]"]
    assert not watched.segments["verify[9]"]


def test_nothing_to_do(lab):
    engine, _ = lab(1).watched()
    with engine:
        assert engine.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        ([[1, 2]], [], "1 prompts but 0 sampling parameters"),
        ([1, 2, 3], None, "a list of lists of token ids"),
        ("text", None, "a list of lists of token ids"),
        ([[1]], [None], "must be a SamplingParams"),
        ([[1]], {"temperature": 1.0}, "must be a SamplingParams"),
    ],
)
def test_calls_that_mean_nothing_are_refused(lab, prompts, params, says):
    """An empty list of parameters ran with the defaults; the others ended in errors of Python's own."""
    engine, _ = lab(1).watched()
    with engine, pytest.raises(PromptError, match=says):
        engine.generate(prompts, params)


@pytest.mark.parametrize("params", [{"speculate": "no"}, {"ignore_eos": 1}])
def test_what_is_no_boolean_is_refused(params):
    """speculate="no" speculated."""
    with pytest.raises(PromptError, match="must be True or False"):
        SamplingParams(**params)


def test_a_model_that_does_not_fit_in_memory_is_refused_before_it_is_loaded(lab, monkeypatch):
    """The plan's own bytes were compared with the machine's: unpacked to fp32, an int4 model takes eight times that."""
    plan = lab(1).plan
    numbers = sum(weight.value.type.numel for weight in plan.weights)
    assert memory_needed(plan) > 4 * numbers + plan.report["memory"]["weights"]
    monkeypatch.setattr("ddtree_compile.runtime.engine.host_memory", lambda: memory_needed(plan) - 1)
    with pytest.raises(DeviceError, match="running the plan on a CPU needs"):
        refuse_unrunnable(plan)
