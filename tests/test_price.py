"""Prices against figures worked out by hand from the configs, and against published ones for Kimi K2.6."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.models import PLANS, qwen_spec

from ddtree_compile import machine
from ddtree_compile.acceptance import expected_tokens
from ddtree_compile.compiler import compile_spec, read_models
from ddtree_compile.ir.ops.record import uniform_experts
from ddtree_compile.memory import Holdings, Split, split_of
from ddtree_compile.models.round import build_program
from ddtree_compile.place import place_spaces
from ddtree_compile.price import contexts_of
from ddtree_compile.spec import CompileSpec, read_spec

HIT = [[0.8, 0.1, 0.05], [0.7, 0.2], [0.6, 0.2], [0.5, 0.25]]
BF16 = 2


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    spec = qwen_spec(tmp_path_factory.mktemp("qwen"), acceptance={"hit": HIT}, machine={"gpu": "h200"})
    return dict(compile_spec(spec).report)


@pytest.fixture(scope="module")
def kimi() -> dict[str, Any]:
    """The shipped plan's report; test_golden compiles it anew."""
    return json.loads((PLANS / "kimi-k2.6-8x-rtx-pro-6000" / "plan.json").read_text())["report"]


def row(report: dict[str, Any], shape: str, nodes: int, context: int) -> dict[str, Any]:
    (found,) = [
        row for row in report["buckets"] if (row["shape"], row["nodes"], row["context"]) == (shape, nodes, context)
    ]
    return found


def test_bytes_of_a_small_round_by_hand(report: dict[str, Any]) -> None:
    hidden, heads, kv, d, inner, layers, vocab = 64, 4, 2, 16, 96, 3, 320
    attention = layers * (hidden * (2 * heads + 2 * kv) * d + hidden + 2 * d)
    mlp = layers * (3 * hidden * inner + hidden)
    drafter_inner, drafter_layers, block, taps = 48, 2, 5, 2
    draft = drafter_layers * (hidden * (2 * heads + 2 * kv) * d + 3 * hidden * drafter_inner + 2 * hidden + 2 * d)
    extend = taps * hidden * hidden + hidden + drafter_layers * (2 * hidden * kv * d + d)
    context, nodes = 128, 9
    assert row(report, "tree", nodes, context)["bytes"] == {
        "attention": attention * BF16,
        "mlp": mlp * BF16,
        "drafter": (draft + hidden + extend) * BF16,  # hidden: its final norm
        "head": (2 * vocab * hidden + hidden) * BF16,  # draft and verify
        "embedding": (block + nodes + 1) * hidden * BF16,
        "target_cache": layers * context * 2 * kv * d * BF16,
        "drafter_cache": drafter_layers * context * 2 * kv * d * BF16,
    }


def test_flops_of_a_plain_round_by_hand(report: dict[str, Any]) -> None:
    hidden, heads, kv, d, inner, layers, vocab, context = 64, 4, 2, 16, 96, 3, 320, 64
    weights = layers * (hidden * (2 * heads + 2 * kv) * d + 3 * hidden * inner) + vocab * hidden
    assert row(report, "plain", 0, context)["flops"] == 2 * weights + layers * 2 * heads * context * 2 * d


def test_the_floor_is_below_the_prediction_and_near_bytes_over_bandwidth(report: dict[str, Any]) -> None:
    for found in report["buckets"]:
        assert found["floor_us"] < found["predicted_us"]
        by_bytes = sum(found["bytes"].values()) / machine.gpu("h200").read_bandwidth * 1e6
        assert found["floor_us"] >= by_bytes * 0.9999


def test_price_grows_with_nodes_and_context(report: dict[str, Any], kimi: dict[str, Any]) -> None:
    for priced in (report, kimi):
        contexts = sorted({found["context"] for found in priced["buckets"]})
        buckets = priced["spec"]["tree"]["buckets"]
        for key in ("floor_us", "predicted_us", "flops"):
            for context in contexts:
                by_nodes = [row(priced, "tree", b, context)[key] for b in buckets]
                assert by_nodes == sorted(by_nodes)
            by_context = [row(priced, "tree", buckets[0], context)[key] for context in contexts]
            assert by_context == sorted(by_context)


