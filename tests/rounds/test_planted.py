"""Speculation changes nothing, whatever the drafter guesses right: tokens, logits and caches, bit for bit."""

import pytest
from support.lab import SAMPLINGS, Lab, prompts_of
from support.planted import Coverage, Planted

from ddtree_compile.runtime.sampling import SamplingParams

SEED = 1000
BUCKETS = [2, 5, 11]
SPECS = {
    "spine": {"keep_top1_chain": True},
    "narrow": {"top_k_per_depth": 3},
    "narrow spine": {"top_k_per_depth": 2, "keep_top1_chain": True},
}


def cover(lab: Lab, sampling: str, coverage: Coverage, buckets: list[int], shapes: list[str], tokens: int) -> None:
    """One plain run, then a planted run of each bucket and shape, all alike."""
    (prompt,) = prompts_of([5])
    own = {**SAMPLINGS[sampling], "seed": SEED, "max_new_tokens": tokens}
    (plain,) = lab.run([prompt], [SamplingParams(**own, speculate=False)])
    first = None
    for bucket in buckets:
        for shape in shapes:
            (planted,) = lab.run(
                [prompt],
                [SamplingParams(**own, bucket=bucket, shape=shape)],
                truths={SEED: plain.generation.context},
                seed=sum(map(ord, f"{sampling} {bucket} {shape}")),
                coverage=coverage,
            )
            plain.same(planted, context=False)
            assert 1 + sum(planted.generation.accept_lengths) == len(planted.generation.token_ids) == tokens
            assert planted.generation.rounds == len(planted.generation.accept_lengths)
            first = first or planted
            first.same(planted, context=True)


def check_coverage(lab: Lab, coverage: Coverage, buckets: list[int], shapes: list[str]) -> None:
    engine, watched = lab.watched({})
    assert isinstance(watched.inner, Planted)
    for bucket in buckets:
        for shape in shapes:
            assert not coverage.lacking(bucket, shape, watched.inner.wanted(bucket, shape)), (bucket, shape)
    engine.close()


@pytest.mark.parametrize("family", ["kimi", "qwen3"])
def test_every_accepted_length_child_rank_and_bucket(lab, family, capsys):
    coverage = Coverage()
    made = lab(family, BUCKETS)
    for sampling in ("greedy", "all"):
        cover(made, sampling, coverage, BUCKETS, ["tree", "chain"], 80)
    check_coverage(made, coverage, BUCKETS, ["tree", "chain"])
    with capsys.disabled():
        print(f"\n{family}: {coverage}")


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("family", "dtype"), [("kimi", "bfloat16"), ("qwen3", "bfloat16")])
def test_each_filter(lab, family, dtype, sampling):
    cover(lab(family, BUCKETS, dtype=dtype), sampling, Coverage(), [11], ["tree"], 60)


@pytest.mark.parametrize("spec", SPECS)
def test_tree_options(lab, spec):
    coverage = Coverage()
    made = lab("qwen3", [4, 10], tree=SPECS[spec])
    cover(made, "sampled", coverage, [4, 10], ["tree"], 100)
    check_coverage(made, coverage, [4, 10], ["tree"])


def test_a_plan_of_chains(lab):
    coverage = Coverage()
    made = lab("kimi", [2, 5], tree={"shape": "chain"})
    assert "tree" not in {segment.name for segment in made.plan.segments}
    cover(made, "top_p", coverage, [2, 5], ["chain"], 60)
    check_coverage(made, coverage, [2, 5], ["chain"])


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["kimi", "qwen3"])
def test_every_bucket_in_full(lab, family, dtype, sampling, capsys):
    coverage = Coverage()
    buckets = [7, 15, 31, 63]
    made = lab(family, buckets, dtype=dtype, block=8)
    for bucket in buckets:
        for _ in range(1 + bucket // 12):  # a rank of a large bucket needs a round of its own
            cover(made, sampling, coverage, [bucket], ["tree", "chain"], 240)
    check_coverage(made, coverage, buckets, ["tree", "chain"])
    with capsys.disabled():
        print(f"\n{family} {dtype} {sampling}: {coverage}")
