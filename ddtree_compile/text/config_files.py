"""The small JSON files beside a checkpoint's weights.

A directory and a file name enter; a dict leaves, empty where there is no such file. What cannot be read as text or as a
JSON object is a CheckpointError that names the file.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ddtree_compile.errors import CheckpointError

TOKENIZER_CONFIG = "tokenizer_config.json"

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The keys of tokenizer_config.json that each name one special token; chat templates see them under these names."""


def read_text(path: Path) -> str:
    """The file as UTF-8 text. Raises CheckpointError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as UTF-8 text ({error}); fetch the file again") from error


def read_object(directory: Path, name: str) -> dict[str, Any]:
    """The JSON object in `directory / name`, or an empty dict if there is no such file. Raises CheckpointError."""
    path = directory / name
    if not path.exists():
        return {}
    try:
        value: object = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}; fetch the file again")
    return cast(dict[str, Any], value)


def is_integer(value: object) -> bool:
    """Whether a JSON value is an integer; JSON's true is not one, though Python's is."""
    return isinstance(value, int) and not isinstance(value, bool)


def token_text(value: object, path: Path, key: str) -> str | None:
    """The text of a token as tokenizer_config.json writes it: a string, an object with `content`, or null (None).

    Raises CheckpointError that names `path` and `key` for anything else.
    """
    content: object = cast(Mapping[str, object], value).get("content") if isinstance(value, dict) else value
    if content is None and not isinstance(value, dict):
        return None
    if not isinstance(content, str):
        raise CheckpointError(f"{path}: {key} must be a string or an object with a string `content`; correct the file")
    return content


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, under transformers' rule for old checkpoints: one without added_tokens_decoder takes its
    named special tokens from special_tokens_map.json. Raises CheckpointError."""
    config = read_object(directory, TOKENIZER_CONFIG)
    if "added_tokens_decoder" in config:
        return config
    return config | read_object(directory, "special_tokens_map.json")
