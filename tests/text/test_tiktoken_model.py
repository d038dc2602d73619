"""Kimi's tiktoken.model: our reader against tiktoken itself under the pattern that Moonshot publishes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from ddtree_compile.errors import CheckpointError
from ddtree_compile.text import Tokenizer, load_tokenizer
from ddtree_compile.text.tiktoken_model import split_long

PUBLISHED_PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEXTS = [
    "",
    "It'S what THEY'd've said: 汉字abc中文English混合 123456",
    "<|im_user|>user<|im_middle|>你好<|im_end|><|im_assistant|>assistant<|im_middle|><think>ok</think>[EOS]",
    "a  b\r\n\r\n  c\t d   \n😀👩‍👩‍👧 こんにちは 안녕",
    "<|reserved_token_425|>",
]


@pytest.fixture(scope="module")
def ours(kimi_directory: Path) -> Tokenizer:
    tokenizer = load_tokenizer(kimi_directory)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def theirs(ranks: dict[bytes, int], special_names: dict[str, int]) -> tiktoken.Encoding:
    return tiktoken.Encoding("kimi", pat_str=PUBLISHED_PATTERN, mergeable_ranks=ranks, special_tokens=special_names)


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_as_tiktoken(ours: Tokenizer, theirs: tiktoken.Encoding, text: str) -> None:
    ids = ours.encode(text, special=True)
    assert ids == theirs.encode(text, allowed_special="all")
    assert ours.encode(text) == theirs.encode(text, disallowed_special=())
    assert ours.decode(ids, skip_special=False) == theirs.decode(ids) == text


@given(
    text=st.text(st.sampled_from("aB'sS 汉字に한é1٣\u0301\n\r\t\u3000.!😀") | st.characters(codec="utf-8"), max_size=40)
)
def test_encodes_any_text_as_tiktoken(ours: Tokenizer, theirs: tiktoken.Encoding, text: str) -> None:
    assert ours.encode(text) == theirs.encode(text, disallowed_special=())
    assert ours.decode(ours.encode(text)) == text


@given(ids=st.lists(st.integers(0, 675)))
def test_decodes_any_ids_as_tiktoken(ours: Tokenizer, theirs: tiktoken.Encoding, ids: list[int]) -> None:
    assert ours.decode(ids, skip_special=False) == theirs.decode(ids)


def test_kimis_special_tokens(ours: Tokenizer, ranks: dict[bytes, int], special_names: dict[str, int]) -> None:
    first = len(ranks)
    assert (ours.bos_token_id, ours.eos_token_id, ours.vocab_size) == (first, first + 1, first + 256)
    assert {name: ours.token_id(name) for name in special_names} == special_names
    assert ours.special_ids == set(special_names.values()) - {special_names["<think>"], special_names["</think>"]}
    text = "<|im_user|>hi<think>"
    assert ours.decode(ours.encode(text, special=True)) == "hi<think>"
    assert ours.token_bytes(special_names["<|im_end|>"]) == b"<|im_end|>"
    assert ours.token_bytes(0) == b"\0"
    assert ours.token_bytes(first + 256) == b""
    assert ours.token_id("no such token") is None
    assert ours.encode_prompt("hi") == ours.encode("hi")
    assert not ours.adds_bos


def test_add_bos_token_is_honoured(tmp_path: Path, put: Any, ranks: dict[bytes, int]) -> None:
    put(tmp_path, "tiktoken.model", ranks)
    added = {str(len(ranks)): {"content": "[BOS]", "special": True}}
    put(
        tmp_path,
        "tokenizer_config.json",
        {"added_tokens_decoder": added, "bos_token": {"content": "[BOS]"}, "add_bos_token": True},
    )
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    assert ours.encode_prompt("hi") == [len(ranks), *ours.encode("hi")]
    assert ours.adds_bos


def published_split(text: str, limit: int) -> Iterator[str]:
    """The published rule, character by character: a cut where a run would pass `limit`."""
    length, start, was_space = 0, 0, text[:1].isspace()
    for i, character in enumerate(text):
        if character.isspace() != was_space:
            length, was_space = 1, character.isspace()
            continue
        length += 1
        if length > limit:
            yield text[start:i]
            start, length = i, 1
    yield text[start:]


@given(runs=st.lists(st.tuples(st.sampled_from("ab \n\x1c\u3000汉"), st.integers(1, 40)), max_size=12))
def test_long_texts_are_cut_as_published(runs: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddtree_compile.text.tiktoken_model.RUN_CHARACTERS", 7)
        patch.setattr("ddtree_compile.text.tiktoken_model.CHUNK_CHARACTERS", 50)
        text = "".join(character * count for character, count in runs)
        chunks = (text[i : i + 50] for i in range(0, len(text), 50))
        assert list(split_long(text)) == [piece for chunk in chunks for piece in published_split(chunk, 7)]


def test_a_text_past_both_limits_encodes(ours: Tokenizer) -> None:
    text = "ab " * 140_000 + "x" * 60_000
    assert [len(piece) for piece in split_long(text)] == [400_000, 20_000 + 25_000, 25_000, 10_000]
    assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
    ("where", "instead", "message"),
    [
        (slice(5, 5), ["IQ=="], "line 6 is not `BASE64 RANK`"),
        (slice(0, 1), ["!!! 0"], "line 1 is not `BASE64 RANK`"),
        (slice(300, 301), [], "rank 300 of 419 is missing"),
        (slice(200, None), [], "byte 0xC8 has no rank"),
        (slice(0, None), [], "byte 0x00 has no rank"),
    ],
)
def test_each_broken_rank_file_is_one_clear_error(
    tmp_path: Path, kimi_directory: Path, put: Any, where: slice, instead: list[str], message: str
) -> None:
    lines = (kimi_directory / "tiktoken.model").read_text().splitlines()
    lines[where] = instead
    put(tmp_path, "tiktoken.model", "\n".join(lines))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    assert "tiktoken.model" in str(caught.value)


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"5": {"content": "[BOS]"}}, r"added_tokens_decoder\.5 is not one of the ids 420 to 675"),
        ({"420": {"content": "x"}, "421": {"content": "x"}}, "gives two ids one name"),
        ({"420": {}}, r"added_tokens_decoder\.420 must be a string or an object"),
    ],
)
def test_added_tokens_that_cannot_be(
    tmp_path: Path, kimi_directory: Path, put: Any, added: dict[str, Any], message: str
) -> None:
    put(tmp_path, "tiktoken.model", (kimi_directory / "tiktoken.model").read_text())
    put(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": added})
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path)


def test_a_flag_that_is_not_one(tmp_path: Path, put: Any, ranks: dict[bytes, int]) -> None:
    put(tmp_path, "tiktoken.model", ranks)
    put(tmp_path, "tokenizer_config.json", {"add_bos_token": "yes"})
    with pytest.raises(CheckpointError, match="add_bos_token must be true or false"):
        load_tokenizer(tmp_path)
