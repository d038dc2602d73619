"""Twenty turns on one engine give the tokens, the logits and the accept lengths of cold runs.

Turns continue, cut, edit in the middle, repeat, start anew, come several at once, give up half-way; with and without
speculation, greedy and sampled. The drafter is not planted: its guesses show whether its caches are right.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from support.lab import Lab, make_models, one_thread

from ddtree_compile.errors import PromptError
from ddtree_compile.runtime.engine import Engine
from ddtree_compile.runtime.sampling import Generation, SamplingParams
from ddtree_compile.runtime.sequences import Residents, Slot

VOCAB = 12  # so small that a random drafter's tree is often right
SLOTS = 150


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Lab]:
    roots = {
        family: make_models(tmp_path_factory.mktemp(family), family, block=5, vocab_size=VOCAB)
        for family in ("kimi", "qwen3")
    }
    return lambda family, sequences: Lab.make(
        roots[family], [6, 30], cache={"max_seq_len": SLOTS, "max_sequences": sequences}, prefill={"chunks": [4, 32]}
    )


class Talk:
    """A warm engine beside cold ones."""

    def __init__(self, lab: Lab, cold: Lab, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engine, self.watched = lab.watched()
        self.cold = cold
        self.histories: list[tuple[int, ...]] = [tuple(self.tokens(12))]
        self.cached = self.accepted = 0
        self.seed = seed * 1000

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def prompt(self) -> tuple[int, ...]:
        """A history as it is, cut, edited in the middle or continued; sometimes a new one."""
        history = list(self.rng.choice([*self.histories[-4:], *[self.histories[-1]] * 3]))
        at = self.rng.randrange(len(history))
        made = self.rng.choice([
            lambda: history + self.tokens(self.rng.randint(1, 9)),
            lambda: history + self.tokens(self.rng.randint(1, 40)),
            lambda: history[: at + 1],
            lambda: history[:at] + self.tokens(2) + history[at + 1 :],
            lambda: history[:at] + history[at + 1 :] or history,
            lambda: history,
            lambda: self.tokens(self.rng.randint(1, 40)),
        ])()  # fmt: skip
        return tuple(made[: SLOTS - 10])

    def params(self) -> SamplingParams:
        self.seed += 1
        hot = self.rng.choice([{}, {"temperature": 0.6}, {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "min_p": 0.02}])
        return SamplingParams(
            seed=self.seed, max_new_tokens=self.rng.randint(1, 12), speculate=self.rng.random() < 0.5,
            bucket=self.rng.choice([6, 30, 30]), shape=self.rng.choice(["tree", "tree", "chain"]), **hot,
        )  # fmt: skip

    def check(self, prompt: tuple[int, ...], params: SamplingParams, made: Generation) -> None:
        """Against an engine that has seen nothing."""
        engine, watched = self.cold.watched()
        with engine:
            (cold,) = engine.generate([prompt], params)
        assert cold.cached_tokens == 0
        assert replace(made, cached_tokens=0) == cold
        assert made.cached_tokens < len(prompt)
        for (seed, position), bits in watched.logits.items():
            assert self.watched.logits[seed, position] == bits, f"logits at {position} differ"
        self.histories.append(made.context)
        self.cached += made.cached_tokens
        self.accepted += sum(length - 1 for length in made.accept_lengths)

    def turn(self, sequences: int) -> None:
        if self.rng.random() < 0.25:
            self.give_up(sequences)
        count = self.rng.choice([1, 1, 1, sequences, sequences + 2])
        prompts, params = [self.prompt() for _ in range(count)], [self.params() for _ in range(count)]
        for prompt, own, made in zip(prompts, params, self.engine.generate(prompts, params), strict=True):
            self.check(prompt, own, made)

    def give_up(self, sequences: int) -> None:
        """Begin, hear a few pieces, and close or cancel."""
        count = self.rng.randint(1, sequences + 1)
        stream = self.engine.stream(
            [self.prompt() for _ in range(count)], [replace(self.params(), max_new_tokens=30) for _ in range(count)]
        )
        for _ in range(self.rng.randint(0, 4)):
            next(stream, None)
        self.rng.choice([stream.close, lambda: (stream.cancel(), list(stream)), lambda: None])()


@pytest.mark.parametrize("sequences", [1, 2, 3])
@pytest.mark.parametrize("family", ["kimi", "qwen3"])
def test_twenty_turns(lab, family, sequences):
    talk = Talk(lab(family, sequences), lab(family, 1), seed=sequences)
    for _ in range(20):
        talk.turn(sequences)
    talk.engine.close()
    assert talk.cached > 200
    assert talk.accepted > 5


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10, 22))
@pytest.mark.parametrize("family", ["kimi", "qwen3"])
def test_many_turns(lab, family, seed):
    sequences = 1 + seed % 3
    talk = Talk(lab(family, sequences), lab(family, 1), seed=seed)
    for _ in range(60):
        talk.turn(sequences)
    talk.engine.close()


def test_extend_continues(lab):
    """extend == the whole conversation at once, and what is resident is not run again."""
    made = lab("qwen3", 1)
    engine, _ = made.watched()
    params = SamplingParams(max_new_tokens=8, temperature=0.7, seed=5)
    with engine:
        (first,) = engine.generate([[1, 2, 3]], params)
        second = engine.extend(first, [4, 5, 6], params)
        assert second.cached_tokens == len(first.context) - 1  # all but the last token, picked and never run
        third = engine.extend(second, [], params)
        assert third.cached_tokens == len(second.context) - 1
        assert third.context == (*second.context, *third.token_ids)
        assert second.context == (*first.context, 4, 5, 6, *second.token_ids)
    for made_by, prompt in ((second, (*first.context, 4, 5, 6)), (third, second.context)):
        cold, _ = made.watched()
        with cold:
            assert cold.generate([prompt], params)[0].token_ids == made_by.token_ids


def test_extending_a_full_cache_is_refused(lab):
    engine, _ = lab("qwen3", 1).watched()
    with engine:
        (full,) = engine.generate([[1] * (SLOTS - 3)], SamplingParams(max_new_tokens=50))
        assert full.stop_reason == "context_full"
        with pytest.raises(PromptError, match="cache holds"):
            engine.extend(full, [])


def resident(engine: Engine, prompt: list[int], **own: object) -> int:
    return engine.generate([prompt], SamplingParams(max_new_tokens=4, **own))[0].cached_tokens


def test_what_is_reused(lab):
    engine, _ = lab("kimi", 2).watched()
    with engine:
        long = [token % VOCAB for token in range(20)]
        assert resident(engine, long) == 0
        assert resident(engine, long) == 19  # the last token is run for its logits
        assert resident(engine, [*range(10), 3, 3, 3]) == 10
        assert resident(engine, [7, 7]) == 0  # takes the empty slot, not the resident one
        assert resident(engine, [*range(10), 3, 3, 3, 3]) == 13


def test_a_drafter_reuses_no_more_than_it_has_seen(lab):
    """Plain rounds do not fill the drafter's caches."""
    engine, _ = lab("kimi", 1).watched()
    with engine:
        (plain,) = engine.generate([[1, 2, 3, 4]], SamplingParams(max_new_tokens=10, speculate=False))
        prompt = [*plain.context, 5]
        (warm,) = engine.generate([prompt], SamplingParams(max_new_tokens=12, bucket=30))
        assert warm.cached_tokens == 4
        assert resident(engine, prompt, speculate=False) == len(prompt) - 1
    engine, _ = lab("kimi", 1).watched()
    with engine:
        (cold,) = engine.generate([prompt], SamplingParams(max_new_tokens=12, bucket=30))
    assert warm.accept_lengths == cold.accept_lengths


def test_claims():
    residents = Residents(3)
    residents.slots[0].tokens, residents.slots[0].drafted = [1, 2, 3], 3
    residents.slots[1].tokens, residents.slots[1].drafted = [1, 2, 9, 9], 1
    assert residents.claim([1, 2, 3, 4], speculate=True) == (residents.slots[0], 3)
    slot, shared = residents.claim([1, 2, 9, 9, 9], speculate=True)  # slot 0 is busy; slot 1's drafter has seen 1 token
    assert (slot.index, shared, slot.tokens, slot.drafted) == (1, 1, [1], 1)
    assert residents.claim([1], speculate=False) == (residents.slots[2], 0)
    assert residents.claim([1], speculate=False) is None


def test_a_gap_in_the_drafters_cache_stays_a_gap():
    slot = Slot(0, [1, 2], 2)
    slot.extend([3], drafted=False)
    slot.extend([4], drafted=True)
    assert (slot.tokens, slot.drafted) == ([1, 2, 3, 4], 2)
    slot.rewind(2)
    slot.extend([5], drafted=True)
    assert (slot.tokens, slot.drafted) == ([1, 2, 5], 3)
