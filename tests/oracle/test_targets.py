"""The engine against transformers' own models, over random small configs: the same greedy tokens, the same logits.

A case runs a tree of every bucket, a chain and plain decoding, with one sequence or three; `support.oracle` says what
is compared and what counts as a tie. The whole sweep, 50 configs a family and 128 tokens:

    pytest -m full tests/oracle
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from support.cases import ROUNDS, Case, cases, deepseek_targets, qwen3_targets
from support.checkpoints import (
    KIMI,
    QWEN3,
    as_kimi_k2,
    make_drafter,
    make_kimi,
    make_kimi_k25,
    make_qwen3,
    make_spec,
)
from support.oracle import Oracle, Recorder, Tally

from ddtree_compile.runtime.engine import Engine
from ddtree_compile.runtime.sampling import SamplingParams
from ddtree_compile.spec import CompileSpec

# transformers builds the shared expert of a config that has none
pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")

FAMILIES: dict[str, tuple[Callable[..., Any], dict[str, Any], st.SearchStrategy[dict[str, Any]]]] = {
    "deepseek_v3": (make_kimi, KIMI, deepseek_targets()),
    "kimi_k25": (make_kimi_k25, KIMI, deepseek_targets()),
    "qwen3": (make_qwen3, QWEN3, qwen3_targets()),
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_agrees(family, capsys):
    sweep(family, 6, 24, capsys)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("family", FAMILIES)
def test_fifty_configs_agree(family, capsys):
    sweep(family, 50, ROUNDS, capsys)


def sweep(family, examples, new_tokens, capsys):
    tally = Tally()

    @seed(list(FAMILIES).index(family))
    @settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=cases(FAMILIES[family][2]))
    def every(case: Case) -> None:
        with tempfile.TemporaryDirectory() as directory:
            check_case(family, case, new_tokens, Path(directory), tally)

    every()
    with capsys.disabled():
        print(f"\n{family}: {tally}")
    assert tally.configs == examples
    tally.assert_rare()


def check_case(family: str, case: Case, new_tokens: int, root: Path, tally: Tally) -> None:
    make, base, _ = FAMILIES[family]
    model = make(root / "target", case.seed, case.shard_size, **case.target)
    if family == "deepseek_v3" and case.kimi_k2:
        as_kimi_k2(root / "target")
    make_drafter(root / "drafter", {**base, **case.target}, case.seed + 1, **case.drafter)
    tables = make_spec(
        root, list(case.buckets), tree={"top_k_per_depth": case.top_k, "keep_top1_chain": case.spine},
        cache={"max_sequences": len(case.prompts)}, prefill={"chunks": list(case.chunks)},
    )  # fmt: skip
    oracle = Oracle(model, tally)
    with Engine.from_spec(CompileSpec.parse(tables), poisoned=True) as engine:
        recorder = Recorder(engine)
        first = None
        for params in runs(case, new_tokens):
            prompts = case.prompts if first is None else case.prompts[:1]
            done = engine.generate(prompts, params)
            assert all(len(one.token_ids) == new_tokens for one in done)
            for one in done:
                for length in one.accept_lengths:
                    tally.accepted[length] = tally.accepted.get(length, 0) + 1
            if first is None:
                first = done
            assert [one.token_ids for one in done] == [one.token_ids for one in first[: len(done)]]
    assert first is not None
    oracle.check(recorder.rows, [one.context for one in first], every=16)
    for prompt, one in zip(case.prompts, first, strict=True):
        oracle.check_tokens(prompt, one.token_ids)
    oracle.check_generate(case.prompts[0], first[0].token_ids)
    tally.configs += 1


def runs(case: Case, new_tokens: int) -> list[SamplingParams]:
    """All prompts in the largest bucket, then the first prompt in every other way."""
    common = {"max_new_tokens": new_tokens, "ignore_eos": True}
    trees = [SamplingParams(bucket=bucket, **common) for bucket in reversed(case.buckets)]
    chain = SamplingParams(bucket=case.buckets[0], shape="chain", **common)
    return [*trees, chain, SamplingParams(speculate=False, **common)]
