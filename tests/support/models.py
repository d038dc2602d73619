"""Small models' configs on disk, made from the shipped ones: enough to plan, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddtree_compile.spec import CompileSpec

PLANS = Path(__file__).parents[2] / "plans"
CONFIGS = PLANS / "configs"

QWEN = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "max_window_layers": 3,
}  # fmt: skip
QWEN_DRAFTER = {
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "max_window_layers": 2, "block_size": 5,
    "layer_types": ["full_attention"] * 2, "num_target_layers": 3,
    "dflash_config": {"mask_token_id": 319, "target_layer_ids": [0, 2]},
}  # fmt: skip


def write_config(directory: Path, name: str, changes: dict[str, Any]) -> Path:
    """The shipped config `name` with `changes`, as `directory`/config.json."""
    config = json.loads((CONFIGS / name / "config.json").read_text())
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


def small_qwen(directory: Path, **changes: Any) -> dict[str, Any]:
    """A spec's tables for a small Qwen3 with its drafter; `changes` are whole tables."""
    target = write_config(directory / "target", "qwen3-8b", QWEN)
    drafter = write_config(directory / "drafter", "qwen3-8b-dflash-b16", QWEN_DRAFTER)
    tables: dict[str, Any] = {
        "model": {"target": str(target), "drafter": str(drafter)},
        "tree": {"buckets": [3, 4, 9]},
        "cache": {"max_seq_len": 256},
        "prefill": {"chunks": [8]},
    }
    return tables | changes


def qwen_spec(directory: Path, **changes: Any) -> CompileSpec:
    return CompileSpec.parse(small_qwen(directory, **changes))


def write_toml(path: Path, tables: dict[str, Any]) -> Path:
    """A spec file: flat tables of strings, numbers, booleans and lists, which TOML writes as JSON does."""
    lines = [
        line
        for table, keys in tables.items()
        for line in (f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items()))
    ]
    path.write_text("\n".join(lines) + "\n")
    return path
