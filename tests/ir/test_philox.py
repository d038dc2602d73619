"""Philox4x32-10 against the test vectors published with Random123 (kat_vectors)."""

import pytest
import torch

from ddtree_compile.ir.philox import philox

VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _seed(key):
    word = key[1] << 32 | key[0]
    return torch.tensor(word - (1 << 64) if word >> 63 else word)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter, key, expected):
    assert tuple(int(word) for word in philox(_seed(key), *counter)) == expected


def test_words_are_broadcast_and_stay_within_32_bits():
    seeds, counters = torch.arange(3).view(3, 1), torch.arange(5)
    words = philox(seeds, counters, 7)
    for word in words:
        assert word.shape == (3, 5)
        assert word.dtype == torch.int64
        assert int(word.min()) >= 0
        assert int(word.max()) < 1 << 32
    one = philox(torch.tensor(2), 4, 7)
    assert [int(word[2, 4]) for word in words] == [int(word) for word in one]


def test_uniform_enough():
    word = philox(torch.tensor(11), torch.arange(1 << 16))[2]
    counts = torch.bincount(word >> 28, minlength=16)
    assert len(counts) == 16
    assert (counts - 4096).abs().max() < 6 * 64
