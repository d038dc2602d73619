"""How a weight is stored: named pairs of torch functions, pack (a logical weight to its parts) and unpack (back).

`rows` keeps a dense tensor as it is. `int4_block256` is ours, for int4 weights [..., N, K] with one bf16 scale for
every 32 inputs; docs/int4-layout.md draws it bit by bit. N output features, K inputs, B blocks of 256 inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from ddtree_compile.ir.graph import TensorType
from ddtree_compile.ir.quantised import Quantised, quantise

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
}

BLOCK: Final = 256  # inputs of one block: 8 groups, one nibble of each word to a group
GROUP: Final = 32  # inputs that share a scale
GROUPS: Final = BLOCK // GROUP
OFFSET: Final = 8  # a stored nibble is q + 8, q in -8 .. 7

Parts = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """A storage form. `parts(shape, dtype)` gives the type of each stored tensor by name, without data."""

    name: str
    pack: Callable[[torch.Tensor | Quantised], Parts]
    unpack: Callable[[Parts, tuple[int, ...], str], torch.Tensor]
    parts: Callable[[tuple[int, ...], str], dict[str, TensorType]]

    def nbytes(self, shape: tuple[int, ...], dtype: str) -> int:
        """Bytes of a weight of this logical shape and dtype, all parts together."""
        return sum(part.nbytes for part in self.parts(shape, dtype).values())


def _rows_parts(shape: tuple[int, ...], dtype: str) -> dict[str, TensorType]:
    return {"data": TensorType(shape, dtype)}


def _rows_pack(value: torch.Tensor | Quantised) -> Parts:
    dense = value.dequantise() if isinstance(value, Quantised) else value
    return {"data": dense.contiguous()}


def _rows_unpack(parts: Parts, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return parts["data"].view(shape).to(TORCH_DTYPES[dtype])


def _int4_parts(shape: tuple[int, ...], dtype: str) -> dict[str, TensorType]:
    """`words` int32 [..., B, N, 32] and `scales` int32 [..., B, N, 4], each of the latter a pair of bf16."""
    del dtype
    *lead, n, k = shape
    blocks = math.ceil(k / BLOCK)
    return {
        "words": TensorType((*lead, blocks, n, GROUP), "i32"),
        "scales": TensorType((*lead, blocks, n, GROUPS // 2), "i32"),
    }


def _int4_pack(value: torch.Tensor | Quantised) -> Parts:
    """Quantised weights as they are; dense ones are quantised first (only random weights come so)."""
    if isinstance(value, torch.Tensor):
        value = quantise(value, GROUP)
    if value.group != GROUP:
        raise ValueError(f"int4_block256 holds groups of {GROUP} inputs a scale, not {value.group}")
    if not torch.equal(value.scales.to(torch.bfloat16).to(value.scales.dtype), value.scales):
        raise ValueError("int4_block256 holds bf16 scales; these do not fit")
    n, k = value.shape[-2:]
    types = _int4_parts(value.shape, "bf16")
    codes, scales = value.codes.reshape(-1, n, k), value.scales.reshape(-1, n, k // GROUP)
    device = codes.device
    words = torch.empty((len(codes), *types["words"].shape[-3:]), dtype=torch.int32, device=device)
    pairs = torch.empty((len(codes), *types["scales"].shape[-3:]), dtype=torch.int32, device=device)
    for index in range(len(codes)):  # one matrix at a time: the temporaries are 4 bytes an element
        words[index] = _pack_codes(codes[index])
        pairs[index] = _pack_scales(scales[index])
    return {"words": words.view(types["words"].shape), "scales": pairs.view(types["scales"].shape)}


def _pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """int8 [N, K] to int32 [B, N, 32]: nibble i of word j is element j of group i of its block."""
    n, k = codes.shape
    blocks = math.ceil(k / BLOCK)
    padded = torch.full((n, blocks * BLOCK), OFFSET, dtype=torch.int32, device=codes.device)
    padded[:, :k] = codes.to(torch.int32) + OFFSET
    nibbles = padded.view(n, blocks, GROUPS, GROUP)
    words = torch.zeros((n, blocks, GROUP), dtype=torch.int32, device=codes.device)
    for group in range(GROUPS):
        words |= nibbles[:, :, group] << (4 * group)
    return words.transpose(0, 1).contiguous()


def _pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """[N, K/32] to int32 [B, N, 4]: word p holds group p in its low half and group p + 4 in its high half."""
    n, groups = scales.shape
    blocks = math.ceil(groups / GROUPS)
    padded = torch.zeros((n, blocks * GROUPS), dtype=torch.bfloat16, device=scales.device)
    padded[:, :groups] = scales.to(torch.bfloat16)
    pairs = padded.view(n, blocks, 2, GROUPS // 2).permute(1, 0, 3, 2).contiguous()
    return pairs.view(torch.int32).squeeze(-1)


def _int4_unpack(parts: Parts, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """bf16(q) * scale, rounded to bf16, then `dtype`: compressed-tensors' own dequantisation, bit for bit."""
    return int4_codes(parts, shape).dequantise().to(TORCH_DTYPES[dtype])


def int4_codes(parts: Parts, shape: tuple[int, ...]) -> Quantised:
    """The codes and scales that `int4_block256` parts hold, for a weight of logical `shape` [..., N, K]."""
    *lead, n, k = shape
    words = parts["words"].view(-1, *parts["words"].shape[-3:])
    nibbles = torch.stack([(words >> (4 * group)) & 15 for group in range(GROUPS)], dim=-2)  # [., B, N, 8, 32]
    codes = (nibbles.to(torch.int8) - OFFSET).transpose(1, 2).reshape(*lead, n, -1)[..., :k]
    pairs = parts["scales"].reshape(-1, *parts["scales"].shape[-3:], 1).view(torch.bfloat16)  # [., B, N, 4, 2]
    scales = pairs.transpose(-1, -2).transpose(1, 2).reshape(*lead, n, -1)[..., : k // GROUP]
    return Quantised(codes.contiguous(), scales.contiguous(), GROUP)


LAYOUTS: Final[dict[str, Layout]] = {
    "rows": Layout("rows", _rows_pack, _rows_unpack, _rows_parts),
    "int4_block256": Layout("int4_block256", _int4_pack, _int4_unpack, _int4_parts),
}
