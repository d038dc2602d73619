"""Row invariance: a row's bits do not depend on its neighbours, their number, or its place among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.lab import one_thread
from torch import Tensor

from ddtree_compile.ir.ops import attention, dense, moe, rotary, rows, tree

WIDTHS = st.sampled_from([1, 7, 32, 33, 96, 100, 257])
ROPE = {
    "theta": 1e4, "interleaved": False, "factor": 8.0, "original_max": 64, "beta_fast": 32.0, "beta_slow": 1.0,
    "amplitude": 1.1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def equal_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))
    )


def route(logits: Tensor, bias: Tensor, sequence: Tensor) -> Tensor:
    ids, weights = moe.route(logits, bias, sequence, top_k=min(3, logits.shape[1]), normalise=True, scale=2.5)
    return torch.cat([ids.float(), weights], dim=1)


def top(logits: Tensor) -> Tensor:
    values, ids = tree.top_log_probs(logits, k=min(5, logits.shape[1]))
    return torch.cat([values, ids.float()], dim=1)


def linears(x: Tensor, draw: st.DataObject) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    w = torch.randn(draw.draw(WIDTHS), x.shape[1])
    return lambda x: dense.linear(x, w), (x,)


def heads(x: Tensor, draw: st.DataObject) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    w = torch.randn(3, x.shape[1], 20)
    return lambda x: dense.head_linear(x[:, None].expand(-1, 3, -1), w, transpose=True), (x,)


def experts(x: Tensor, draw: st.DataObject) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    w, ids = torch.randn(6, 9, x.shape[1]), torch.stack([torch.randperm(6)[:3] for _ in x]).int()
    ids[torch.rand(len(x)) < 0.2] = -1
    return lambda x, ids: moe.expert_linear(x, ids, w).flatten(1), (x, ids)


def inner_experts(x: Tensor, draw: st.DataObject) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    w, ids = torch.randn(6, 9, x.shape[1]), torch.stack([torch.randperm(6)[:2] for _ in x]).int()
    each = torch.stack([x, x.flip(1)], dim=1)
    weights = torch.rand(len(x), 2)
    return lambda x, ids, weights: moe.combine(moe.expert_linear(x, ids, w), ids, weights), (each, ids, weights)


CASES: dict[str, Callable[[Tensor, st.DataObject], tuple[Callable[..., Tensor], tuple[Tensor, ...]]]] = {
    "linear": linears,
    "head_linear": heads,
    "expert_linear": experts,
    "combine": inner_experts,
    "rms_norm": lambda x, _: (partial(dense.rms_norm, gain=torch.randn(x.shape[1]), eps=1e-6), (x,)),
    "rms_norm of heads": lambda x, _: (
        lambda x: dense.rms_norm(torch.stack([x, -x, x * 2], dim=1), torch.ones(x.shape[1]), eps=1e-6), (x,)
    ),
    "add": lambda x, _: (dense.add, (x, x.flip(0))),
    "swiglu": lambda x, _: (dense.swiglu, (x, x.flip(0))),
    "embed": lambda x, _: (partial(dense.embed, rows=torch.randn(50, 8)), (torch.randint(50, (len(x),)),)),
    "rope": lambda x, _: (
        lambda x, p: rotary.rope(torch.cat([x, x], dim=1), p, **ROPE), (x, torch.randint(5000, (len(x),)))
    ),
    "rope interleaved": lambda x, _: (
        lambda x, p: rotary.rope(torch.cat([x, x], dim=1), p, **{**ROPE, "interleaved": True}),
        (x, torch.randint(5000, (len(x),))),
    ),
    "route": lambda x, _: (
        lambda x, s: route(x.float(), torch.linspace(-1, 1, x.shape[1]), s), (x, torch.randint(-1, 3, (len(x),)))
    ),
    "top_log_probs": lambda x, _: (top, (x,)),
    "merge": lambda x, _: (
        lambda x, lse: attention.merge(torch.stack([x[:, None], -x[:, None]], 1).float(), lse, dtype=""),
        (x, torch.randn(len(x), 2, 1) * 5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
@given(data=st.data())
def test_a_row_does_not_see_its_neighbours(case, dtype, data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    count = data.draw(st.sampled_from([1, 2, 5, 16, 17, 33, 64]))
    x = (torch.randn(count, data.draw(WIDTHS)) * 3).to(dtype)
    run, args = CASES[case](x, data)
    whole = run(*args)
    for size in (1, data.draw(st.integers(1, 40))):
        chosen = torch.randint(count, (size,))
        assert equal_bits(run(*(arg[chosen] for arg in args)), whole[chosen])


T, H, G, D, E = 200, 4, 2, 8, 6
SCALE = 0.35


def tree_of(nodes: int) -> tuple[list[list[int]], Tensor]:
    """A random tree's paths (root first, the node last) and its ancestor bits."""
    paths, bits = [[0]], torch.zeros(nodes, -(-nodes // 32), dtype=torch.int32)
    for node in range(1, nodes):
        paths.append([*paths[int(torch.randint(node, ()))], node])
    for node, path in enumerate(paths):
        for other in path:
            bits[node, other // 32] |= torch.tensor(1 << other % 32, dtype=torch.int64).int()
    return paths, bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", [1, 3])
@given(data=st.data())
def test_a_tree_row_sees_its_own_path_alone(dtype, splits, data):
    """Whatever stands beside it: other sequences, other nodes, rows that are not valid, and what a cache holds past its
    length; and whether a key is in the tree still or in the cache already."""
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    sequences, nodes = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 4, 12, 40]))
    k_cache, v_cache = torch.randn(sequences, T, G, D).to(dtype), torch.randn(sequences, T, G, E).to(dtype)
    count = sequences * nodes
    q, k, v = (torch.randn(count, *shape).to(dtype) for shape in ((H, D), (G, D), (G, E)))
    lengths = [data.draw(st.sampled_from([0, 1, 50, 63, 64, 100, 127, 128, 150])) for _ in range(sequences)]
    trees = [tree_of(nodes) for _ in range(sequences)]
    sequence = torch.arange(sequences).repeat_interleave(nodes).int()
    sequence[torch.rand(count) < 0.2] = -1
    for s, length in enumerate(lengths):
        k_cache[s, length:], v_cache[s, length:] = torch.nan, torch.nan
    own = {"scale": SCALE, "v_dim": E, "splits": splits}
    bits = torch.cat([bits for _, bits in trees])
    part, lse = attention.attend_tree(q, k_cache, v_cache, k, v, torch.tensor(lengths), sequence, bits, **own)
    assert not part.isnan().any()
    for row in torch.randperm(count)[:6].tolist():
        s, node = divmod(row, nodes)
        if sequence[row] < 0:
            assert not part[row].any()
            assert (lse[row] == -torch.inf).all()
            continue
        path = [s * nodes + other for other in trees[s][0][node]]
        done = data.draw(st.integers(0, len(path) - 1))  # so many of its path are committed already
        start, left = lengths[s] + done, path[done:]
        keys, values = k_cache[s : s + 1].clone(), v_cache[s : s + 1].clone()
        keys[0, lengths[s] : start], values[0, lengths[s] : start] = k[path[:done]], v[path[:done]]
        chain = torch.tensor([[(1 << i + 1) - 1] for i in range(len(left))])
        alone, mass = attention.attend_tree(
            q[left], keys, values, k[left], v[left], torch.tensor([start]), torch.zeros(len(left)).int(), chain, **own
        )
        assert equal_bits(alone[-1], part[row])
        assert equal_bits(mass[-1], lse[row])
        keys[0, lengths[s] : lengths[s] + len(path)], values[0, lengths[s] : lengths[s] + len(path)] = k[path], v[path]
        at = torch.tensor([lengths[s] + len(path) - 1])
        causal, mass = attention.attend_causal(q[row : row + 1], keys, values, at, torch.tensor([0]), **own)
        assert equal_bits(causal[0], part[row])
        assert equal_bits(mass[0], lse[row])