def test_expected_tokens_of_a_tree_is_one_plus_the_best_prefixes(report: dict[str, Any]) -> None:
    """By enumeration of every prefix, which the heap never does."""
    prefixes = [1.0]
    level = [1.0]
    for hits in HIT:
        level = [p * q for p in level for q in hits]
        prefixes += level
    best = sorted(prefixes, reverse=True)
    for nodes in (3, 4, 9):
        assert row(report, "tree", nodes, 256)["expected_tokens"] == pytest.approx(sum(best[: nodes + 1]), rel=1e-5)
    chain = [math.prod(hits[0] for hits in HIT[:depth]) for depth in range(5)]
    assert row(report, "chain", 3, 256)["expected_tokens"] == pytest.approx(sum(chain[:4]), rel=1e-5)
    assert row(report, "plain", 0, 256)["expected_tokens"] == 1.0
    for found in report["buckets"]:
        rate = found["expected_tokens"] / found["predicted_us"] * 1e6
        assert found["tokens_per_second"] == pytest.approx(rate, rel=1e-4)


def test_the_best_bucket_has_the_most_tokens_a_second(report: dict[str, Any]) -> None:
    for context, nodes in report["best"].items():
        rows = [found for found in report["buckets"] if found["context"] == int(context)]
        best = max(rows, key=lambda found: found["tokens_per_second"])
        assert (nodes, report["best_shape"][context]) == (best["nodes"], best["shape"])


def test_without_a_prior_tokens_are_unknown(tmp_path: Path) -> None:
    priced = compile_spec(qwen_spec(tmp_path)).report
    trees = [found for found in priced["buckets"] if found["shape"] != "plain"]
    assert {found["expected_tokens"] for found in trees} == {found["tokens_per_second"] for found in trees} == {None}
    assert set(priced["best"].values()) == {None}
    assert any("acceptance" in note for note in priced["notes"])


def test_a_prior_of_certainty_fills_the_chain(tmp_path: Path) -> None:
    spec = qwen_spec(tmp_path, acceptance={"hit": [[1.0]] * 4})
    assert expected_tokens(spec, "chain", 3, 4, 320) == 4.0
    assert expected_tokens(spec, "tree", 9, 4, 320) == 5.0


def test_contexts_are_powers_up_to_the_cache() -> None:
    assert contexts_of(204_800) == (1024, 4096, 16_384, 65_536, 204_800)
    assert contexts_of(4096) == (1024, 4096)
    assert contexts_of(256) == (64, 128, 256)
    assert contexts_of(2) == (1, 2)


# Kimi K2.6 on 8 x RTX PRO 6000: figures that others worked out from the checkpoint and published


def test_kimi_reads_the_published_bytes_of_routed_experts(kimi: dict[str, Any]) -> None:
    """1.486 GB a rank and token at TP8; 8, 16, 32 and 64 rows of uniform routing 11.1, 20.4, 35.0 and 52.8 GB."""
    expert = 22_020_096 + 2_752_512  # codes and scales of one expert's three matrices
    assert row(kimi, "plain", 0, 1024)["bytes"]["experts"] == 60 * 8 * expert // 8 == 1_486_356_480
    for nodes, published in ((7, 11.1), (15, 20.4), (31, 35.0), (63, 52.8)):
        assert row(kimi, "tree", nodes, 1024)["bytes"]["experts"] / 1e9 == pytest.approx(published, abs=0.05)
    assert row(kimi, "tree", 15, 1024)["experts_touched"] == pytest.approx(110, abs=0.5)


def test_kimi_reads_the_published_bytes_of_cache(kimi: dict[str, Any]) -> None:
    """576 bf16 values a token and layer, 61 layers, on every rank."""
    assert row(kimi, "plain", 0, 4096)["bytes"]["target_cache"] == 70_272 * 4096
    windowed = 6 * 2 * 8 * 128 * BF16 // 8 * 4096  # the drafter's: 6 layers of 8 key heads, one a rank, window 4096
    assert row(kimi, "tree", 7, 65_536)["bytes"]["drafter_cache"] == windowed


def test_kimi_replicates_what_engines_replicate(kimi: dict[str, Any]) -> None:
    """q_a and kv_a are whole on each rank: 5.74 GB a token and rank without the caches, if the router were sharded;
    ours is whole too."""
    read = row(kimi, "plain", 0, 1024)["bytes"]
    without = sum(read.values()) - read["target_cache"] - read["router"] * 7 / 8
    assert without / 1e9 == pytest.approx(5.74, abs=0.01)
    a_projections = 61 * (1536 + 576) * 7168 * BF16
    sharded = 61 * (12_288 * 1536 + 64 * 256 * 512 + 7168 * 8192) * BF16 // 8
    norms = 61 * (7168 + 1536 + 512) * BF16
    assert read["attention"] == a_projections + sharded + norms


