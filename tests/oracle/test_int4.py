"""INT4 checkpoints against compressed-tensors: it quantises, packs and dequantises them, transformers runs them.

The engine on a packed checkpoint equals, bit for bit, the engine on the dense one that compressed-tensors makes of it,
in fp32 and in bf16; in fp32 both agree with transformers on the dequantised weights. The scales are bf16 and so are
the dense tensors, as in Kimi's checkpoints. Whole sweep: `pytest -m full tests/oracle`.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from support.cases import Draw
from support.checkpoints import (
    KIMI,
    QWEN3,
    Tensors,
    as_kimi_k2,
    make_drafter,
    make_kimi,
    make_kimi_k25,
    make_qwen3,
    make_spec,
    rewrite,
)
from support.oracle import Oracle, Recorder, Tally
from transformers import AutoModelForCausalLM, Kimi_K25ForConditionalGeneration

from ddtree_compile.ir.weights import Int4, leaves
from ddtree_compile.runtime.engine import Engine
from ddtree_compile.runtime.sampling import SamplingParams
from ddtree_compile.spec import CompileSpec

# transformers builds the shared expert of a config that has none
pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")

# As Kimi K2.6 ships it: only routed experts are int4.
EXPERTS_ONLY = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
ALL_LINEAR = ["lm_head"]
PROMPTS = ((5,), (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9), tuple(range(40)))


@dataclass(frozen=True)
class Packed:
    """A kind of packed checkpoint: `changes` give inner sizes that are multiples of `group`, most not of 256."""

    make: Any
    base: dict[str, Any]
    ignore: list[str]
    changes: dict[str, Any]
    kimi_k2: bool = False
    group: int = 32

    @property
    def scheme(self) -> QuantizationScheme:
        weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=self.group, symmetric=True)
        return QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")


WIDE = {"hidden_size": 288, "moe_intermediate_size": 96, "num_hidden_layers": 2}
MIXED = {"hidden_size": 96, "v_head_dim": 24, "first_k_dense_replace": 2}
CASES = {
    "experts": Packed(make_kimi, KIMI, EXPERTS_ONLY, {**WIDE, "hidden_size": 512, "n_shared_experts": 2}),
    "kimi_k2": Packed(make_kimi, KIMI, EXPERTS_ONLY, WIDE, kimi_k2=True),
    "kimi_k25": Packed(make_kimi_k25, KIMI, EXPERTS_ONLY, {}),
    "every linear": Packed(make_kimi, KIMI, ALL_LINEAR, MIXED),
    "qwen3": Packed(make_qwen3, QWEN3, ALL_LINEAR, {"hidden_size": 160, "intermediate_size": 320}),
    "groups of 64": Packed(make_qwen3, QWEN3, ALL_LINEAR, {"hidden_size": 128, "intermediate_size": 192}, group=64),
}


@st.composite
def packed_cases(draw: Draw) -> Packed:
    """Any family; inner sizes are multiples of the group wherever a Linear is quantised."""
    make = draw(st.sampled_from([make_kimi, make_kimi_k25, make_qwen3]))
    thirties = st.sampled_from([32, 64, 96, 160, 288])
    changes = {"hidden_size": draw(thirties), "intermediate_size": draw(thirties), "num_hidden_layers": 2}
    if make is make_qwen3:
        heads = {"num_attention_heads": 4, "num_key_value_heads": draw(st.sampled_from([1, 2, 4]))}
        changes |= heads | {"head_dim": draw(st.sampled_from([8, 16, 24])), "tie_word_embeddings": draw(st.booleans())}
        return Packed(make, QWEN3, draw(st.sampled_from([ALL_LINEAR, [*ALL_LINEAR, "re:.*down_proj"]])), changes)
    changes |= {
        "moe_intermediate_size": draw(thirties),
        "n_routed_experts": draw(st.integers(2, 6)),
        "num_experts_per_tok": draw(st.integers(1, 2)),
        "n_shared_experts": draw(st.integers(0, 2)),
        "first_k_dense_replace": draw(st.integers(0, 1)),
        "kv_lora_rank": draw(st.sampled_from([32, 96])),
        "q_lora_rank": draw(st.sampled_from([None, 32, 64])),
        "v_head_dim": draw(st.sampled_from([8, 16, 24])),
    }
    spelt = make is make_kimi and draw(st.booleans())
    return Packed(make, KIMI, draw(st.sampled_from([EXPERTS_ONLY, ALL_LINEAR])), changes, kimi_k2=spelt)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_pair(case: Packed, root: Path) -> tuple[Path, Path]:
    """Directories that hold `target` and `drafter`, packed and dense; both of dtype float32."""
    packed, dense = root / "packed", root / "dense"
    case.make(packed / "target", 7, "200KB", **case.changes)
    make_drafter(packed / "drafter", {**case.base, **case.changes}, 8)
    if case.kimi_k2:
        as_kimi_k2(packed / "target")
    shutil.copytree(packed, dense)
    rewrite(packed / "target", lambda tensors: pack(round_all(tensors), case))
    rewrite(dense / "target", lambda tensors: unpack(pack(round_all(tensors), case), case))
    declare(packed / "target", case)
    return packed, dense


def declare(directory: Path, case: Packed) -> None:
    """Say in a config that the checkpoint is int4; the wrapper says so twice."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for level in (config, config.get("text_config", {})):
        level["quantization_config"] = quantisation(case)
    path.write_text(json.dumps(config))


