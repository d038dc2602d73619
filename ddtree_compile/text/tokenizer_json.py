"""`tokenizer.json`, read by the `tokenizers` library, as a codec.

A model directory and its tokenizer_config.json enter; a `TokenizerJson` leaves. As in transformers, the config's
added_tokens_decoder and named special tokens complete those of tokenizer.json, what wraps a raw prompt is its
post-processor's decision alone (add_bos_token is not read), and its truncation and padding are not applied.
"""

from pathlib import Path
from threading import Lock
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer, decoders

from ddtree_compile.errors import CheckpointError
from ddtree_compile.text.config_files import NAMED_TOKENS, TOKENIZER_CONFIG, read_object, read_text, token_text

TOKENIZER_JSON = "tokenizer.json"
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class TokenizerJson:
    """A loaded tokenizer.json. The library's switch for special tokens is state, so that `encode` holds a lock."""

    def __init__(self, backend: Tokenizer, special_ids: frozenset[int]) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._lock = Lock()
        self._byte_of = _byte_of_character()
        added = backend.get_added_tokens_decoder()
        self.special_ids = special_ids
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.wrapping = _wrapping(backend)
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)

    def encode(self, text: str, special: bool) -> list[int]:
        """Ids of `text`. Added tokens that are not special (`<think>`) are tokens in either case."""
        with self._lock:
            self._backend.encode_special_tokens = not special
            return self._backend.encode(text, add_special_tokens=False).ids

    def token_id(self, text: str) -> int | None:
        """The id of the token written so, or None."""
        return self._backend.token_to_id(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes. A token with a character that spells no byte (an added one) is its own UTF-8."""
        if not self.is_byte_level:
            return self.decode([token_id]).encode("utf-8")
        token = self._backend.id_to_token(token_id) or ""
        if all(character in self._byte_of for character in token):
            return bytes(self._byte_of[character] for character in token)
        return token.encode("utf-8")

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, by the file's own decoder."""
        return self._backend.decode(ids, skip_special_tokens=False)


def load_tokenizer_json(directory: Path, config: dict[str, Any]) -> TokenizerJson:
    """Read `directory`'s tokenizer.json and add what its tokenizer_config.json (`config`) declares.

    Raises CheckpointError that names the file, and the key where one is at fault.
    """
    path = directory / TOKENIZER_JSON
    read_object(directory, TOKENIZER_JSON)
    try:
        backend = Tokenizer.from_str(read_text(path))
    except Exception as error:  # the library raises Exception itself, nothing narrower
        raise CheckpointError(
            f"{path}: the tokenizers library cannot load it ({error}); fetch the file again"
        ) from error
    # A token stays special for the library once it was: the config can add to these, not take away.
    special_ids = _special_ids(backend)
    for token_id, token in read_added_tokens(directory, config):
        if backend.get_added_tokens_decoder().get(token_id) == token:
            continue
        _add(backend, token)
        if backend.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"{directory / TOKENIZER_CONFIG}: added_tokens_decoder.{token_id} is {token.content!r}, which is token "
                f"{backend.token_to_id(token.content)} of {TOKENIZER_JSON}; fetch both files from one revision"
            )
    for text in _named_texts(directory, config):
        _mark_special(backend, text)
    return TokenizerJson(backend, special_ids | _special_ids(backend))


def read_added_tokens(directory: Path, config: dict[str, Any]) -> list[tuple[int, AddedToken]]:
    """The (id, token) pairs of tokenizer_config.json's added_tokens_decoder, by rising id. Raises CheckpointError."""
    path = directory / TOKENIZER_CONFIG
    table: object = config.get("added_tokens_decoder") or {}
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: added_tokens_decoder must be an object; correct the file")
    tokens: dict[int, AddedToken] = {}
    for key, entry in cast(dict[str, object], table).items():
        where = f"added_tokens_decoder.{key}"
        text = token_text(entry, path, where)
        if text is None or not isinstance(entry, dict) or not (key.isascii() and key.isdigit()):
            raise CheckpointError(f"{path}: {where} must map a token id to an object with `content`; correct the file")
        flags = {flag: bool(value) for flag, value in cast(dict[str, object], entry).items() if flag in _TOKEN_FLAGS}
        tokens[int(key)] = AddedToken(text, **flags)
    return sorted(tokens.items())


def _wrapping(backend: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a text, found by encoding one."""
    encoding = backend.encode("a", add_special_tokens=True)
    ids, marks = encoding.ids, encoding.special_tokens_mask
    before = marks.index(0) if 0 in marks else len(ids)
    after = [token_id for token_id, mark in zip(ids[before:], marks[before:], strict=True) if mark]
    return tuple(ids[:before]), tuple(after)


def _special_ids(backend: Tokenizer) -> frozenset[int]:
    added = backend.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _add(backend: Tokenizer, token: AddedToken) -> None:
    if token.special:
        backend.add_special_tokens([token])
    else:
        backend.add_tokens([token])


def _named_texts(directory: Path, config: dict[str, Any]) -> list[str]:
    path = directory / TOKENIZER_CONFIG
    texts = [token_text(config.get(key), path, key) for key in NAMED_TOKENS]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra: object = config.get(key) or []
        entries = list(cast(dict[str, object], extra).values()) if isinstance(extra, dict) else extra
        if not isinstance(entries, list):
            raise CheckpointError(f"{path}: {key} must be a list of tokens; correct the file")
        texts += [token_text(entry, path, key) for entry in cast(list[object], entries)]
    return [text for text in texts if text is not None]


def _mark_special(backend: Tokenizer, text: str) -> None:
    """Make a plain token of the vocabulary special, as transformers does for those that the config names.

    A name that the vocabulary lacks is left out: transformers would append an id that the model has no embedding for.
    """
    token_id = backend.token_to_id(text)
    if token_id is not None and token_id not in backend.get_added_tokens_decoder():
        _add(backend, AddedToken(text, special=True, normalized=False))