def test_kimi_fits_on_eight_and_says_how_much_is_free(kimi: dict[str, Any]) -> None:
    memory = kimi["memory"]
    parts = sum(memory[name] for name in ("weights", "cache", "arena", "round", "peer"))
    assert parts == memory["total"] <= memory["capacity"] and memory["fits"]
    assert memory["cache"] == pytest.approx(204_800 * (70_272 + 6 * 2 * 128 * BF16), rel=1e-6)
    assert memory["weights"] / 1e9 == pytest.approx(77.6, abs=0.2)


def memory_of(name: str, changes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The memory of a shipped spec with `changes`, without compiling it (and so without an arena)."""
    data = read_spec(PLANS / name / "spec.toml").to_dict()
    merged = {table: {**data.get(table, {}), **changes.get(table, {})} for table in data}
    spec = CompileSpec.parse(merged, base=PLANS / name)
    models = read_models(spec)
    program = build_program(spec, models.target, models.drafter)
    holdings = Holdings(program, place_spaces(program.segments), arena=0, width=models.target.hidden * BF16)
    return holdings.report(spec, split_of(spec, program, fp8=False))


CROWDED: dict[str, tuple[str, dict[str, dict[str, Any]], set[str]]] = {
    "latent caches": (
        "kimi-k2.6-8x-rtx-pro-6000",
        {"cache": {"max_sequences": 6}},
        {"cache.max_seq_len", "cache.max_sequences", "cache.context_shards", "machine.gpu"},
    ),
    "key heads": (
        "qwen3-8b-h200",
        {"cache": {"max_sequences": 4}, "machine": {"gpu": "rtx-5090"}},
        {"cache.max_seq_len", "cache.max_sequences", "machine.tensor_parallel", "machine.gpu"},
    ),
    "weights": ("qwen3-8b-h200", {"machine": {"gpu": "rtx-5070-ti"}}, {"machine.tensor_parallel", "machine.gpu"}),
}


@pytest.mark.parametrize("case", CROWDED)
def test_what_makes_it_fit_is_computed_and_does_fit(case: str) -> None:
    name, changes, expected = CROWDED[case]
    found = memory_of(name, changes)
    assert not found["fits"]
    assert found["over"] == found["total"] - found["capacity"] > 0
    assert {advice["set"] for advice in found["advice"]} == expected
    for advice in found["advice"]:
        table, key = advice["set"].split(".")
        after = memory_of(name, changes | {table: {**changes.get(table, {}), key: advice["to"]}})
        assert after["fits"], advice
        assert after["total"] <= advice["total"] <= after["capacity"]


def test_a_rank_holds_whole_heads(tmp_path: Path) -> None:
    """Two key heads over four ranks: each rank holds one of them, not half of one."""
    spec = qwen_spec(tmp_path, machine={"tensor_parallel": 4})
    models = read_models(spec)
    program = build_program(spec, models.target, models.drafter)
    split = split_of(spec, program, fp8=False)
    held = {weight.value.name: split.weight_shape(weight) for weight in program.weights}
    assert held["target.l00.q"] == (16, 64) and held["target.l00.k"] == (16, 64) and held["target.l00.o"] == (64, 16)
    assert held["target.l00.attn_norm"] == (64,) and held["target.head"] == (80, 64)
    caches = {v.name: v for graph in program.segments for v in graph.values().values() if v.name == "k.l00"}
    assert split.cache_bytes(caches["k.l00"]) == 256 * 1 * 16 * BF16
    assert Split(4, 2).cache_bytes(caches["k.l00"]) == 128 * 1 * 16 * BF16


def test_an_fp8_cache_is_half_and_warned_of(tmp_path: Path) -> None:
    plain = compile_spec(qwen_spec(tmp_path)).report
    small = compile_spec(qwen_spec(tmp_path, cache={"max_seq_len": 256, "dtype": "fp8_e4m3"})).report
    here = row(plain, "tree", 9, 128)["bytes"]["target_cache"]
    assert row(small, "tree", 9, 128)["bytes"]["target_cache"] * 2 == here
    assert small["notes"][0].startswith("warning: an fp8 cache")


def test_distinct_experts() -> None:
    assert uniform_experts(1, 8, 384) == pytest.approx(8)
    assert uniform_experts(10_000, 8, 384) == pytest.approx(384)
