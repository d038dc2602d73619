"""Which round a request gets."""

from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_compile.compiler import compile_spec
from ddtree_compile.errors import PromptError
from ddtree_compile.plan import Plan
from ddtree_compile.runtime.choice import PLAIN, choose_round
from ddtree_compile.runtime.sampling import SamplingParams
from ddtree_compile.spec import CompileSpec

TINY = Path(__file__).parent.parent.parent / "docs" / "tiny"


def plan_of(buckets: list[int], shape: str = "tree") -> Plan:
    tables = {
        "model": {"target": "target", "drafter": "drafter", "weights": "random"},
        "tree": {"buckets": buckets, "shape": shape},
        "cache": {"max_seq_len": 32},
        "prefill": {"chunks": [4]},
    }
    return compile_spec(CompileSpec.parse(tables, base=TINY))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of([2, 3, 7])


def priced(plan: Plan, *rows: tuple[int, str, int, float]) -> Plan:
    """The plan with a report that says (context, shape, nodes, tokens a second)."""
    names = ("context", "shape", "nodes", "tokens_per_second")
    return replace(plan, report={"buckets": [dict(zip(names, row, strict=True)) for row in rows]})


def test_without_a_prior_it_is_the_smallest_tree_that_holds_the_chain(plan):
    assert choose_round(plan, SamplingParams(), 10) == ("draft", "tree", "verify[3]", "pick", "commit")
    assert choose_round(plan, SamplingParams(shape="chain"), 10)[1:3] == ("chain", "verify[3]")


def test_with_a_prior_it_is_what_the_plan_expects_to_be_fastest(plan):
    """The plan's best shape was ignored: where it said that chains win, a tree of the same size ran."""
    told = priced(
        plan,
        (8, "chain", 3, 90.0),
        (8, "tree", 7, 80.0),
        (8, "plain", 0, 99.0),
        (32, "chain", 3, 5.0),
        (32, "tree", 7, 6.0),
    )
    assert choose_round(told, SamplingParams(), 4)[1:3] == ("chain", "verify[3]")
    assert choose_round(told, SamplingParams(), 9)[1:3] == ("tree", "verify[7]")
    assert choose_round(told, SamplingParams(), 99)[1:3] == ("tree", "verify[7]")
    assert choose_round(told, SamplingParams(shape="tree"), 4)[1:3] == ("tree", "verify[7]")


def test_what_a_request_asks_for_comes_first(plan):
    told = priced(plan, (8, "chain", 3, 90.0))
    assert choose_round(told, SamplingParams(bucket=2), 4)[1:3] == ("tree", "verify[2]")
    assert choose_round(told, SamplingParams(speculate=False), 4) == PLAIN


def test_what_the_plan_lacks_is_refused(plan):
    with pytest.raises(PromptError, match=r"bucket = 5: this plan has buckets 2, 3, 7"):
        choose_round(plan, SamplingParams(bucket=5), 4)
    chains = plan_of([2, 3], "chain")
    assert choose_round(chains, SamplingParams(), 4)[1:3] == ("chain", "verify[3]")
    with pytest.raises(PromptError, match="this plan has chains only"):
        choose_round(chains, SamplingParams(shape="tree"), 4)
