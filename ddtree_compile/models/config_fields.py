"""Typed, complete reading of a config dictionary: every key is read, known to be harmless, or refused by name.

`Fields` remembers what was read; `done` refuses the rest, since an ignored key is a wrong model. All errors are
`SpecError`s of one line: file, key, value, what is supported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from ddtree_compile.errors import SpecError

# Bookkeeping of transformers and of hubs, and switches of training or of text generation: none changes a logit.
_BOOKKEEPING: Final = """
    _attn_implementation _attn_implementation_autoset _commit_hash _experts_implementation _name_or_path
    add_cross_attention architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder is_encoder_decoder label2id
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_router_logits output_scores pad_token_id prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class
    top_k top_p torchscript transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    use_return_dict attention_dropout hidden_dropout dropout model_max_length
"""
HARMLESS: Final = frozenset(_BOOKKEEPING.split())

DTYPES: Final = {"bfloat16": "bf16", "float32": "f32"}

_REQUIRED: Final = object()

MOST_LAYERS: Final = 1000
LARGEST: Final = (1 << 31) - 1  # of any size; a mistake of hand beyond it would overflow shapes


class Fields:
    """One JSON object being read. `where` names it in errors."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where
        self.seen: set[str] = set()

    def has(self, key: str) -> bool:
        """Is `key` there with something other than null."""
        return self.values.get(key) is not None

    def fail(self, key: str, why: str) -> SpecError:
        """The error for `key` as it stands; the caller raises it."""
        return SpecError(f"{self.where}: {key} = {_short(self.values.get(key))} {why}")

    def raw(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of `key`; null and absent are `default`, or an error without one."""
        self.seen.add(key)
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise SpecError(f"{self.where}: {key} is missing; it is required")
        return default

    def integer(self, key: str, default: Any = _REQUIRED, low: int = 1, high: int | None = None) -> int:
        """A whole number in low .. high."""
        value = self.raw(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, "is not a whole number")
        if value < low or (high is not None and value > high):
            raise self.fail(key, f"is out of range (from {low}{'' if high is None else f' to {high}'})")
        if value > LARGEST:
            raise self.fail(key, f"is out of range (at most {LARGEST})")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A finite number above 0."""
        value = self.raw(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, "is not a number")
        if not 0 < value < float("inf"):
            raise self.fail(key, "is out of range (above 0)")
        return float(value)

    def boolean(self, key: str, default: Any = _REQUIRED) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "is not true or false")
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        value = self.raw(key, default)
        if not isinstance(value, str):
            raise self.fail(key, "is not a string")
        return value

    def table(self, key: str, default: Any = _REQUIRED) -> Fields:
        """A nested object, with its own `where`."""
        value = self.raw(key, default)
        if not isinstance(value, Mapping):
            raise self.fail(key, "is not an object")
        return Fields(value, f"{self.where}: {key}")

    def listed(self, key: str, kind: type, default: Any = _REQUIRED) -> tuple[Any, ...]:
        """A list whose items are all of `kind` (int: no booleans)."""
        value = self.raw(key, default)
        if not isinstance(value, list | tuple):
            raise self.fail(key, "is not a list")
        if any(not isinstance(item, kind) or isinstance(item, bool) for item in value):
            raise self.fail(key, f"holds something that is not a {kind.__name__}")
        return tuple(value)

    def only(self, key: str, allowed: Iterable[Any], note: str = "") -> None:
        """`key` may be absent, null or one of `allowed`; anything else is something we lack."""
        self.seen.add(key)
        value = self.values.get(key)
        allowed = tuple(allowed)
        if value is None or any(type(value) is type(item) and value == item for item in allowed):
            return
        if isinstance(value, int | float) and not isinstance(value, bool) and value in allowed:
            return
        supported = ", ".join(repr(item) for item in allowed) if allowed else "absent"
        raise self.fail(key, f"is not supported (supported: {supported}){'; ' + note if note else ''}")

    def done(self, harmless: Iterable[str] = ()) -> None:
        """Refuses every key that was neither read nor known to be harmless, unless its value is empty or off."""
        for key in self.values:
            if key in self.seen or key in HARMLESS or key in harmless:
                continue
            if not _is_off(self.values[key]):
                raise self.fail(key, "is a key this version does not know; it may change the model, so it is refused")


def read_layers(fields: Fields) -> int:
    """`num_hidden_layers`, each of which is built."""
    layers = fields.integer("num_hidden_layers")
    if layers > MOST_LAYERS:
        raise fields.fail("num_hidden_layers", f"is out of range (from 1 to {MOST_LAYERS})")
    return layers


def read_dtype(*levels: Fields, default: str | None = None) -> str:
    """The IR's name of a model's dtype, spelt `dtype` or `torch_dtype`, from the first level that has it."""
    found: tuple[Fields, str] | None = None
    for fields in levels:
        for key in ("dtype", "torch_dtype"):
            fields.seen.add(key)
            if found is None and fields.has(key):
                found = (fields, key)
    if found is None:
        if default is not None:
            return default
        raise SpecError(f"{levels[0].where}: dtype is missing; it is required (supported: {', '.join(DTYPES)})")
    fields, key = found
    name = fields.text(key).removeprefix("torch.")
    if name not in DTYPES:
        raise fields.fail(key, f"is not supported (supported: {', '.join(DTYPES)})")
    return DTYPES[name]


def check_architecture(fields: Fields, supported: tuple[str, ...]) -> None:
    """`architectures`, when given, must name one of `supported`."""
    names = fields.listed("architectures", str, ())
    if names and not set(names) & set(supported):
        raise fields.fail("architectures", f"is not supported (supported: {', '.join(supported)})")


def _is_off(value: Any) -> bool:
    return value is None or (isinstance(value, bool | int | float | str | list | dict) and not value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
