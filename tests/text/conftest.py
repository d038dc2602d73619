"""Small checkpoints' tokenizer files, made by the libraries that the real ones were made with."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "It's what they'd've said: we're done, aren't we?",
    "你好\uff0c世界。今天天气很好。我们去公园散步吧。",
    "こんにちは世界 안녕하세요 Здравствуй мир",
    "emoji 😀😃😄 👩‍👩‍👧 🚀🚀  and   spaces\n\n\ttabs 12345 678",
    "def f(x):\n    return x * 2  # naïve café\n",
] * 4

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NOT_SPECIAL = ["<think>", "</think>"]
KIMI_NAMED = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    10: "<|im_system|>",
    17: "<|im_middle|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}


def train_byte_level() -> Tokenizer:
    """A byte-level BPE like Qwen's: GPT-2's bytes, three special tokens, two added tokens that are text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in NOT_SPECIAL])
    return tokenizer


def byte_level_ranks() -> dict[bytes, int]:
    """Ranks of a tiktoken vocabulary: the trained BPE's bytes, then its merges in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spelling = {byte: chr(byte) for byte in printable}
    for i, byte in enumerate(b for b in range(256) if b not in printable):
        spelling[byte] = chr(256 + i)
    byte_of = {character: byte for byte, character in spelling.items()}
    merges = json.loads(train_byte_level().to_str())["model"]["merges"]
    merged = dict.fromkeys(bytes(byte_of[c] for c in left + right) for left, right in merges)
    return {token: rank for rank, token in enumerate([*(bytes([b]) for b in range(256)), *merged])}


def kimi_config(first: int) -> dict[str, Any]:
    """Kimi's tokenizer_config.json, its added tokens moved behind `first` ranks."""
    added = {
        str(first + offset): {"content": text, "special": text not in NOT_SPECIAL}
        for offset, text in KIMI_NAMED.items()
    }
    return {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"}


Put = Callable[[Path, str, object], None]


@pytest.fixture(scope="session")
def put() -> Put:
    """Writes a file into a directory: ranks as tiktoken.model's lines, other objects as JSON, a str as it is."""

    def write(directory: Path, name: str, value: Any) -> None:
        if isinstance(value, dict) and name == "tiktoken.model":
            value = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in value.items())
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        (directory / name).write_text(text, encoding="utf-8")

    return write


@pytest.fixture(scope="session")
def transformers_tokenizer() -> Callable[[Path], Any]:
    """transformers' own tokenizer of a directory."""

    def load(directory: Path) -> Any:
        return PreTrainedTokenizerFast.from_pretrained(directory)

    return load


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return train_byte_level()


@pytest.fixture(scope="session")
def qwen_directory(tmp_path_factory: pytest.TempPathFactory, byte_level: Tokenizer, put: Put) -> Path:
    directory = tmp_path_factory.mktemp("qwen")
    byte_level.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": "<|im_end|>"}
    put(directory, "tokenizer_config.json", config)
    return directory


@pytest.fixture(scope="session")
def ranks() -> dict[bytes, int]:
    return byte_level_ranks()


@pytest.fixture(scope="session")
def special_names(ranks: dict[bytes, int]) -> dict[str, int]:
    """Kimi's 256 tokens behind the ranks, by name."""
    return {KIMI_NAMED.get(i, f"<|reserved_token_{len(ranks) + i}|>"): len(ranks) + i for i in range(256)}


@pytest.fixture(scope="session")
def kimi_directory(tmp_path_factory: pytest.TempPathFactory, ranks: dict[bytes, int], put: Put) -> Path:
    directory = tmp_path_factory.mktemp("kimi")
    put(directory, "tiktoken.model", ranks)
    put(directory, "tokenizer_config.json", kimi_config(len(ranks)))
    return directory
