"""Good files, made once: a small Qwen3 and an int4 Kimi with their drafters, a spec for each, and a plan."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import KIMI, QWEN3, make_drafter, make_kimi, make_qwen3

from ddtree_compile.cli import main

GROUP = 32
SPEC = """\
[model]
target = "{0}target"
drafter = "{0}drafter"

[tree]
buckets = [3, 5]

[cache]
max_seq_len = 64

[prefill]
chunks = [4]
"""
QUANTISED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*"],
}


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """spec.toml with target/ and drafter/, kimi.toml with kimi-target/ and kimi-drafter/, plan.json of spec.toml."""
    root = tmp_path_factory.mktemp("good")
    sizes = {"num_hidden_layers": 2}
    make_qwen3(root / "target", **sizes)
    make_kimi(root / "kimi-target", **sizes, n_routed_experts=4, num_experts_per_tok=2)
    _quantise(root / "kimi-target")
    for prefix, base in (("", QWEN3), ("kimi-", KIMI)):
        make_drafter(root / f"{prefix}drafter", base | sizes, num_hidden_layers=1, block_size=4)
        (root / f"{prefix or 'spec'}.toml".replace("-", "")).write_text(SPEC.format(prefix))
    assert main(["plan", str(root / "spec.toml"), "-o", str(root / "plan.json"), "--json"]) == 0
    return root


@pytest.fixture
def root(good: Path, tmp_path: Path) -> Path:
    """A copy of the good files to spoil."""
    return Path(shutil.copytree(good, tmp_path / "files"))


def _quantise(directory: Path) -> None:
    """Random codes and scales in the place of the routed experts' weights."""
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if ".mlp.experts." in name]:
        n, k = tensors.pop(name).shape
        module = name.removesuffix(".weight")
        tensors[f"{module}.weight_packed"] = torch.randint(-(1 << 31), 1 << 31, (n, k // 8)).to(torch.int32)
        tensors[f"{module}.weight_scale"] = 0.01 * torch.rand(n, k // GROUP).to(torch.bfloat16)
        tensors[f"{module}.weight_shape"] = torch.tensor([n, k], dtype=torch.int32)
    save_file(tensors, directory / "model.safetensors")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": QUANTISED}))
