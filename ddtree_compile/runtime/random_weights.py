"""Random weight values keyed by (seed, name, element index): any slice is the same whoever makes it.

Integer arithmetic up to the last step, so that every machine makes the same bits: a splitmix64 hash of the element's
index (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014) gives four 16-bit uniforms, whose
sum is bell-shaped (Irwin-Hall): mean 0, standard deviation 1 after scaling, never beyond 3.47.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final

import torch

Box = tuple[tuple[int, int], ...]

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX1: Final = 0xBF58476D1CE4E5B9
_MIX2: Final = 0x94D049BB133111EB

# Elements made at once: on a CPU the temporaries (a few int64 each) stay in cache.
_CPU_CHUNK, _GPU_CHUNK = 1 << 16, 1 << 24

# Four uniforms on 0 .. 65535: their sum has this mean, and this variance times four.
_MEAN: Final = 2 * 65535
_STD: Final = math.sqrt(4 * (65536**2 - 1) / 12)


def random_box(
    name: str,
    shape: tuple[int, ...],
    box: Box,
    seed: int,
    std: float,
    mean: float,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The elements of `box` ([start, stop) a dimension) of the random tensor `name` of `shape`, in `dtype`."""
    sizes = [stop - start for start, stop in box]
    out = torch.empty(math.prod(sizes), dtype=dtype, device=device)
    key, scale, runs = _key(seed, name), std / _STD, _runs(shape, box)
    chunk = _CPU_CHUNK if out.device.type == "cpu" else _GPU_CHUNK
    for first in range(0, len(out), chunk):
        last = min(first + chunk, len(out))
        places = torch.arange(first, last, dtype=torch.int64, device=device)
        bits = _hash(key, _indices(places, runs))
        total = torch.full_like(bits, -_MEAN)
        for shift in (0, 16, 32, 48):
            total += (bits >> shift) & 0xFFFF
        out[first:last] = total.to(torch.float32) * scale + mean
    return out.view(sizes)


def _runs(shape: tuple[int, ...], box: Box) -> list[tuple[int, int, int]]:
    """(start, size, whole size) of each dimension, whole ones merged into the one outside them: fewer divisions."""
    runs = [(0, 1, 1)]
    for whole, (start, stop) in zip(shape, box, strict=True):
        if (start, stop) == (0, whole):
            first, size, all_of_it = runs[-1]
            runs[-1] = (first * whole, size * whole, all_of_it * whole)
        else:
            runs.append((start, stop - start, whole))
    return runs


def _indices(places: torch.Tensor, runs: list[tuple[int, int, int]]) -> torch.Tensor:
    """Row-major places within the box to row-major element indices of the whole tensor."""
    indices = torch.zeros_like(places)
    stride = 1
    for start, size, whole in reversed(runs[1:]):
        indices += (places % size + start) * stride
        places = places // size
        stride *= whole
    return indices + (places + runs[0][0]) * stride


def _hash(key: int, indices: torch.Tensor) -> torch.Tensor:
    """splitmix64's output at `indices` steps after `key`; int64 arithmetic wraps, as the algorithm wants."""
    bits = indices * _signed(_GOLDEN) + _signed(key)
    bits = (bits ^ _shift(bits, 30)) * _signed(_MIX1)
    bits = (bits ^ _shift(bits, 27)) * _signed(_MIX2)
    return bits ^ _shift(bits, 31)


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift of an int64."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")
