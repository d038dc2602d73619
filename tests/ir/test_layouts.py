"""Layouts against compressed-tensors' own packing and dequantisation, bit for bit."""

import re
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor, pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given
from hypothesis import strategies as st

from ddtree_compile.ir.graph import TensorType
from ddtree_compile.ir.layouts import LAYOUTS, int4_codes
from ddtree_compile.ir.quantised import Quantised, quantise

INT4 = LAYOUTS["int4_block256"]


def _random(shape, group=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)
    scales = torch.rand((*shape[:-1], shape[-1] // group), generator=generator).add(0.01).to(torch.bfloat16)
    return Quantised(codes, scales, group)


@given(lead=st.sampled_from([(), (1,), (3,), (2, 2)]), n=st.integers(1, 5), groups=st.integers(1, 19))
def test_int4_round_trip_is_exact(lead, n, groups):
    value = _random((*lead, n, groups * 32))
    parts = INT4.pack(value)
    assert {name: TensorType(tuple(part.shape), "i32") for name, part in parts.items()} == INT4.parts(
        value.shape, "bf16"
    )
    assert INT4.nbytes(value.shape, "bf16") == sum(part.nbytes for part in parts.values())
    back = int4_codes(parts, value.shape)
    assert torch.equal(back.codes, value.codes)
    assert torch.equal(back.scales, value.scales)
    assert torch.equal(INT4.unpack(parts, value.shape, "bf16"), value.dequantise())


def test_unpack_equals_compressed_tensors():
    value = _random((7, 320))
    packed = pack_to_int32(value.codes, 4)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=4, strategy="group", group_size=32, symmetric=True)
    )
    stored = {"weight_packed": packed, "weight_scale": value.scales, "weight_shape": torch.tensor(value.shape)}
    decompressed = PackedQuantizationCompressor.decompress(stored, scheme)["weight"]
    assert torch.equal(decompressed, value.dequantise())
    codes = unpack_from_int32(packed, 4, torch.Size(value.shape))
    theirs = codes.to(torch.bfloat16) * value.scales.repeat_interleave(32, dim=1)
    assert torch.equal(INT4.unpack(INT4.pack(value), value.shape, "bf16"), theirs)


def test_every_bit_has_the_place_that_the_page_says():
    value = _random((3, 512))
    parts = INT4.pack(value)
    words, scales = parts["words"], parts["scales"].view(torch.bfloat16)
    for n in range(3):
        for k in range(512):
            block, group, element = k // 256, k % 256 // 32, k % 32
            assert (int(words[block, n, element]) >> (4 * group) & 15) - 8 == value.codes[n, k]
            assert scales[block, n, 2 * (group % 4) + group // 4] == value.scales[n, k // 32]


def test_padding_is_code_8_and_scale_0():
    parts = INT4.pack(_random((2, 64)))
    assert bool(((parts["words"] >> 8) & 0xFFFFFF == 0x888888).all())
    assert parts["scales"].shape == (1, 2, 4)
    assert bool((parts["scales"][:, :, 2:] == 0).all())


def test_rows_keep_a_dense_tensor_and_dequantise_codes():
    dense = torch.randn(3, 4).to(torch.bfloat16)
    rows = LAYOUTS["rows"]
    assert torch.equal(rows.unpack(rows.pack(dense.T), (4, 3), "bf16"), dense.T)
    assert rows.nbytes((3, 4), "bf16") == 24
    value = _random((2, 64))
    assert torch.equal(rows.pack(value)["data"], value.dequantise())


def test_dense_weights_are_quantised_within_half_a_step():
    dense = torch.randn(2, 4, 96)
    value = quantise(dense, 32)
    step = value.scales.to(torch.float32).repeat_interleave(32, dim=-1)
    assert bool(((value.dequantise().to(torch.float32) - dense).abs() <= 0.51 * step + dense.abs() / 128).all())
    assert torch.equal(INT4.unpack(INT4.pack(dense), dense.shape, "bf16"), value.dequantise())
    assert torch.equal(quantise(torch.zeros(1, 32), 32).dequantise(), torch.zeros(1, 32, dtype=torch.bfloat16))


def test_what_the_layout_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="groups of 32 inputs a scale, not 64"):
        INT4.pack(_random((2, 128), group=64))
    value = _random((2, 64))
    with pytest.raises(ValueError, match="holds bf16 scales"):
        INT4.pack(Quantised(value.codes, value.scales.to(torch.float32) + 1e-6, 32))


def test_quantised_cuts_cats_stacks_and_views():
    value = _random((4, 128))
    left, right = value.cut(1, 0, 64), value.cut(1, 64, 128)
    assert torch.equal(Quantised.cat([left, right], 1).dequantise(), value.dequantise())
    assert torch.equal(value.cut(0, 1, 3).dequantise(), value.dequantise()[1:3])
    stacked = Quantised.stack([value, value])
    assert stacked.shape == (2, 4, 128)
    assert torch.equal(stacked.view((8, 128)).dequantise(), value.dequantise().repeat(2, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda q: q.cut(1, 0, 48), "cannot cut inputs 0 to 48: scales cover groups of 32"),
        (lambda q: q.view((2, 64)), r"cannot view \(1, 128\) as \(2, 64\)"),
        (lambda q: Quantised(q.codes, q.scales[:, :3], 32), r"scales have shape \(1, 3\), expected \(1, 4\)"),
        (lambda q: Quantised(q.codes[:, :100], q.scales, 32), "100 inputs are not a multiple of the group size 32"),
        (lambda q: Quantised.stack([q, Quantised(q.codes, q.scales[:, ::2], 64)]), r"group sizes \[32, 64\]"),
    ],
)
def test_quantised_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make(_random((1, 128)))


def test_the_page_shows_what_its_code_prints(capsys):
    page = Path(__file__).parents[2] / "docs" / "int4-layout.md"
    code, output = re.search(r"```python\n(.*?)```\n+```text\n(.*?)```", page.read_text(), re.DOTALL).groups()
    exec(code, {})
    assert capsys.readouterr().out == output
