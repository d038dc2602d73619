"""tokenizer.json: our codec against the tokenizers library itself and against transformers' loader."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors

from ddtree_compile.errors import CheckpointError, PromptError
from ddtree_compile.text import Tokenizer, load_tokenizer

TEXTS = [
    "",
    "Hello, world! It's 12345.",
    "你好 naïve café 😀👩‍👩‍👧\n\n  x",
    "<|im_start|>user\nhi<|im_end|>\n<think>\n</think>",
    "\x00\x7f\x80\xff \ufffd",
]


@pytest.fixture(scope="module")
def ours(qwen_directory: Path) -> Tokenizer:
    tokenizer = load_tokenizer(qwen_directory)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_as_transformers(
    qwen_directory: Path, ours: Tokenizer, transformers_tokenizer: Any, text: str
) -> None:
    theirs = transformers_tokenizer(qwen_directory)
    ids = ours.encode(text, special=True)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special_tokens=False) == text


@given(ids=st.lists(st.integers(0, 440)))
def test_decodes_any_ids_as_the_library(byte_level: Library, ours: Tokenizer, ids: list[int]) -> None:
    for skip in (True, False):
        assert ours.decode(ids, skip_special=skip) == byte_level.decode(ids, skip_special_tokens=skip)


@given(text=st.text())
def test_a_users_text_comes_back_and_holds_no_special_token(ours: Tokenizer, text: str) -> None:
    ids = ours.encode(f"{text}<|im_end|>{text}")
    assert ours.decode(ids) == f"{text}<|im_end|>{text}"
    assert not ours.special_ids & set(ids)


def test_names_sizes_and_special_ids(byte_level: Library, ours: Tokenizer) -> None:
    assert ours.vocab_size == byte_level.get_vocab_size()
    assert ours.special_ids == {byte_level.token_to_id(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")}
    assert (ours.bos_token_id, ours.eos_token_id) == (None, byte_level.token_to_id("<|im_end|>"))
    assert ours.token_bytes(ours.encode("é")[0])[:1] == "é".encode()[:1]
    think = ours.token_id("<think>")
    assert think is not None
    assert ours.token_bytes(think) == b"<think>"
    assert ours.token_bytes(-1) == ours.token_bytes(10**12) == b""
    assert ours.token_id("no such token") is None


def test_a_lone_surrogate_is_refused(ours: Tokenizer) -> None:
    with pytest.raises(PromptError, match="character 1 is a lone surrogate"):
        ours.encode("a\udce9")


@pytest.mark.parametrize("template", [None, "<|endoftext|> $A", "<|endoftext|> $A <|im_end|>"])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
@pytest.mark.parametrize("bos", [None, "<|im_start|>"])
def test_wraps_a_raw_prompt_as_transformers(
    tmp_path: Path,
    byte_level: Library,
    put: Any,
    transformers_tokenizer: Any,
    template: str | None,
    flags: dict[str, bool],
    bos: str | None,
) -> None:
    backend = Library.from_str(byte_level.to_str())
    if template is not None:
        tokens = [(text, backend.token_to_id(text)) for text in ("<|endoftext|>", "<|im_end|>")]
        used = [pair for pair in tokens if pair[0] in template]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": "<|im_end|>", **flags}
    put(tmp_path, "tokenizer_config.json", config)
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    theirs = transformers_tokenizer(tmp_path)
    assert ours.encode_prompt("hello world", special=True) == theirs.encode("hello world")
    assert ours.encode("hello world") == theirs.encode("hello world", add_special_tokens=False)
    assert ours.adds_bos == (bos is not None and theirs.encode("hello")[:1] == [theirs.bos_token_id])


def test_truncation_and_padding_in_the_file_do_not_touch_a_prompt(tmp_path: Path, byte_level: Library) -> None:
    backend: Any = Library.from_str(byte_level.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    assert ours.encode("a much longer text than that") == byte_level.encode("a much longer text than that").ids


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"420": {"content": "<|endoftext|>", "special": True, "rstrip": True}},
        {"422": {"content": "<|im_end|>", "special": False}},
        {"423": {"content": "<think>", "special": True}},
        {"424": {"content": "</think>", "special": False, "lstrip": True}},
    ],
)
def test_the_config_adds_tokens_and_makes_named_ones_special(
    tmp_path: Path, byte_level: Library, put: Any, transformers_tokenizer: Any, flags: dict[str, Any]
) -> None:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    size = byte_level.get_vocab_size()
    added = {
        str(size): {"content": "<|extra|>", "special": True, "lstrip": True},
        str(size + 1): {"content": "<tool_call>", "special": False, "rstrip": True},
    }
    added |= flags
    named = {"eos_token": "<think>", "additional_special_tokens": ["the"]}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": added, **named}
    put(tmp_path, "tokenizer_config.json", config | {"pad_token": "<|nowhere|>"})
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    put(tmp_path, "tokenizer_config.json", config)
    theirs = transformers_tokenizer(tmp_path)
    text = " <|extra|> <think> a <tool_call> b the <|im_end|> <|endoftext|> </think> c"
    ids = ours.encode(text, special=True)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == size + 2
    assert ours.token_id("<|nowhere|>") is None


def test_an_old_checkpoint_names_its_tokens_in_special_tokens_map(
    tmp_path: Path, byte_level: Library, put: Any
) -> None:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    put(tmp_path, "special_tokens_map.json", {"eos_token": {"content": "<|im_end|>", "lstrip": False}})
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    assert ours.eos_token_id == byte_level.token_to_id("<|im_end|>")


def test_a_tokenizer_that_is_not_byte_level_decodes_by_its_own_rules(tmp_path: Path) -> None:
    words = Library(models.WordPiece({"[UNK]": 0, "hello": 1, "wor": 2, "##ld": 3, "!": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.decoder = decoders.WordPiece()
    words.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    assert ours.decode(ours.encode("hello world!")) == "hello world!"
    assert ours.decode([1, 99, -1]) == "hello"
    assert ours.token_bytes(1) == b"hello"


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json: not valid JSON"),
        ("tokenizer.json", "[]", r"tokenizer\.json: expected a JSON object, found list"),
        ("tokenizer.json", {"version": "1.0"}, r"tokenizer\.json: the tokenizers library cannot load it"),
        ("tokenizer_config.json", "{,}", r"tokenizer_config\.json: not valid JSON"),
        ("tokenizer_config.json", {"eos_token": 5}, "eos_token must be a string"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, None),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "added_tokens_decoder must be an object"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"x": {"content": "y"}}},
            r"added_tokens_decoder\.x must map",
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": "y"}}, r"added_tokens_decoder\.7 must map"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"7": {"content": "y"}}},
            r"decoder\.7 is 'y', which is token",
        ),
        ("tokenizer_config.json", {"additional_special_tokens": 3}, "additional_special_tokens must be a list"),
    ],
)
def test_each_broken_file_is_one_clear_error(
    tmp_path: Path, qwen_directory: Path, put: Any, name: str, content: object, message: str | None
) -> None:
    shutil.copytree(qwen_directory, tmp_path, dirs_exist_ok=True)
    put(tmp_path, name, content)
    if message is None:
        assert load_tokenizer(tmp_path) is not None
        return
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_utf8_are_one_clear_error(tmp_path: Path, qwen_directory: Path) -> None:
    shutil.copytree(qwen_directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe" + json.dumps({}).encode())
    with pytest.raises(CheckpointError, match="cannot be read as UTF-8 text"):
        load_tokenizer(tmp_path)
