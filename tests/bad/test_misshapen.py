"""Every tensor of both models in every wrong shape: none is loaded, each error names it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddtree_compile.compiler import compile_spec, load
from ddtree_compile.errors import CheckpointError
from ddtree_compile.plan import Plan
from ddtree_compile.spec import CompileSpec, read_spec

SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a row more": lambda t: torch.cat([t, t[:1]]),
    "a row less": lambda t: t[:-1],
    "a column more": lambda t: torch.cat([t, t[..., :1]], -1),
    "a column less": lambda t: t[..., :-1],
    "turned": lambda t: t.T if t.dim() > 1 and t.shape[0] != t.shape[1] else t[None],
    "flat": lambda t: t.flatten() if t.dim() > 1 else t[:, None],
    "folded": lambda t: t.view(2, -1),
    "a scalar": lambda t: t.flatten()[0],
    "empty": lambda t: t[:0],
    "of one more dimension": lambda t: t[..., None],
}


def refusal(spec: CompileSpec, plan: Plan) -> str | None:
    """The error that loading gives; None if there is none."""
    try:
        load(spec, plan)
    except CheckpointError as error:
        return str(error)
    return None


def check(root: Path, spec: str, sample: int | None) -> None:
    made = read_spec(root / spec)
    plan = compile_spec(made)
    load(made, plan)
    tried = 0
    for directory in (made.target_dir, made.drafter_dir):
        path = directory / "model.safetensors"
        tensors = load_file(path)
        cases = [(name, how) for name in sorted(tensors) for how in SHAPES]
        for name, how in cases if sample is None else random.Random(1).sample(cases, sample):
            try:
                bad = SHAPES[how](tensors[name]).contiguous()
            except RuntimeError:  # an odd number of elements cannot be folded
                continue
            if bad.shape == tensors[name].shape:
                continue
            save_file({**tensors, name: bad.clone()}, path)
            line = refusal(made, plan)
            assert line is not None, f"{name} {how} was loaded"
            assert "\n" not in line
            assert name.rpartition(".")[0] in line, (name, how, line)
            tried += 1
        save_file(tensors, path)
    assert tried > 20


@pytest.mark.parametrize("spec", ["spec.toml", "kimi.toml"])
def test_some(root: Path, spec: str) -> None:
    check(root, spec, 40)


@pytest.mark.full
@pytest.mark.parametrize("spec", ["spec.toml", "kimi.toml"])
def test_all(root: Path, spec: str) -> None:
    check(root, spec, None)
