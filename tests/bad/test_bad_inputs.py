"""Every bad input gets one clear line (what, where, what to do) and its exit code, and leaves nothing behind."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_checkpoints import CHECKPOINTS
from bad_configs import CONFIGS
from bad_plans import PLANS
from bad_prompts import FLAGS, PROMPTS
from bad_specs import SPECS
from case import Case

from ddtree_compile import Engine, compile_spec, embedded_spec, read_spec
from ddtree_compile.cli import main
from ddtree_compile.commands.source import read_plan
from ddtree_compile.errors import BundleError, CheckpointError, DdtreeError, DeviceError, PromptError, SpecError

TABLES = {
    "spec": SPECS, "config": CONFIGS, "checkpoint": CHECKPOINTS, "prompt": PROMPTS, "flag": FLAGS, "plan": PLANS,
}  # fmt: skip
CASES = [pytest.param(case, id=f"{table}: {case.name}") for table, cases in TABLES.items() for case in cases]
KINDS = {2: (SpecError, PromptError), 3: (CheckpointError, BundleError, DeviceError)}
LIBRARY: dict[str, Callable[[Path], object]] = {  # what does the same from Python
    "run": Engine.from_spec,
    "plan": lambda path: compile_spec(read_spec(path)),
    "inspect": read_plan,
}
LONGEST = 500  # characters of a line, beside the directory's own


def run(case: Case, root: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The line that a case's command line gets, after looking at everything else."""
    args = [arg.replace("{root}", str(root)) for arg in case.args.split(" ")]
    before = sorted(root.rglob("*"))
    code = main(args)
    out, err = capsys.readouterr()
    assert (code, out) == (case.code, ""), err
    assert err.startswith("error: ") and err.endswith("\n") and len(err.splitlines()) == 1
    assert "Traceback" not in err and "\x1b" not in err
    assert len(err.replace(str(root), "")) < LONGEST
    assert re.search(case.says, err), err
    assert sorted(root.rglob("*")) == before
    return err.removeprefix("error: ").removesuffix("\n")


def add_words(root: Path) -> None:
    """words.toml: the embedded target's files without its weights."""
    target = read_spec(embedded_spec()).target_dir
    shutil.copytree(target, root / "words", ignore=shutil.ignore_patterns("*.safetensors"))
    (root / "words.toml").write_text((root / "spec.toml").read_text().replace('"target"', '"words"'))


@pytest.mark.parametrize("case", CASES)
def test_one_line(case: Case, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "words" in case.args:
        add_words(root)
    case.prepare(root)
    line = run(case, root, capsys)
    if not case.library:
        return
    command, path, *_ = case.args.replace("{root}", str(root)).split(" ")
    with pytest.raises(DdtreeError) as caught:
        LIBRARY[command](Path(path))
    assert str(caught.value) == line
    assert caught.value.exit_code == case.code
    assert isinstance(caught.value, KINDS[case.code])


def test_the_good_files_are_good(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for spec in ("spec.toml", "kimi.toml"):
        assert main(["run", str(root / spec), "--token-ids", "1,2", "--max-new-tokens", "2"]) == 0
    assert main(["inspect", str(root / "plan.json")]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_names_are_unique_and_there_are_enough() -> None:
    names = [case.id for case in CASES]
    assert len(set(names)) == len(names) >= 60
