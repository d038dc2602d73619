"""The embedded model does what it is there for: text one can read, which speculation makes in fewer rounds.

Prompts are regions of files that the model was not trained on. The issue's figures need all of them and 192 tokens:

    pytest -m full tests/test_embedded.py
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from support.oracle import Oracle, Recorder, Tally
from transformers import DeepseekV3ForCausalLM

from ddtree_compile import CompileSpec, Engine, Generation, SamplingParams, embedded_spec, load_tokenizer, read_spec
from ddtree_compile.text import Tokenizer

HELDOUT = Path(__file__).parents[1] / "bench" / "embedded" / "heldout.json"
SPEC = read_spec(embedded_spec())
ASSETS = embedded_spec().parent
ASSETS_BYTES = 16_000_000
GRAM = 8


@dataclass(frozen=True)
class Sample:
    """Some generations of one kind of round."""

    done: list[Generation]

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [one.token_ids for one in self.done]

    @property
    def per_round(self) -> float:
        return sum(sum(one.accept_lengths) for one in self.done) / sum(one.rounds for one in self.done)

    @property
    def repeated(self) -> float:
        """1 - distinct / total of the n-grams inside an output, over all outputs."""
        return sum(map(repetition, self.tokens)) / len(self.done)


def repetition(tokens: tuple[int, ...]) -> float:
    grams = [tokens[i : i + GRAM] for i in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(SPEC.target_dir)


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[tuple[int, ...]]:
    """As the scripts that measured the model: [BOS], then the text."""
    entries = json.loads(HELDOUT.read_text(encoding="utf-8"))
    return [(tokenizer.bos_token_id, *tokenizer.encode(entry["prompt"])) for entry in entries]


@pytest.fixture(scope="module")
def engine():
    with Engine.from_spec(embedded_spec()) as made:
        yield made


def sample(engine: Engine, prompts, new: int, heat: float = 0.0, **how) -> Sample:
    params = SamplingParams(max_new_tokens=new, temperature=heat, seed=1, ignore_eos=True, **how)
    return Sample(engine.generate(prompts, params))


def test_speculation_pays_and_changes_nothing(engine, tokenizer, prompts, capsys):
    """Once the model wrote control bytes after [BOS]: the text of each output is looked at."""
    some = prompts[1:4]
    plain = sample(engine, some, 48, speculate=False)
    chain = sample(engine, some, 48, shape="chain")
    tree = sample(engine, some, 48, bucket=63)
    with capsys.disabled():
        print(f"\nembedded: {tree.per_round:.2f} tokens a round with a tree of 63, {chain.per_round:.2f} with a chain")
    assert tree.tokens == plain.tokens == chain.tokens
    assert tree.per_round >= 2.5
    assert tree.per_round > chain.per_round
    for tokens in tree.tokens:
        text = b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8")
        assert text.strip()
        assert all(letter.isprintable() or letter in "\n\t" for letter in text), text


def test_assets_are_small():
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) < ASSETS_BYTES


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_greedy_figures(engine, prompts, capsys):
    chain = sample(engine, prompts, 192, shape="chain")
    trees = {bucket: sample(engine, prompts, 192, bucket=bucket) for bucket in SPEC.tree.buckets}
    show(capsys, 0.0, chain, trees)
    assert all(tree.tokens == chain.tokens for tree in trees.values())
    best = max(tree.per_round for tree in trees.values())
    assert best >= 3.0
    assert best >= 1.15 * chain.per_round
    assert chain.repeated < 0.2


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_sampled_figures(engine, prompts, capsys):
    chain = sample(engine, prompts, 192, 0.8, shape="chain")
    trees = {bucket: sample(engine, prompts, 192, 0.8, bucket=bucket) for bucket in SPEC.tree.buckets}
    show(capsys, 0.8, chain, trees)
    assert all(tree.tokens == chain.tokens for tree in trees.values())
    assert max(tree.per_round for tree in trees.values()) >= 2.2


def show(capsys, heat: float, chain: Sample, trees: dict[int, Sample]) -> None:
    with capsys.disabled():
        print(f"\nembedded, {len(chain.done)} prompts, T = {heat:g}: tokens a round")
        print(f"  chain {chain.per_round:.3f}", *(f"| tree {b} {tree.per_round:.3f}" for b, tree in trees.items()))
        print(f"  repeated {GRAM}-grams {100 * chain.repeated:.1f} %")


def test_official_model_says_the_same_in_float32(prompts, tmp_path, capsys):
    """The engine reads the INT4 checkpoint, transformers what compressed-tensors makes of it; both compute in fp32."""
    tables = SPEC.to_dict()
    for part in ("target", "drafter"):
        tables["model"][part] = str(in_float32(ASSETS / part, tmp_path / part))
    tally = Tally(configs=1)
    oracle = Oracle(official(tmp_path / "target", tmp_path / "official"), tally)
    with Engine.from_spec(CompileSpec.parse(tables)) as engine:
        recorder = Recorder(engine)
        done = sample(engine, prompts[1:3], 64, bucket=15).done
    for length in (length for one in done for length in one.accept_lengths):
        tally.accepted[length] = tally.accepted.get(length, 0) + 1
    oracle.check(recorder.rows, [one.context for one in done], every=16)
    for prompt, one in zip(prompts[1:3], done, strict=True):
        oracle.check_tokens(prompt, one.token_ids)
        oracle.check_generate(prompt, one.token_ids)
    with capsys.disabled():
        print(f"\nembedded against transformers: {tally}")
    assert tally.tokens == 2 * 64
    assert tally.token_ties <= 1


def in_float32(source: Path, directory: Path) -> Path:
    """The same weights under a config that asks for fp32."""
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text())
    names = [name for name in ("dtype", "torch_dtype") if name in config]
    (directory / "config.json").write_text(json.dumps(config | dict.fromkeys(names, "float32")))
    return directory


def official(source: Path, directory: Path) -> DeepseekV3ForCausalLM:
    """transformers' model of the dequantised checkpoint; it knows the config as deepseek_v3."""
    config = json.loads((source / "config.json").read_text())
    scheme = QuantizationConfig(**config.pop("quantization_config")).config_groups["group_0"]
    tensors = load_file(source / "model.safetensors")
    for packed in [name for name in tensors if name.endswith(".weight_packed")]:
        weight = packed.removesuffix("_packed")
        parts = {f"weight_{part}": tensors.pop(f"{weight}_{part}") for part in ("packed", "scale", "shape")}
        tensors[weight] = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3"}))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model, info = DeepseekV3ForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    model.generation_config.eos_token_id = None
    model.set_experts_implementation("eager")
    return model.eval()
