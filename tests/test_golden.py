"""The shipped plans: each spec compiles, byte for byte, to the plan.json beside it.

After a change that is meant to change a plan: ddtree-compile plan plans/X/spec.toml -o plans/X/plan.json, and read
the diff.
"""

import pytest
from support.models import PLANS

from ddtree_compile.compiler import compile_spec
from ddtree_compile.plan_json import from_json, to_json
from ddtree_compile.spec import read_spec

SHIPPED = sorted(path.parent.name for path in PLANS.glob("*/spec.toml"))


def test_all_plans_ship() -> None:
    assert SHIPPED == ["kimi-k2.6-8x-h200", "kimi-k2.6-8x-rtx-pro-6000", "qwen3-8b-h200", "tiny"]


@pytest.mark.parametrize("name", SHIPPED)
def test_it_compiles_to_its_golden_file(name: str) -> None:
    plan = compile_spec(read_spec(PLANS / name / "spec.toml"))
    made, golden = to_json(plan).splitlines(), (PLANS / name / "plan.json").read_text().splitlines()
    changed = [(i, a[:200], b[:200]) for i, (a, b) in enumerate(zip(made, golden, strict=False), 1) if a != b]
    assert not changed, f"{len(changed)} lines differ, the first is line {changed[0][0]}: {changed[0][1:]}"
    assert len(made) == len(golden)


@pytest.mark.parametrize("name", SHIPPED)
def test_it_reads_back_to_the_same_bytes_and_fits(name: str) -> None:
    text = (PLANS / name / "plan.json").read_text()
    plan = from_json(text, name)
    assert to_json(plan) == text
    assert len(text) < 1_500_000
    assert plan.report["memory"]["fits"]
    assert all(plan.report["arena_bound_met"].values())
    assert {segment.name for segment in plan.segments} == set(plan.report["arena_bound_met"])