def quantisation(case: Packed) -> dict[str, Any]:
    weights = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": case.group, "num_bits": 4,
        "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
    }  # fmt: skip
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group}, "format": "pack-quantized", "ignore": case.ignore, "kv_cache_scheme": None,
        "quant_method": "compressed-tensors", "quantization_status": "compressed",
    }  # fmt: skip


def round_all(tensors: Tensors) -> Tensors:
    """Through bf16, as a published checkpoint has been."""
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def linears(tensors: Tensors, ignore: list[str]) -> list[str]:
    """The names of the Linear modules that compressed-tensors would quantise."""

    def ignored(module: str) -> bool:
        return any(re.match(e[3:], module) if e.startswith("re:") else module == e for e in ignore)

    modules = [name.removesuffix(".weight") for name in tensors if name.endswith(("_proj.weight", "_mqa.weight"))]
    return [module for module in modules if not ignored(module)]


def pack(tensors: Tensors, case: Packed) -> Tensors:
    made = dict(tensors)
    for module in linears(tensors, case.ignore):
        weight = made.pop(f"{module}.weight")
        scale = (weight.float().unflatten(-1, (-1, case.group)).abs().amax(-1) / 7.5).bfloat16()
        parts = PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, case.scheme)
        made |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items() if tensor is not None}
    return made


def unpack(tensors: Tensors, case: Packed) -> Tensors:
    made = dict(tensors)
    for name in tensors:
        if name.endswith(".weight_packed"):
            module = name.removesuffix("_packed")
            parts = {f"weight_{part}": made.pop(f"{module}_{part}") for part in ("packed", "scale", "shape")}
            made[module] = PackedQuantizationCompressor.decompress(parts, case.scheme)["weight"]
    return made


def run(root: Path, bucket: int) -> tuple[Engine, Recorder, list[Any]]:
    tables = make_spec(root, [7, 22], cache={"max_sequences": len(PROMPTS)}, prefill={"chunks": [4, 16]})
    engine = Engine.from_spec(CompileSpec.parse(tables), poisoned=True)
    recorder = Recorder(engine)
    done = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12, bucket=bucket, ignore_eos=True))
    engine.close()
    return engine, recorder, done


@pytest.mark.parametrize("name", CASES)
def test_packed_equals_dense_bit_for_bit_and_official_within_tolerance(name, tmp_path, capsys):
    tally = Tally()
    check_case(CASES[name], tmp_path, tally)
    with capsys.disabled():
        print(f"\nint4, {name}: {tally}")


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_fifty_packed_configs_agree(capsys):
    tally = Tally()

    @seed(0)
    @settings(
        max_examples=50, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(case=packed_cases())
    def every(case: Packed) -> None:
        with tempfile.TemporaryDirectory() as directory:
            check_case(case, Path(directory), tally)

    every()
    with capsys.disabled():
        print(f"\nint4: {tally}")
    assert tally.configs == 50
    tally.assert_rare()


def check_case(case: Packed, root: Path, tally: Tally) -> None:
    packed, dense = make_pair(case, root)
    engine, ours, done = run(packed, 22)
    leaf_kinds = {type(leaf) for weight in engine.plan.weights for leaf in leaves(weight.recipe)}
    assert Int4 in leaf_kinds
    assert_same(ours, done, *run(dense, 22)[1:])
    oracle = Oracle(official(dense / "target").float(), tally)
    oracle.check(ours.rows, [one.context for one in done], every=4)
    for prompt, one in zip(PROMPTS, done, strict=True):
        oracle.check_tokens(prompt, one.token_ids)
    tally.configs += 1


@pytest.mark.parametrize("name", ["kimi_k2", "every linear", "qwen3"])
def test_packed_equals_dense_in_bf16(name, tmp_path):
    packed, dense = make_pair(CASES[name], tmp_path)
    for path in tmp_path.glob("*/*/config.json"):
        path.write_text(path.read_text().replace('"float32"', '"bfloat16"'))
    assert_same(*run(packed, 7)[1:], *run(dense, 7)[1:])


def assert_same(ours: Recorder, done: list[Any], theirs: Recorder, expected: list[Any]) -> None:
    assert [one.token_ids for one in done] == [one.token_ids for one in expected]
    assert [one.accept_lengths for one in done] == [one.accept_lengths for one in expected]
    assert len(ours.rows) == len(theirs.rows)
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(ours.rows, theirs.rows, strict=True))


def official(directory: Path) -> Any:
    """transformers' bf16 model of a checkpoint."""
    wrapper = json.loads((directory / "config.json").read_text())["model_type"] == "kimi_k25"
    kind = Kimi_K25ForConditionalGeneration if wrapper else AutoModelForCausalLM
    respell(directory)
    model = kind.from_pretrained(directory, dtype=torch.bfloat16).eval()
    model.set_experts_implementation("eager")
    return model


def respell(directory: Path) -> None:
    """transformers has no kimi_k2: the same config under deepseek_v3."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    if config["model_type"] == "kimi_k2":
        config["model_type"] = "deepseek_v3"
        del config["auto_map"]
        path.write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["experts", "every linear", "qwen3"])
def test_transformers_loads_the_packed_checkpoint_as_the_same_weights(name, tmp_path):
    """The dense checkpoint that the other tests use is what transformers makes of the packed one."""
    packed, dense = (official(root / "target") for root in make_pair(CASES[name], tmp_path))
    ids = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        assert torch.equal(packed(ids).logits, dense(ids).logits)
