"""Which round a request gets: its segments, from what it asks for and what the plan expects to be fastest."""

from __future__ import annotations

from typing import Any, Final

from ddtree_compile.errors import PromptError
from ddtree_compile.plan import Plan
from ddtree_compile.runtime.sampling import SamplingParams

PLAIN: Final = ("plain", "pick", "plain_commit")  # `pick` stands for the one that the round's requests need


def choose_round(plan: Plan, params: SamplingParams, context: int) -> tuple[str, ...]:
    """The segments of a request's rounds, in order. PromptError when the plan lacks what it asks for.

    What a request leaves open is what the plan expects to be fastest at `context` tokens; without an acceptance prior,
    a tree of the smallest bucket that holds the drafter's chain.
    """
    if not params.speculate:
        return PLAIN
    trees = plan.spec["tree"]["shape"] == "tree"
    if params.shape == "tree" and not trees:
        raise PromptError('sampling parameter shape = "tree": this plan has chains only (tree.shape = "chain")')
    shape, bucket = params.shape, params.bucket
    if bucket is None and (best := _fastest(plan, context, shape)):
        shape, bucket = best["shape"], best["nodes"]
    if bucket is None:
        horizon = int(plan.model["block"]) - 1
        bucket = min((b for b in plan.buckets if b >= horizon), default=max(plan.buckets))
    if bucket not in plan.buckets:
        raise PromptError(
            f"sampling parameter bucket = {bucket}: this plan has buckets {', '.join(map(str, plan.buckets))}"
        )
    return ("draft", shape or ("tree" if trees else "chain"), f"verify[{bucket}]", "pick", "commit")


def _fastest(plan: Plan, context: int, shape: str | None) -> dict[str, Any] | None:
    """The priced round of `shape` (of any, if None) with the most tokens a second at the next priced context."""
    rows = [
        row
        for row in plan.report["buckets"]
        if row["tokens_per_second"] and row["shape"] != "plain" and shape in (None, row["shape"])
        if row["nodes"] in plan.buckets
    ]
    longest = max((row["context"] for row in rows), default=0)
    at = min((row["context"] for row in rows if row["context"] >= context), default=longest)
    return max((row for row in rows if row["context"] == at), key=lambda row: row["tokens_per_second"], default=None)
