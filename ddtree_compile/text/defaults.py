"""What a checkpoint says of its own generation: where it stops, and how its makers sample.

generation_config.json, the model's config and the tokenizer enter; a `Defaults` leaves. Sampling values are None where
the checkpoint does not say; whether to follow them is the caller's decision.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ddtree_compile.errors import CheckpointError
from ddtree_compile.text.chat import find_chat_template
from ddtree_compile.text.config_files import is_integer, read_object
from ddtree_compile.text.tokenizer import Tokenizer

GENERATION_CONFIG = "generation_config.json"
CONFIG = "config.json"

END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
    "<|end_of_msg|>",
    "<|endoftext|>",
)
"""Tokens that close a turn in the chat formats in use. One counts only if the checkpoint's own template writes it."""


@dataclass(frozen=True)
class Defaults:
    """`stop_token_ids` end a sequence, most authoritative source first; the rest are sampling values or None (unsaid).

    `top_k` 0 is no top-k filter.
    """

    stop_token_ids: tuple[int, ...]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    do_sample: bool | None = None


def load_defaults(directory: Path, config: Mapping[str, Any], tokenizer: Tokenizer | None) -> Defaults:
    """The defaults of the model in `directory`, whose config.json is `config` and whose tokenizer is `tokenizer`.

    The stop tokens are the union of eos_token_id in generation_config.json, in `config` and in its text_config, the
    tokenizer's end token, and the end-of-turn tokens that the chat template writes and the vocabulary has.
    Raises CheckpointError that names file and key.
    """
    generation = read_object(directory, GENERATION_CONFIG)
    path = directory / GENERATION_CONFIG
    stops = [
        *_token_ids(generation, path, "eos_token_id"),
        *_config_stops(config, directory / CONFIG),
        *_tokenizer_stops(directory, tokenizer),
    ]
    do_sample: object = generation.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise CheckpointError(f"{path}: do_sample must be true or false; correct the file")
    top_k = _number(generation, path, "top_k", -1, None)
    if top_k is not None and not top_k.is_integer():
        raise CheckpointError(f"{path}: top_k must be an integer; correct the file")
    return Defaults(
        stop_token_ids=tuple(dict.fromkeys(stops)),
        temperature=_number(generation, path, "temperature", 0, None),
        top_p=_number(generation, path, "top_p", 0, 1),
        # -1 is vLLM's way to write no filter, and some checkpoints have it.
        top_k=None if top_k is None else max(0, int(top_k)),
        min_p=_number(generation, path, "min_p", 0, 1),
        do_sample=do_sample,
    )


def _config_stops(config: Mapping[str, Any], path: Path) -> list[int]:
    text_config: object = config.get("text_config")
    inner = cast(Mapping[str, Any], text_config if isinstance(text_config, Mapping) else {})
    return [
        *_token_ids(config, path, "eos_token_id"),
        *_token_ids(inner, path, "eos_token_id", prefix="text_config."),
    ]


def _tokenizer_stops(directory: Path, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        return []
    found = find_chat_template(directory)
    source = found[0] if found is not None else ""
    stops = [tokenizer.eos_token_id, *(tokenizer.token_id(text) for text in END_OF_TURN if text in source)]
    return [token_id for token_id in stops if token_id is not None]


def _token_ids(table: Mapping[str, Any], path: Path, key: str, prefix: str = "") -> list[int]:
    value: object = table.get(key)
    if value is None:
        return []
    ids = cast(list[object], value) if isinstance(value, list) else [value]
    for token_id in ids:
        if not is_integer(token_id) or cast(int, token_id) < 0:
            raise CheckpointError(f"{path}: {prefix}{key} must be a token id or a list of them; correct the file")
    return cast(list[int], ids)


def _number(table: Mapping[str, Any], path: Path, key: str, low: float, high: float | None) -> float | None:
    value: object = table.get(key)
    if value is None:
        return None
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    if number is None or not low <= number <= (float("inf") if high is None else high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise CheckpointError(f"{path}: {key} must be a number {bounds}; correct the file")
    return float(number)
