"""Stop tokens and sampling values, against transformers' GenerationConfig and the checkpoints' own layouts."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from ddtree_compile.errors import CheckpointError
from ddtree_compile.text import Defaults, load_defaults, load_tokenizer


def test_a_checkpoint_that_says_nothing(tmp_path: Path) -> None:
    assert load_defaults(tmp_path, {}, None) == Defaults(stop_token_ids=())


def test_sampling_values_as_transformers_reads_them(tmp_path: Path) -> None:
    theirs: Any = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, eos_token_id=[151645, 151643]
    )
    theirs.save_pretrained(tmp_path)
    ours = load_defaults(tmp_path, {}, None)
    assert ours.stop_token_ids == (151645, 151643)
    for name in ("do_sample", "temperature", "top_k", "top_p", "min_p"):
        assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.parametrize(
    ("generation", "config", "stops"),
    [
        ({"eos_token_id": 7}, {}, (7,)),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 8}, (7, 8)),
        ({}, {"eos_token_id": [9]}, (9,)),
        ({"eos_token_id": None}, {"eos_token_id": None, "text_config": {"eos_token_id": 163586}}, (163586,)),
        ({"eos_token_id": 3}, {"eos_token_id": 2, "text_config": {"eos_token_id": [1, 3]}}, (3, 2, 1)),
    ],
)
def test_stops_are_the_union_of_what_the_configs_say(
    tmp_path: Path, put: Any, generation: dict[str, Any], config: dict[str, Any], stops: tuple[int, ...]
) -> None:
    put(tmp_path, "generation_config.json", generation)
    assert load_defaults(tmp_path, config, None).stop_token_ids == stops


def test_the_templates_end_of_turn_stops_too(
    tmp_path: Path, put: Any, kimi_directory: Path, special_names: dict[str, int]
) -> None:
    """Kimi's tokenizer ends with [EOS], its chat turns with <|im_end|>."""
    shutil.copytree(kimi_directory, tmp_path, dirs_exist_ok=True)
    tokenizer = load_tokenizer(tmp_path)
    assert load_defaults(tmp_path, {}, tokenizer).stop_token_ids == (special_names["[EOS]"],)
    put(tmp_path, "chat_template.jinja", "{{ messages[0].content }}<|im_end|><|eot_id|>")
    stops = load_defaults(tmp_path, {}, tokenizer).stop_token_ids
    assert stops == (special_names["[EOS]"], special_names["<|im_end|>"])


def test_vllms_top_k_of_minus_one_is_no_filter(tmp_path: Path, put: Any) -> None:
    put(tmp_path, "generation_config.json", {"top_k": -1})
    assert load_defaults(tmp_path, {}, None).top_k == 0


@pytest.mark.parametrize(
    ("generation", "config", "message"),
    [
        ("{", {}, "generation_config.json: not valid JSON"),
        ({"eos_token_id": "7"}, {}, "generation_config.json: eos_token_id must be a token id"),
        ({"eos_token_id": [7, True]}, {}, "generation_config.json: eos_token_id must be a token id"),
        ({}, {"eos_token_id": -1}, "/config.json: eos_token_id must be a token id"),
        ({}, {"text_config": {"eos_token_id": 1.5}}, r"/config.json: text_config\.eos_token_id must be a token id"),
        ({"temperature": "hot"}, {}, "temperature must be a number at least 0"),
        ({"temperature": -1}, {}, "temperature must be a number at least 0"),
        ({"top_p": 1.5}, {}, "top_p must be a number between 0 and 1"),
        ({"min_p": True}, {}, "min_p must be a number between 0 and 1"),
        ({"top_k": 2.5}, {}, "top_k must be an integer"),
        ({"do_sample": 1}, {}, "do_sample must be true or false"),
    ],
)
def test_a_malformed_value_names_file_and_key(
    tmp_path: Path, put: Any, generation: object, config: dict[str, Any], message: str
) -> None:
    put(tmp_path, "generation_config.json", generation)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_defaults(tmp_path, config, None)
    assert "\n" not in str(caught.value)
