"""A model directory's `config.json` in, a frozen record out: `read_target` and `read_drafter`.

`target_from` and `drafter_from` do the same from a parsed dictionary. Whatever a config asks for and we lack is one
`SpecError` that names the file, the key, the value and what is supported; nothing is ignored. The records live in
`config_types` and are exported here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddtree_compile.errors import SpecError
from ddtree_compile.models.config_dflash import drafter_from
from ddtree_compile.models.config_kimi import kimi_from, kimi_k25_from
from ddtree_compile.models.config_qwen3 import qwen3_from
from ddtree_compile.models.config_types import (
    DFlashConfig,
    KimiConfig,
    Quantisation,
    Qwen3Config,
    Rope,
    TargetConfig,
)

__all__ = [
    "DFlashConfig",
    "KimiConfig",
    "Quantisation",
    "Qwen3Config",
    "Rope",
    "TargetConfig",
    "drafter_from",
    "load_config",
    "read_drafter",
    "read_target",
    "target_from",
]

# The one table of targets: `model_type` to its reader.
TARGETS: dict[str, Callable[[Mapping[str, Any], str], TargetConfig]] = {
    "deepseek_v3": kimi_from,
    "kimi_k2": kimi_from,
    "kimi_k25": kimi_k25_from,
    "qwen3": qwen3_from,
}


def read_target(directory: Path) -> TargetConfig:
    """The target's config from `directory/config.json`. SpecError says what is missing, wrong or unsupported."""
    path = directory / "config.json"
    return target_from(load_config(path), str(path))


def target_from(config: Mapping[str, Any], where: str) -> TargetConfig:
    """As `read_target`, from a parsed config; `where` names it in errors."""
    model_type = config.get("model_type")
    reader = TARGETS.get(model_type) if isinstance(model_type, str) else None
    if reader is None:
        raise SpecError(f"{where}: model_type = {model_type!r} is not supported (supported: {', '.join(TARGETS)})")
    return reader(config, where)


def read_drafter(
    directory: Path, target: TargetConfig, *, rope_amplitude: float | None = None, window: int | None = None
) -> DFlashConfig:
    """The DFlash drafter's config from `directory/config.json`, checked against the target it drafts for.

    `rope_amplitude` replaces what the config says cos and sin are multiplied by; `window` caps the context tokens
    every layer sees. SpecError as for `read_target`.
    """
    path = directory / "config.json"
    config = load_config(path)
    own_mask = directory / "mask_embedding.pt"
    if own_mask.exists():
        raise SpecError(f"{own_mask}: a drafter with its own mask embedding is not supported (supported: the target's)")
    return drafter_from(config, target, str(path), rope_amplitude=rope_amplitude, window=window)


def load_config(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; SpecError when there is none."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file; a model directory needs a config.json") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise SpecError(f"{path}: holds a {type(config).__name__}, not a JSON object")
    return config
