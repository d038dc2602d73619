"""Plan files that are not what `plan -o` wrote."""

import json
from collections.abc import Callable
from pathlib import Path

from case import Case, Change, config, cut, replace, write

INSPECT = "inspect {root}/plan.json"


def _bundle(root: Path) -> None:
    (root / "bundle.json").mkdir()
    (root / "bundle.json" / "plan.json").write_bytes((root / "plan.json").read_bytes())


def _move(to: Callable[[int], int]) -> Change:
    """The first temporary of the first segment that has one, put elsewhere."""

    def change(root: Path) -> None:
        path = root / "plan.json"
        data = json.loads(path.read_text())
        row = next(segment["offsets"] for segment in data["segments"] if segment["offsets"])[0]["at"]
        name = next(iter(row))
        row[name] = to(row[name])
        path.write_text(json.dumps(data))

    return change


def _case(name: str, says: str, *does: Change, args: str = INSPECT) -> Case:
    return Case(name, args, 3, says, does)


PLANS = [
    _case("no file", "none.json: no such file; `ddtree-compile plan", args="inspect {root}/none.json"),
    _case("a directory", "bundle.json: cannot be read: Is a directory", _bundle, args="inspect {root}/bundle.json"),
    _case("not JSON", "plan.json: not JSON.*compile the plan again", write("plan.json", "hello")),
    _case("empty", "plan.json: not JSON", write("plan.json", "")),
    _case("not UTF-8", r"plan.json: not UTF-8 text \(byte 0\)", write("plan.json", b"\xff")),
    _case("cut short", "plan.json: not JSON.*compile the plan again", cut("plan.json", -1000)),
    _case("nested without end", "plan.json: not JSON", write("plan.json", "[" * 100_000)),
    _case("another file", "not a plan .*name a file that `plan -o` wrote", write("plan.json", '{"a": 1}')),
    _case("a list", "not a plan", write("plan.json", "[1]")),
    _case("another format", "format 99 is not 1.*compile the plan again", config("plan.json", format=99)),
    _case("a format of text", "format '1' is not 1", config("plan.json", format="1")),
    _case("no segments", "segment verify.* is missing; compile", config("plan.json", segments=[])),
    _case("segments of text", "segments must be a list", config("plan.json", segments="x")),
    _case("segments of numbers", r"segments\[0\]", config("plan.json", segments=[1])),
    _case("no weights", "no weight .*compile the plan again", config("plan.json", weights=[])),
    _case("weights of numbers", r"weights\[0\]", config("plan.json", weights=[1])),
    _case("weights of no layer", r"weights\[0\].layers must be the first", config("plan.json", weights=[{"layers": [],
         "weights": []}])),
    _case("weights of layers without end", r"weights\[0\].layers must be", config("plan.json", weights=[{"layers": [0,
         10**12], "weights": []}])),
    _case("a weight of text", r"weights\[0\] holds something that is no weight", config("plan.json",
         weights=[{"layers": None, "weights": ["x"]}])),
    _case("a weight without recipe", r"weights\[0\]: type of w is missing", config("plan.json",
         weights=[{"layers": None, "weights": [{"name": "w"}]}])),
    _case("a place without type", "length must be an offset and a type", config("plan.json",
         spaces__state__places__length=[0])),
    _case("an offset off by one", "plan.json: .*align.*compile the plan again", _move(lambda offset: offset + 1)),
    _case("an offset outside", "plan.json: .*outside.*compile the plan again", _move(lambda offset: 1 << 40)),
    _case("another arena", "arena = 7 is not the", config("plan.json", arena=7)),
    _case("no arena", "arena must be a whole number", config("plan.json", arena=None)),
    _case("an unknown op", r"draft/\S+ \(liner\): no record has this kind.*compile the plan again",
         replace("plan.json", " = linear(", " = liner(")),
    _case("another spec", "spec: unknown key tree.x.*compile", config("plan.json", spec__tree__x=1)),
    _case("spaces of text", "spaces must be an object", config("plan.json", spaces="x")),
    _case("an unknown space", "plan.json: .*compile the plan again", config("plan.json", spaces__moon={"size": 0,
         "places": {}})),
    _case("no places", "places", config("plan.json", spaces__state={"size": 0, "places": {}})),
    _case("no report", "report must be an object; compile the plan again", config("plan.json", report=None)),
]  # fmt: skip
