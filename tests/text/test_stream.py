"""Incremental decoding: whatever the portions, the parts are a prefix of the whole and add up to it."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from ddtree_compile.text import StreamDecoder, Tokenizer, load_tokenizer

EMOJI_AND_CJK = st.text(st.sampled_from("😀👩‍👩‍👧🚀汉字漢こ한éñ ab\n") | st.characters(codec="utf-8"), max_size=30)


@pytest.fixture(scope="module", params=["qwen", "kimi"])
def tokenizer(request: pytest.FixtureRequest, qwen_directory: Path, kimi_directory: Path) -> Tokenizer:
    loaded = load_tokenizer(qwen_directory if request.param == "qwen" else kimi_directory)
    assert loaded is not None
    return loaded


def portions(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[left:right] for left, right in pairwise(edges)]


@given(
    ids=st.lists(st.integers(0, 700), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=10), skip=st.booleans()
)
def test_any_ids_in_any_portions(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
    stream = StreamDecoder(tokenizer, skip_special=skip)
    parts = [stream.push(portion) for portion in portions(ids, cuts)]
    assert "".join([*parts, stream.finish()]) == tokenizer.decode(ids, skip_special=skip)


@given(text=EMOJI_AND_CJK)
def test_text_token_by_token_never_shows_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    text = text.replace("\ufffd", "")
    stream = StreamDecoder(tokenizer)
    shown = ""
    for token_id in tokenizer.encode(text):
        shown += stream.push([token_id])
        assert text.startswith(shown)
    assert shown == text
    assert stream.finish() == ""


@given(raw=st.binary(max_size=30))
def test_invalid_bytes_become_what_decode_makes_of_them(tokenizer: Tokenizer, raw: bytes) -> None:
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [by_byte[bytes([byte])] for byte in raw]
    stream = StreamDecoder(tokenizer)
    parts = [stream.push([token_id]) for token_id in ids]
    assert "".join([*parts, stream.finish()]) == tokenizer.decode(ids) == raw.decode("utf-8", errors="replace")


def test_a_special_token_inside_a_character_is_skipped(tokenizer: Tokenizer) -> None:
    head, tail = tokenizer.encode("\u20ac")[:1], tokenizer.encode("\u20ac")[1:]
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    stream = StreamDecoder(tokenizer)
    assert [stream.push(head), stream.push([end]), stream.push(tail), stream.finish()] == ["", "", "€", ""]
    shown = StreamDecoder(tokenizer, skip_special=False)
    assert [shown.push(head), shown.push([end])] == ["", "\ufffd<|im_end|>"]


def test_finish_leaves_it_ready_for_another_sequence(tokenizer: Tokenizer) -> None:
    stream = StreamDecoder(tokenizer)
    assert stream.push(tokenizer.encode("\u20ac")[:1]) + stream.finish() == "\ufffd"
    assert stream.push(tokenizer.encode("again")) + stream.finish() == "again"


def test_a_tokenizer_that_is_not_byte_level_speaks_at_the_end(tmp_path: Path) -> None:
    """WordPiece joins and cleans up earlier tokens, so that nothing can be shown before the end."""
    words = Library(models.WordPiece({"[UNK]": 0, "do": 1, "n": 2, "'": 3, "t": 4, "##ing": 5}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    stream = StreamDecoder(tokenizer)
    assert stream.push([1, 5]) == stream.push([3]) == ""
    assert stream.finish() == tokenizer.decode([1, 5, 3]) == words.decode([1, 5, 3])
