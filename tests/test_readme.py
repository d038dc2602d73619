"""What the README shows was printed by the code: everything but the figures of speed."""

import re
from pathlib import Path

import pytest
import torch

from ddtree_compile.cli import main

ROOT = Path(__file__).parent.parent
SHOWN_ON = "AVX512"
TIMED = re.compile(r"^(speed|seconds) |[│┃] (plain|chain|tree) +[│┃] \d+ +[│┃] \d")  # lines that hold seconds


def blocks() -> list[tuple[list[str], list[str]]]:
    """Each fenced `$ ddtree-compile ...` block: the command's arguments, and the lines shown below it."""
    found = re.findall(
        r"^```\n\$ ddtree-compile (.*)\n([^`]*)```$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE
    )
    return [(command.split(), shown.splitlines()) for command, shown in found]


@pytest.mark.parametrize(("command", "shown"), blocks(), ids=lambda value: " ".join(value)[:20])
def test_the_readme_shows_what_the_command_prints(command, shown, capsys, monkeypatch):
    if command[0] == "run" and torch.backends.cpu.get_cpu_capability() != SHOWN_ON:
        pytest.skip("another kind of CPU may decide a near tie otherwise and write another text")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "110")
    assert main(command) == 0
    out, err = capsys.readouterr()
    printed = iter([line.rstrip() for line in (out + err).splitlines()])
    for line in shown:
        if line.strip("─") not in ("", "...") and not TIMED.search(line):
            assert line.rstrip() in printed, f"not printed, or not in this order: {line}"


def test_the_readme_has_these_blocks():
    assert [command[0] for command, _ in blocks()] == ["run", "run", "plan"]
