"""Recipes evaluated against plain torch on the same tensors; what does not fit is named."""

import hashlib
import itertools
import math

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import pack_to_int32
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ddtree_compile.errors import CheckpointError
from ddtree_compile.ir.boxes import through_view
from ddtree_compile.ir.graph import Space, TensorType, Value
from ddtree_compile.ir.layouts import LAYOUTS
from ddtree_compile.ir.quantised import Quantised
from ddtree_compile.ir.weights import Cat, Cut, Int4, Random, Stack, Take, View, Weight
from ddtree_compile.runtime.checkpoint import Checkpoint
from ddtree_compile.runtime.random_weights import _hash
from ddtree_compile.runtime.weights import check_consumed, evaluate, load_weights

EXPERTS, N, K = 3, 4, 96


@pytest.fixture(scope="module")
def tensors():
    generator = torch.Generator().manual_seed(1)
    made = {
        "norm": torch.randn(8, generator=generator).to(torch.bfloat16),
        "q": torch.randn(6, 8, generator=generator).to(torch.bfloat16),
        "k": torch.randn(2, 8, generator=generator).to(torch.bfloat16),
        "kv_b": torch.randn(4 * 5, 3, generator=generator).to(torch.bfloat16),
        "bias": torch.randn(8, generator=generator),
        "counts": torch.arange(3),
    }
    for expert in range(EXPERTS):
        codes = torch.randint(-8, 8, (N, K), generator=generator, dtype=torch.int8)
        scales = torch.rand(N, K // 32, generator=generator).to(torch.bfloat16)
        made[f"experts.{expert}.up.weight_packed"] = pack_to_int32(codes, 4)
        made[f"experts.{expert}.up.weight_scale"] = scales
        made[f"experts.{expert}.up.weight_shape"] = torch.tensor([N, K], dtype=torch.int32)
        made[f"dense.{expert}"] = codes.to(torch.bfloat16) * scales.repeat_interleave(32, dim=1)
    return made


@pytest.fixture(scope="module")
def checkpoints(tensors, tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return {"target": Checkpoint(directory)}


def _weight(name, shape, recipe, dtype="bf16", layout="rows"):
    return Weight(Value(name, TensorType(shape, dtype), Space.WEIGHT), recipe, layout)


QK = Cat((Take("target:q"), Take("target:k")), 0)
KV = View(Take("target:kv_b"), (4, 5, 3))
UP = Stack(Int4("target:experts.{}.up"), EXPERTS)

RECIPES = {
    "take": (Take("target:q"), lambda t: t["q"]),
    "cut rows": (Cut(Take("target:q"), 0, 1, 4), lambda t: t["q"][1:4]),
    "cut columns": (Cut(Take("target:q"), 1, 2, 5), lambda t: t["q"][:, 2:5]),
    "cut from the end": (Cut(Take("target:q"), -1, 2, 5), lambda t: t["q"][:, 2:5]),
    "cut of a cut": (Cut(Cut(Take("target:q"), 0, 1, 5), 0, 1, 3), lambda t: t["q"][2:4]),
    "cat": (QK, lambda t: torch.cat([t["q"], t["k"]])),
    "cut across a cat": (Cut(QK, 0, 4, 7), lambda t: torch.cat([t["q"], t["k"]])[4:7]),
    "cut inside a cat": (Cut(QK, 0, 6, 8), lambda t: t["k"]),
    "heads of a view": (Cut(KV, 0, 1, 3), lambda t: t["kv_b"].view(4, 5, 3)[1:3]),
    "inside the heads of a view": (Cut(KV, 1, 0, 2), lambda t: t["kv_b"].view(4, 5, 3)[:, :2]),
    "view of a cut of a view": (
        Cut(View(Cut(KV, 1, 2, 5), (12, 3)), 0, 3, 9),
        lambda t: t["kv_b"].view(4, 5, 3)[:, 2:].reshape(12, 3)[3:9],
    ),
    "stack": (Stack(Take("target:dense.{}"), 3), lambda t: torch.stack([t[f"dense.{i}"] for i in range(3)])),
    "cut of a stack": (
        Cut(Cut(Stack(Take("target:dense.{}"), 3), 0, 1, 3), 2, 32, 64),
        lambda t: torch.stack([t[f"dense.{i}"] for i in (1, 2)])[:, :, 32:64],
    ),
    "stack of cats": (
        Stack(Cat((Take("target:dense.{}"), Take("target:dense.{}")), 0), 2),
        lambda t: torch.stack([torch.cat([t[f"dense.{i}"]] * 2) for i in range(2)]),
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_dense_recipes(name, tensors, checkpoints):
    recipe, expected = RECIPES[name]
    made = evaluate(recipe, checkpoints, "bf16")
    assert torch.equal(made, expected(tensors))
    assert made.is_contiguous()


INT4 = {
    "stack": (UP, lambda d: d),
    "one expert": (Cut(UP, 0, 2, 3), lambda d: d[2:3]),
    "rows": (Cut(UP, 1, 1, 3), lambda d: d[:, 1:3]),
    "a group of inputs": (Cut(UP, 2, 32, 96), lambda d: d[:, :, 32:96]),
    "gate beside up": (Stack(Cat((Int4("target:experts.{}.up"),) * 2, 0), EXPERTS), lambda d: torch.cat([d, d], 1)),
    "view": (Cut(View(UP, (EXPERTS * N, K)), 0, 2, 9), lambda d: d.reshape(-1, K)[2:9]),
}


@pytest.mark.parametrize("name", INT4)
@pytest.mark.parametrize("layout", ["rows", "int4_block256"])
def test_int4_recipes(name, layout, tensors, checkpoints):
    recipe, expected = INT4[name]
    dense = expected(torch.stack([tensors[f"dense.{i}"] for i in range(EXPERTS)]))
    made = evaluate(recipe, checkpoints, "bf16")
    assert isinstance(made, Quantised)
    assert torch.equal(made.dequantise(), dense)
    shape = tuple(dense.shape)
    parts = load_weights([_weight("w", shape, recipe, layout=layout)], checkpoints)["w"]
    assert torch.equal(LAYOUTS[layout].unpack(parts, shape, "bf16"), dense)


def test_dtypes_are_converted(tensors, checkpoints):
    assert torch.equal(evaluate(Take("target:q"), checkpoints, "f32"), tensors["q"].to(torch.float32))
    assert torch.equal(evaluate(Take("target:bias"), checkpoints, "bf16"), tensors["bias"].to(torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"target:counts has dtype torch.int64, expected bf16, f16 or f32"):
        evaluate(Take("target:counts"), checkpoints, "bf16")


def test_load_weights_reports_progress(checkpoints):
    seen = []
    weights = [_weight("norm", (8,), Take("target:norm")), _weight("up", (EXPERTS, N, K), UP, layout="int4_block256")]
    load_weights(weights, checkpoints, lambda done, total: seen.append((done, total)))
    total = 16 + EXPERTS * N * (32 + 4) * 4
    assert seen == [(16, total), (total, total)]


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (_weight("w", (9,), Take("target:norm")), r"weight w: target:norm gives shape \[8\], expected \[9\]"),
        (_weight("w", (8,), Take("target:gone")), "tensor gone is missing"),
        (_weight("w", (8,), Take("drafter:norm")), r"drafter:norm: no checkpoint 'drafter' is open \(open: target\)"),
        (_weight("w", (2, 3), View(Take("target:norm"), (2, 3))), r"expected the size of \[2, 3\]"),
        (_weight("w", (4,), Cut(Take("target:norm"), 0, 6, 10)), "expected 6:10 within dimension 0"),
        (_weight("w", (8, 8), Cat((Take("target:q"), Take("target:kv_b")), 0)), "target:kv_b gives shape"),
        (_weight("w", (3, N, 64), Stack(Int4("target:experts.{}.up", 64), 3)), "weight_scale is torch.bfloat16"),
    ],
)
def test_misfits_are_named(weight, message, checkpoints):
    with pytest.raises(CheckpointError, match=message):
        load_weights([weight], checkpoints)


def test_weight_shape_is_held_against_the_codes(tmp_path, tensors):
    kept = {name: tensor for name, tensor in tensors.items() if name.startswith("experts.0")}
    save_file(kept | {"experts.0.up.weight_shape": torch.tensor([N, K - 1])}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts.0.up.weight_shape holds \[4, 95\], expected \[4, 96\]"):
        evaluate(Int4("target:experts.0.up"), {"target": Checkpoint(tmp_path)}, "bf16")


@given(data=st.data(), shape=st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_random_slices_are_slices_of_one_tensor(data, shape):
    recipe = Random("w", tuple(shape), seed=3, std=0.02)
    all_of_it = evaluate(recipe, {}, "f32")
    cut, expected = recipe, all_of_it
    for dim, size in enumerate(shape):
        start = data.draw(st.integers(0, size))
        stop = data.draw(st.integers(start, size))
        cut, expected = Cut(cut, dim, start, stop), expected.narrow(dim, start, stop - start)
    assert torch.equal(evaluate(cut, {}, "f32"), expected)


def test_random_values():
    """The bits are a contract between ranks and machines: these must never change."""
    made = evaluate(Random("layers.0.w", (1000, 100), seed=7, std=0.5, mean=1.0), {}, "f32")
    assert abs(float(made.mean()) - 1.0) < 0.01
    assert abs(float(made.std()) - 0.5) < 0.01
    assert float((made - 1.0).abs().max()) < 0.5 * 3.47
    assert not torch.equal(made, evaluate(Random("layers.1.w", (1000, 100), seed=7, std=0.5, mean=1.0), {}, "f32"))
    assert not torch.equal(made, evaluate(Random("layers.0.w", (1000, 100), seed=8, std=0.5, mean=1.0), {}, "f32"))
    assert made.view(-1)[:50].tolist() == [_by_hand("layers.0.w", index, 7, 0.5, 1.0) for index in range(50)]


def _by_hand(name, index, seed, std, mean):
    """The definition, in Python's integers and one rounding at a time."""
    word = int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")
    word = (word + index * 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    word ^= word >> 31
    total = np.float32(sum(word >> shift & 0xFFFF for shift in (0, 16, 32, 48)) - 2 * 65535)
    return float(total * np.float32(std / math.sqrt(4 * (65536**2 - 1) / 12)) + np.float32(mean))


def test_the_hash_is_splitmix64():
    """The first outputs for seed 1234567, as Rosetta Code gives them."""
    words = [int(word) % 2**64 for word in _hash(1234567, torch.arange(1, 4))]
    assert words == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.gpu
def test_a_gpu_makes_the_same_bits():
    """Ranks make random weights on their devices; the CPU's are the oracle, laid out and not."""
    recipe = Cut(Cut(Random("w", (3, 70, 2560), seed=5, std=0.02, mean=0.1), 1, 3, 68), 2, 256, 2304)
    weight = _weight("w", (3, 65, 2048), recipe, layout="int4_block256")
    assert torch.equal(evaluate(recipe, {}, "f32", "cuda").cpu(), evaluate(recipe, {}, "f32"))
    ours, theirs = load_weights([weight], {})["w"], load_weights([weight], {}, device="cuda")["w"]
    for name, part in ours.items():
        assert torch.equal(theirs[name].cpu(), part)


def test_random_weights_of_a_stack_differ():
    made = evaluate(Stack(Random("expert.{}", (4,), seed=0, std=1.0), 2), {}, "f32")
    assert not torch.equal(made[0], made[1])


def test_random_int4_is_made_in_its_layout():
    weight = _weight("w", (2, 8, 320), Random("w", (2, 8, 320), seed=0, std=0.1), layout="int4_block256")
    parts = load_weights([weight], {})["w"]
    back = LAYOUTS["int4_block256"].unpack(parts, (2, 8, 320), "f32")
    assert abs(float(back.std()) - 0.1) < 0.01


ALL = [
    _weight("norm", (8,), Take("target:norm")),
    _weight("qk", (8, 8), QK),
    _weight("uk", (4, 2, 3), Cut(KV, 1, 0, 2)),
    _weight("uv", (12, 3), View(Cut(KV, 1, 2, 5), (12, 3))),
    _weight("up", (EXPERTS, N, K), UP, layout="int4_block256"),
    _weight("bias", (8,), Take("target:bias"), "f32"),
]
SKIP = ("target:dense.", "target:counts")


def test_everything_is_consumed_once(checkpoints):
    check_consumed(ALL, checkpoints, SKIP)


def test_known_and_declared_skips(tmp_path):
    save_file({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, tmp_path / "model.safetensors")
    check_consumed([], {"target": Checkpoint(tmp_path)})


def test_extra_and_missing_tensors_are_named(checkpoints):
    with pytest.raises(CheckpointError) as caught:
        check_consumed([*ALL[1:4], _weight("x", (1,), Take("target:gone"))], checkpoints)
    assert str(caught.value) == (
        f"{checkpoints['target'].directory}: the checkpoint does not fit its config; missing: target:gone; not used: "
        "target:bias, target:counts, target:dense.0, target:dense.1, target:dense.2 and 10 more; fetch both whole, "
        "from one revision"
    )


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([*ALL, _weight("again", (8,), Take("target:norm"))], r"target:norm of shape \[8\] is used twice"),
        ([*ALL, _weight("again", (1, 5, 3), Cut(KV, 0, 0, 1))], r"target:kv_b of shape \[20, 3\] is used twice"),
        ([*ALL[:3], *ALL[4:]], r"target:kv_b of shape \[20, 3\] is used in part: 24 of 60 elements"),
        (
            [*ALL[:4], *ALL[5:], _weight("some", (EXPERTS, 2, K), Cut(UP, 1, 0, 2))],
            r"target:experts.0.up of shape \[4, 96\] is used in part: 192 of 384 elements",
        ),
    ],
)
def test_partitions(weights, message, checkpoints):
    with pytest.raises(CheckpointError, match=message):
        check_consumed(weights, checkpoints, SKIP)


SHAPES = [(24,), (2, 12), (4, 6), (2, 2, 6), (2, 3, 4), (1, 24, 1), (24, 1), (3, 8)]


@given(data=st.data(), outer=st.sampled_from(SHAPES), inner=st.sampled_from(SHAPES))
def test_boxes_through_views_hold_the_same_elements(data, outer, inner):
    def elements(shape, box):
        places = torch.arange(24).view(shape)
        return places[tuple(slice(*pair) for pair in box)].flatten().tolist()

    pairs = [list(itertools.combinations(range(size + 1), 2)) for size in outer]
    box = tuple(data.draw(st.sampled_from(pair)) for pair in pairs)
    pushed = through_view(box, outer, inner)
    if pushed is not None:
        assert elements(inner, pushed) == elements(outer, box)
    if outer == inner or all(pair == (0, size) for pair, size in zip(box, outer, strict=True)):
        assert pushed is not None
