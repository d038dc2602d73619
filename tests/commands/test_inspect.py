"""`inspect` on the command line: the list of segments, IR as text, what passes did, and the arena as a picture."""

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from support.models import qwen_spec, small_qwen, write_toml

from ddtree_compile.cli import main
from ddtree_compile.compiler import compile_spec
from ddtree_compile.ir.text import parse_graph
from ddtree_compile.passes import PASSES
from ddtree_compile.plan import Plan
from ddtree_compile.plan_json import to_json

SEGMENT = "verify[9]"


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inspect")
    return write_toml(directory / "spec.toml", small_qwen(directory))


@pytest.fixture(scope="module")
def compiled(spec: Path) -> Plan:
    return compile_spec(qwen_spec(spec.parent))


@pytest.fixture(scope="module")
def plan(spec: Path, compiled: Plan) -> Path:
    path = spec.parent / "plan.json"
    path.write_text(to_json(compiled))
    return path


def printed(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert main(["inspect", *map(str, args)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def failed(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    code = main(["inspect", *map(str, args)])
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return code, err


def test_it_lists_every_segment(spec: Path, plan: Path, compiled: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(printed(capsys, spec, "--json"))
    assert [row["name"] for row in rows] == [segment.name for segment in compiled.segments]
    assert all(row["bound_met"] == (row["arena"] == row["lower_bound"]) for row in rows)
    assert json.loads(printed(capsys, plan, "--json")) == rows
    table = printed(capsys, spec)
    assert "verify[9]" in table and "pick[greedy]" in table


def test_a_segment_is_text(spec: Path, plan: Path, compiled: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, spec, "--segment", SEGMENT)
    assert parse_graph(text) == compiled.segment(SEGMENT).graph
    assert printed(capsys, plan, "--segment", SEGMENT) == text
    assert json.loads(printed(capsys, plan, "--segment", SEGMENT, "--json"))["graph"] == text.splitlines()


def test_after_a_pass(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("logical", "fuse", "stage")
    after = {name: printed(capsys, spec, "--segment", SEGMENT, "--after", name) for name in names}
    assert " @3" in after["stage"] and " @3" not in after["fuse"] and " head_store(" in after["fuse"]
    assert " head_store(" not in after["logical"]
    assert after["stage"] == printed(capsys, spec, "--segment", SEGMENT)
    code, err = failed(capsys, spec, "--segment", SEGMENT, "--after", "shake")
    assert code == 2 and "there are logical, absorb, " in err


def test_diffs_name_every_pass(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, spec, "--segment", SEGMENT, "--diff")
    headings = [line.split()[1].rstrip(":") for line in text.splitlines() if line.startswith("== ")]
    assert headings == [name for name, _ in PASSES]
    alone = printed(capsys, spec, "--segment", SEGMENT, "--diff", "--after", "fuse")
    assert alone.startswith("== fuse: ") and alone in text and "\n-" in alone and "\n+" in alone
    data = json.loads(printed(capsys, spec, "--segment", SEGMENT, "--diff", "--json"))
    assert [each["pass"] for each in data["passes"]] == [name for name, _ in PASSES]


def test_the_arena_is_drawn(spec: Path, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = printed(capsys, spec, "--segment", SEGMENT, "--arena")
    assert "lower bound" in picture and "┤" in picture
    assert printed(capsys, plan, "--segment", SEGMENT, "--arena") == picture
    assert "no temporaries" in printed(capsys, spec, "--segment", "tree", "--arena")
    svg = tmp_path / "arena.svg"
    assert printed(capsys, plan, "--segment", SEGMENT, "--svg", svg) == ""
    assert ET.fromstring(svg.read_text()).tag.endswith("svg")
    assert list(tmp_path.iterdir()) == [svg]


def test_errors(spec: Path, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = failed(capsys, spec, "--segment", "verify9")
    assert code == 2 and "did you mean verify[9]?" in err
    for flag in (("--after", "fuse"), ("--diff",), ("--arena",), ("--svg", tmp_path / "a.svg")):
        code, err = failed(capsys, spec, *flag)
        assert code == 2 and "needs --segment" in err
    assert failed(capsys, plan, "--segment", SEGMENT, "--diff")[0] == 2
    assert failed(capsys, plan, "--segment", SEGMENT, "--target", tmp_path)[0] == 2
    assert failed(capsys, tmp_path / "no.json")[0] == 3
    bad = tmp_path / "bad.json"
    bad.write_bytes(b"\xff{}")
    assert failed(capsys, bad)[0] == 3
    bad.write_text("{}")
    assert failed(capsys, bad)[0] == 3
    assert failed(capsys, tmp_path / "no.toml")[0] == 2
    assert failed(capsys, spec, "--segment", SEGMENT, "--svg", tmp_path)[0] == 2


def test_a_plan_is_known_by_what_it_holds(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan -o my.plan` wrote it, and `inspect my.plan` said that it was no valid TOML."""
    path = tmp_path / "my.plan"
    path.write_text(plan.read_text())
    assert main(["inspect", str(path)]) == 0
    assert "verify[" in capsys.readouterr().out