@given(data=st.data())
def test_mla_rows_do_not_see_their_neighbours(data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    latent, rope_width, nodes = 16, 4, data.draw(st.sampled_from([1, 5, 17]))
    cache, record = torch.randn(2, T, 1, latent + rope_width), torch.randn(2 * nodes, 1, latent + rope_width)
    w_uk, w_uv = torch.randn(H, D, latent), torch.randn(H, E, latent)
    q, length = torch.randn(2 * nodes, H, D + rope_width), torch.tensor([data.draw(st.integers(0, 140)), 70])
    paths, bits = tree_of(nodes)
    sequence = torch.arange(2).repeat_interleave(nodes).int()
    whole = attention.mla_tree(
        q, cache, record, w_uk, w_uv, length, sequence, bits.repeat(2, 1), scale=SCALE, splits=1
    )  # fmt: skip
    alone = attention.mla_tree(
        q[:nodes], cache[:1], record[:nodes], w_uk, w_uv, length[:1], sequence[:nodes], bits, scale=SCALE, splits=1
    )
    assert equal_bits(alone, whole[:nodes])
    full = cache[:1].clone()
    path, start = paths[-1], int(length[0])
    full[0, start : start + len(path)] = record[path]
    last = torch.tensor([start + len(path) - 1])
    causal = attention.mla_causal(
        q[nodes - 1 : nodes], full, w_uk, w_uv, last, torch.tensor([0]), scale=SCALE, splits=1
    )  # fmt: skip
    assert equal_bits(causal[0], whole[nodes - 1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 20])
@given(data=st.data())
def test_a_draft_block_sees_its_own_sequence_alone(causal, window, data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    block, sequences = data.draw(st.integers(2, 8)), 3
    lengths = torch.tensor([data.draw(st.integers(0, 150)) for _ in range(sequences)])
    active = torch.tensor([data.draw(st.integers(0, 1)) for _ in range(sequences)])
    k_cache, v_cache = torch.randn(sequences, T, G, D), torch.randn(sequences, T, G, E)
    q, k, v = (torch.randn(sequences * block, *shape) for shape in ((H, D), (G, D), (G, E)))
    own = {"scale": SCALE, "causal": causal, "window": window, "splits": 1}
    part, lse = attention.attend_block(q, k_cache, v_cache, k, v, lengths, active, **own)
    for s in range(sequences):
        at = slice(s * block, (s + 1) * block)
        alone, mass = attention.attend_block(
            q[at], k_cache[s : s + 1], v_cache[s : s + 1], k[at], v[at], lengths[s : s + 1], active[s : s + 1], **own
        )
        assert equal_bits(alone, part[at])
        assert equal_bits(mass, lse[at])
        assert active[s] or not part[at].any()


@given(data=st.data())
def test_attention_is_attention(data):
    """A tree row against torch's softmax over its path, float64; split or not, merged."""
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    nodes, length = 9, data.draw(st.sampled_from([0, 5, 64, 130]))
    k_cache, v_cache = torch.randn(1, T, G, D), torch.randn(1, T, G, E)
    q, k, v = (torch.randn(nodes, *shape) for shape in ((H, D), (G, D), (G, E)))
    paths, bits = tree_of(nodes)
    for splits in (1, 3):
        part, lse = attention.attend_tree(
            q, k_cache, v_cache, k, v, torch.tensor([length]), torch.zeros(nodes).int(), bits, scale=SCALE, v_dim=E,
            splits=splits,
        )  # fmt: skip
        out = attention.merge(part, lse, dtype="")
        for node, path in enumerate(paths):
            keys = torch.cat([k_cache[0, :length], k[path]]).repeat_interleave(H // G, 1).double()
            values = torch.cat([v_cache[0, :length], v[path]]).repeat_interleave(H // G, 1).double()
            weights = (torch.einsum("hd,nhd->hn", q[node].double(), keys) * SCALE).softmax(1)
            expected = torch.einsum("hn,nhe->he", weights, values)
            assert torch.allclose(out[node].double(), expected, atol=1e-5)


def test_invalid_rows_are_nowhere():
    """A node that does not exist, a sequence that rests, a position past the cache."""
    tokens, depths = torch.tensor([[5, 6, 7], [8, 9, 1]]), torch.tensor([[0, 1, 2], [0, 1, 1]])
    bits = torch.tensor([[[1], [3], [7]], [[1], [3], [0]]])
    ids, positions, _, sequence, position, nodes = rows.node_rows(
        tokens.int(), depths.int(), bits.int(), torch.tensor([98, 4]).int(), torch.tensor([1, 1]), nodes=3, rows=8,
        slots=100,
    )  # fmt: skip
    assert sequence.tolist() == [0, 0, -1, 1, 1, -1, -1, -1]
    assert positions.tolist() == [98, 99, 0, 4, 5, 0]
    assert position.tolist() == [98, 99, 0, 4, 5, 0, 0, 0]
    assert ids.tolist() == [5, 6, 0, 8, 9, 0]
    assert nodes.tolist() == [3]
    _, _, _, sequence, *_ = rows.node_rows(
        tokens.int(), depths.int(), bits.int(), torch.tensor([98, 4]).int(), torch.tensor([0, 1]), nodes=2, rows=4,
        slots=100,
    )  # fmt: skip
    assert sequence.tolist() == [-1, -1, 1, 1]
