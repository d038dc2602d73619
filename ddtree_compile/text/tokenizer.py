"""Text to token ids and back, for one checkpoint.

A model directory enters `load_tokenizer`; a `Tokenizer` leaves, or None where the directory holds no tokenizer that we
read. Two kinds are read, `tokenizer.json` and Kimi's `tiktoken.model`, each by a codec in its own file.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ddtree_compile.errors import PromptError
from ddtree_compile.text.config_files import TOKENIZER_CONFIG, read_tokenizer_config, token_text
from ddtree_compile.text.tiktoken_model import TIKTOKEN_MODEL, load_tiktoken_model
from ddtree_compile.text.tokenizer_json import TOKENIZER_JSON, load_tokenizer_json


class Codec(Protocol):
    """What a vocabulary file can do. Ids outside the vocabulary (a model's padding rows) stand for no text at all."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that mark structure and are no text."""
        ...

    @property
    def is_byte_level(self) -> bool:
        """Whether decoding is joining the tokens' bytes."""
        ...

    @property
    def wrapping(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that the checkpoint asks for before and after a whole raw prompt."""
        ...

    def encode(self, text: str, special: bool) -> list[int]:
        """Ids of `text`; special tokens' text stands for those tokens only if `special`."""
        ...

    def token_id(self, text: str) -> int | None:
        """The id of the token written so, or None."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token of the vocabulary stands for."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of ids of the vocabulary, special tokens included."""
        ...


@dataclass(frozen=True)
class Tokenizer:
    """A checkpoint's tokenizer.

    `prefix_ids` and `suffix_ids` are what the checkpoint wants around a whole raw prompt (most often nothing, or BOS
    before it); only `encode_prompt` adds them.
    """

    codec: Codec
    bos_token_id: int | None
    eos_token_id: int | None
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; a model's embedding may have more rows than that."""
        return self.codec.vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that mark structure (BOS, turns, padding), which `decode` leaves out by default."""
        return self.codec.special_ids

    @property
    def is_byte_level(self) -> bool:
        """Whether the text of a list of ids is exactly their `token_bytes` joined, read as UTF-8."""
        return self.codec.is_byte_level

    @property
    def adds_bos(self) -> bool:
        """Whether the checkpoint wants BOS before a raw prompt."""
        return self.bos_token_id is not None and self.bos_token_id in self.prefix_ids

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of `text`, with nothing added around them.

        `special=True` is for text that a chat template rendered: `<|im_end|>` in it is that token. With the default the
        characters `<|im_end|>` are encoded as any others, so that a user's text cannot forge a turn. Raises PromptError
        where the text is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError(
                f"prompt: character {error.start} is a lone surrogate; pass valid Unicode text"
            ) from error
        return self.codec.encode(text, special)

    def encode_prompt(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of a whole raw prompt: `encode` between `prefix_ids` and `suffix_ids`.

        A rendered chat, and text that continues a sequence, go through `encode`: a template writes its own BOS.
        """
        return [*self.prefix_ids, *self.encode(text, special=special), *self.suffix_ids]

    def token_id(self, text: str) -> int | None:
        """The id of the one token written `text` (`"<|im_end|>"`), or None where there is none."""
        return self.codec.token_id(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, a special token's being its name; empty outside the vocabulary."""
        return self.codec.token_bytes(token_id) if 0 <= token_id < self.vocab_size else b""

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`, without special tokens by default. Bytes that are not UTF-8 become U+FFFD."""
        hidden = self.special_ids if skip_special else frozenset[int]()
        shown = [token_id for token_id in ids if token_id not in hidden]
        if self.is_byte_level:
            return b"".join(map(self.token_bytes, shown)).decode("utf-8", errors="replace")
        return self.codec.decode([token_id for token_id in shown if 0 <= token_id < self.vocab_size])


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of the model in `directory`, or None where it has neither tokenizer.json nor tiktoken.model.

    Raises CheckpointError, naming file and key, where one is there and cannot be read.
    """
    config = read_tokenizer_config(directory)
    if (directory / TOKENIZER_JSON).exists():
        codec: Codec = load_tokenizer_json(directory, config)
    elif (directory / TIKTOKEN_MODEL).exists():
        codec = load_tiktoken_model(directory, config)
    else:
        return None
    bos = _named_token(codec, config, directory, "bos_token")
    eos = _named_token(codec, config, directory, "eos_token")
    return Tokenizer(codec, bos, eos, *codec.wrapping)


def _named_token(codec: Codec, config: dict[str, Any], directory: Path, key: str) -> int | None:
    text = token_text(config.get(key), directory / TOKENIZER_CONFIG, key)
    return None if text is None else codec.token_id(text)
