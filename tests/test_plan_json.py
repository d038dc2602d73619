"""Plan files: the way back is exact, equal plans give equal bytes, and what is changed by hand is found."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.models import qwen_spec

from ddtree_compile.compiler import compile_spec
from ddtree_compile.errors import BundleError
from ddtree_compile.plan_json import from_json, to_json


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen")


@pytest.fixture(scope="module")
def text(directory: Path) -> str:
    return to_json(compile_spec(qwen_spec(directory)))


def test_it_reads_back_equal(directory: Path, text: str) -> None:
    plan = compile_spec(qwen_spec(directory))
    again = from_json(text, "plan.json")
    assert again == plan
    assert to_json(again) == text == to_json(plan)


def test_random_weights_read_back_equal(directory: Path) -> None:
    spec = qwen_spec(directory)
    model = spec.model.model_copy(update={"weights": "random", "seed": 7})
    plan = compile_spec(spec.model_copy(update={"model": model}))
    assert from_json(to_json(plan), "plan.json") == plan


def test_a_diff_of_it_is_readable(text: str) -> None:
    data = json.loads(text)
    assert text.endswith("}\n") and max(map(len, text.splitlines())) < 2000
    assert all(isinstance(line, str) for segment in data["segments"] for line in segment["graph"])
    assert len([line for line in text.splitlines() if '"nodes"' in line]) == len(data["report"]["buckets"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no format number"),
        ("{}", "no format number"),
        ('{"format": 2}', "format 2 is not 1"),
        ('{"format": "1"}', "format '1' is not 1"),
        ('{"format": 1}', "spec is missing"),
    ],
)
def test_what_is_no_plan(text: str, said: str) -> None:
    with pytest.raises(BundleError, match=f"^there.json: .*{said}") as caught:
        from_json(text, "there.json")
    assert "\n" not in str(caught.value)


def _verify(data: dict[str, Any]) -> dict[str, Any]:
    return next(segment for segment in data["segments"] if segment["graph"][0].startswith("graph verify"))


def _offset(data: dict[str, Any], value: Any) -> None:
    at = _verify(data)["offsets"][1]["at"]
    at[next(iter(at))] = value


def _unmake(data: dict[str, Any], key: str) -> None:
    del data[key]


def _graph(data: dict[str, Any], old: str, new: str) -> None:
    segment = _verify(data)
    assert any(old in line for line in segment["graph"])
    segment["graph"] = [line.replace(old, new, 1) for line in segment["graph"]]


def _place(data: dict[str, Any], value: Any) -> None:
    data["spaces"]["state"]["places"]["length"] = value


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "offset outside": (lambda d: _offset(d, 1 << 40), "outside the arena"),
    "offset unaligned": (lambda d: _offset(d, 3), "not aligned"),
    "offset negative": (lambda d: _offset(d, -256), "whole number"),
    "offset text": (lambda d: _offset(d, "0"), "whole number"),
    "arena smaller": (lambda d: _verify(d).update(temp_bytes=256), "outside the arena|below"),
    "bound": (lambda d: _verify(d).update(lower_bound=256), "lower_bound = 256"),
    "arena": (lambda d: d.update(arena=256), "arena = 256"),
    "no arena": (lambda d: _unmake(d, "arena"), "arena is missing"),
    "no weights": (lambda d: _unmake(d, "weights"), "weights is missing"),
    "weights empty": (lambda d: d.update(weights=[]), "no weight"),
    "weights a number": (lambda d: d.update(weights=3), "weights must be a list"),
    "recipe": (lambda d: d["weights"][0]["weights"][0].update(recipe={"run": "me"}), "unknown recipe"),
    "layout": (lambda d: d["weights"][0]["weights"][0].update(layout="zip"), "unknown layout"),
    "split": (lambda d: d["weights"][0]["weights"][0].update(split=9), "none of its dimensions"),
    "type": (lambda d: d["weights"][0]["weights"][0].update(type="bf17[3]"), "expected one such as"),
    "graph": (lambda d: _graph(d, "= rms_norm(", "= rms_form("), "no record has this kind"),
    "graph text": (lambda d: _graph(d, "graph verify", "graphs verify"), "line 1: expected `graph`"),
    "segment gone": (lambda d: d["segments"].remove(_verify(d)), "segment verify.* is missing"),
    "place": (lambda d: _place(d, [0, "i32[1]"]), "overlaps"),
    "place type": (lambda d: _place(d, [256, "f32[1]"]), "no place that large"),
    "place shape": (lambda d: _place(d, 3), "."),
    "space": (lambda d: d["spaces"].update(attic={"size": 0, "places": {}}), "attic"),
    "spec": (lambda d: d["spec"]["tree"].update(buckets=[]), "tree.buckets"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_by_hand_is_found(text: str, name: str) -> None:
    data = json.loads(text)
    change, said = CHANGES[name]
    change(data)
    with pytest.raises(BundleError, match=said) as caught:
        from_json(json.dumps(data), "plan.json")
    assert str(caught.value).startswith("plan.json: ") and "\n" not in str(caught.value)
