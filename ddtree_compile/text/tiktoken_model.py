"""Kimi's `tiktoken.model`, read by the `tiktoken` library, as a codec.

A model directory and its tokenizer_config.json enter; a `TiktokenModel` leaves. The file is one `BASE64 RANK` line a
token. The split pattern, the 256 reserved ids behind the ranks and the chunking of long texts are those of Moonshot's
tokenization_kimi.py (Kimi K2, K2.5, K2.6), restated here since no code of a checkpoint runs.
"""

import base64
import binascii
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiktoken

from ddtree_compile.errors import CheckpointError
from ddtree_compile.text.config_files import TOKENIZER_CONFIG, token_text
from ddtree_compile.text.tokenizer_json import read_added_tokens

TIKTOKEN_MODEL = "tiktoken.model"
RESERVED_IDS = 256
"""Ids behind the ranks: the named special tokens, and `<|reserved_token_ID|>` for each that has no name."""

CHUNK_CHARACTERS = 400_000
"""The library overflows its stack on longer texts."""

RUN_CHARACTERS = 25_000
"""Runs of characters without a change between space and non-space cost quadratic time, so that they are cut."""

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


class TiktokenModel:
    """A loaded tiktoken.model with its special tokens; `special_ids` leaves out those that the config calls text."""

    is_byte_level = True

    def __init__(
        self,
        ranks: dict[bytes, int],
        names: dict[str, int],
        special_ids: frozenset[int],
        wrapping: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> None:
        self._names = names
        self._encoding = tiktoken.Encoding(
            name=TIKTOKEN_MODEL, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=names
        )
        self.special_ids = special_ids
        self.wrapping = wrapping
        self.vocab_size = self._encoding.max_token_value + 1

    def encode(self, text: str, special: bool) -> list[int]:
        """Ids of `text`. Without `special` no added token is recognised, as with Kimi's allow_special_tokens=False."""
        allowed = self._encoding.special_tokens_set if special else set[str]()
        pieces = (self._encoding.encode(p, allowed_special=allowed, disallowed_special=()) for p in split_long(text))
        return [token_id for piece in pieces for token_id in piece]

    def token_id(self, text: str) -> int | None:
        """The id of the token written so, or None."""
        if text in self._names:
            return self._names[text]
        try:
            return self._encoding.encode_single_token(text)
        except KeyError:
            return None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; a special token's are its name."""
        return self._encoding.decode_single_token_bytes(token_id)

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, bytes that are not UTF-8 replaced."""
        return self._encoding.decode(ids)


def split_long(text: str) -> Iterator[str]:
    """Cut `text` as Kimi does: into chunks of 400,000 characters, each where a run passes 25,000 characters.

    A run is a stretch of white space or of anything else (`str.isspace`); its length is counted anew in each chunk.
    """
    for start in range(0, len(text), CHUNK_CHARACTERS):
        chunk = text[start : start + CHUNK_CHARACTERS]
        cuts = [
            cut
            for run in re.finditer(r"\s+|\S+", chunk)
            for cut in range(run.start() + RUN_CHARACTERS, run.end(), RUN_CHARACTERS)
        ]
        for left, right in zip([0, *cuts], [*cuts, len(chunk)], strict=True):
            yield chunk[left:right]


def load_tiktoken_model(directory: Path, config: dict[str, Any]) -> TiktokenModel:
    """Read `directory`'s tiktoken.model with the added tokens of its tokenizer_config.json (`config`).

    Raises CheckpointError that names the file and the line or key at fault.
    """
    path = directory / TIKTOKEN_MODEL
    ranks = _read_ranks(path)
    named = dict(read_added_tokens(directory, config))
    first, behind = len(ranks), len(ranks) + RESERVED_IDS
    outside = [token_id for token_id in named if not first <= token_id < behind]
    if outside:
        raise CheckpointError(
            f"{directory / TOKENIZER_CONFIG}: added_tokens_decoder.{outside[0]} is not one of the ids {first} to "
            f"{behind - 1} behind the {first} ranks of {path.name}; fetch both files from one revision"
        )
    names = {
        named[token_id].content if token_id in named else f"<|reserved_token_{token_id}|>": token_id
        for token_id in range(first, behind)
    }
    if len(names) < RESERVED_IDS:
        raise CheckpointError(
            f"{directory / TOKENIZER_CONFIG}: added_tokens_decoder gives two ids one name; correct the file"
        )
    text_ids = {token_id for token_id, token in named.items() if not token.special}
    special_ids = frozenset(range(first, behind)) - text_ids
    prefix = _asked_for(directory, config, names, "add_bos_token", "bos_token")
    suffix = _asked_for(directory, config, names, "add_eos_token", "eos_token")
    return TiktokenModel(ranks, names, special_ids, (prefix, suffix))


def _asked_for(directory: Path, config: dict[str, Any], names: dict[str, int], flag: str, key: str) -> tuple[int, ...]:
    """The token that `key` names, if the config's `flag` is set. Kimi's own configs set neither flag."""
    path = directory / TOKENIZER_CONFIG
    value: object = config.get(flag)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{path}: {flag} must be true or false; correct the file")
    text = token_text(config.get(key), path, key)
    return (names[text],) if value and text in names else ()


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); fetch the file again") from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(f"{path}: line {number} is not `BASE64 RANK`; fetch the file again") from error
    _check_ranks(path, ranks)
    return ranks


def _check_ranks(path: Path, ranks: dict[bytes, int]) -> None:
    """Every rank from 0 once, and a rank for every byte: the library aborts on a text with a byte that has none."""
    missing = set(range(len(ranks))) - set(ranks.values())
    if missing:
        raise CheckpointError(f"{path}: rank {min(missing)} of {len(ranks)} is missing; fetch the file again")
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise CheckpointError(f"{path}: byte 0x{byte:02X} has no rank; fetch the file again")
