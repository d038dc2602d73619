"""Chunked == whole, one sequence == three, long == short, split == plain: bit for bit."""

import pytest
from support.lab import SAMPLINGS, Lab, Run, make_models, prompts_of

from ddtree_compile.runtime.sampling import SamplingParams

FAMILIES = [("kimi", "float32"), ("kimi", "bfloat16"), ("qwen3", "float32"), ("qwen3", "bfloat16")]


def plain_and_planted(lab: Lab, prompt: list[int], tokens: int, seed: int = 7, **own: object) -> tuple[Run, Run]:
    """The same request without and with (planted) speculation, checked to be alike."""
    params = {"max_new_tokens": tokens, "seed": seed, **own}
    (plain,) = lab.run([prompt], [SamplingParams(**{**params, "speculate": False})])
    (planted,) = lab.run([prompt], [SamplingParams(**params)], truths={seed: plain.generation.context}, seed=seed)
    plain.same(planted, context=False)
    return plain, planted


@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
@pytest.mark.parametrize("length", [1, 9, 64, 70])
def test_chunked_is_whole(lab, family, dtype, length):
    (prompt,) = prompts_of([length], seed=length)
    params = [SamplingParams(max_new_tokens=6, temperature=0.7, seed=3)]
    whole, *others = [
        lab(family, [5], dtype=dtype, prefill={"chunks": chunks}).run([prompt], params)[0]
        for chunks in ([96], [1, 16], [7], [40, 64])
    ]
    for other in others:
        whole.same(other, context=True)


@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
def test_decoded_is_prefilled(lab, family, dtype):
    """A prompt that holds what a planted run said leaves the caches and the last logits of that run."""
    made = lab(family, [11], dtype=dtype)
    (prompt,) = prompts_of([50])
    _, planted = plain_and_planted(made, prompt, 40)
    said = planted.generation.context
    (cold,) = made.run([said[:-1]], [SamplingParams(max_new_tokens=1, seed=7)])
    assert cold.generation.token_ids == (said[-1],)
    assert cold.logits == {len(said) - 2: planted.logits[len(said) - 2]}
    assert cold.caches == planted.caches


@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
def test_one_sequence_is_three(lab, family, dtype):
    """Three sequences of other lengths, buckets, shapes and sampling parameters, which end at different times."""
    prompts = prompts_of([1, 61, 20])
    each = [
        {"seed": 21, "max_new_tokens": 50, "bucket": 11, **SAMPLINGS["greedy"]},
        {"seed": 22, "max_new_tokens": 9, "bucket": 11, **SAMPLINGS["all"]},
        {"seed": 23, "max_new_tokens": 30, "bucket": 5, "shape": "chain", **SAMPLINGS["sampled"]},
    ]
    alone = [
        plain_and_planted(lab(family, [5, 11], dtype=dtype), prompt, int(own["max_new_tokens"]), **{
            key: value for key, value in own.items() if key != "max_new_tokens"
        })
        for prompt, own in zip(prompts, each, strict=True)
    ]  # fmt: skip
    three = lab(family, [5, 11], dtype=dtype, cache={"max_sequences": 3})
    truths = {own["seed"]: run.generation.context for own, (run, _) in zip(each, alone, strict=True)}
    together = three.run(prompts, [SamplingParams(**own) for own in each], truths=truths)
    for (_, planted), run in zip(alone, together, strict=True):
        planted.same(run, context=True)
    plain = three.run(prompts, [SamplingParams(**{**own, "speculate": False}) for own in each])
    for (run, _), other in zip(alone, plain, strict=True):
        run.same(other, context=True)
    mixed = three.run(
        prompts, [SamplingParams(**{**own, "speculate": i != 1}) for i, own in enumerate(each)], truths=truths
    )
    for run, other in zip(together, mixed, strict=True):
        run.same(other, context=False)


@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
@pytest.mark.parametrize("length", [59, 120])
def test_across_blocks_of_keys(lab, family, dtype, length):
    """Attention takes 64 keys at a time: rounds that cross 64 and 128, and fill a cache of no round size."""
    made = lab(family, [11], dtype=dtype, cache={"max_seq_len": 143})
    (prompt,) = prompts_of([length])
    plain, _ = plain_and_planted(made, prompt, 30, temperature=0.9)
    if length == 120:
        assert plain.generation.stop_reason == "context_full"
        assert len(plain.generation.context) == 144  # the last token is picked and never run


@pytest.mark.parametrize("family", ["kimi", "qwen3"])
def test_split_over_keys(tmp_path_factory, family):
    """A plan for a GPU splits a long cache over keys in eight; it runs here too."""
    root = make_models(tmp_path_factory.mktemp(family), family, max_position_embeddings=8192, num_hidden_layers=2)
    made = Lab.make(
        root, [11], cache={"max_seq_len": 4096}, prefill={"chunks": [64, 500]}, machine={"gpu": "h200"}
    )  # fmt: skip
    (prompt,) = prompts_of([507])
    plain, planted = plain_and_planted(made, prompt, 20)
    assert max(planted.generation.accept_lengths) > 3
    other = Lab.make(root, [11], cache={"max_seq_len": 4096}, prefill={"chunks": [100]}, machine={"gpu": "h200"})
    (chunked,) = other.run([prompt], [SamplingParams(max_new_tokens=20, seed=7, speculate=False)])
    plain.same(chunked, context=True)
