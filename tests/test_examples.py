"""The examples run as they stand, in small sizes, and print what their docstrings promise."""

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


@pytest.fixture
def example(monkeypatch, capsys):
    """Run examples/NAME with arguments; its output."""

    def run(name: str, *args: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_generate(example):
    out = example("generate.py", "def add(a, b):", 8)
    assert out.startswith("def add(a, b):")
    assert len(re.findall(r"^-- (length|stop): \d+ rounds, \d\.\d\d tokens a round$", out, re.MULTILINE)) == 2


def test_sessions_reuse_what_did_not_change(example):
    out = example("sessions.py", 4)
    cached = re.findall(r"^-- (\d+) of (\d+) tokens were cached$", out, re.MULTILINE)
    assert len(cached) == 3
    assert int(cached[0][0]) == 0
    assert all(int(part) > int(whole) // 2 for part, whole in cached[1:])


def test_plan_needs_configs_only(example):
    out = example("plan_kimi.py", ROOT / "plans" / "tiny" / "spec.toml")
    assert "fits = True" in out
    assert "has no [acceptance]" in out


@pytest.mark.full
def test_plan_kimi(example):
    out = example("plan_kimi.py")
    assert out.startswith("8 x rtx-pro-6000\n")
    assert len(re.findall(r"context \d+: best is a (tree|chain) of \d+ nodes", out)) == 5
