"""Which MLA ops are absorbed, and which keep their definition."""

from dataclasses import replace
from pathlib import Path

from ddtree_compile.models.config import read_drafter, read_target
from ddtree_compile.models.round import build_program
from ddtree_compile.passes.absorb import UNFOLD_ROWS, absorb
from ddtree_compile.spec import CompileSpec

TINY = Path(__file__).parent.parent.parent / "docs" / "tiny"


def kinds(gpu: str) -> dict[str, set[str]]:
    """The MLA and attention ops of each segment after the pass."""
    target = replace(read_target(TINY / "target"), max_positions=2 * UNFOLD_ROWS)
    spec = CompileSpec.parse({
        "model": {"target": "target", "drafter": "drafter"},
        "tree": {"buckets": [7]},
        "cache": {"max_seq_len": 2 * UNFOLD_ROWS},
        "prefill": {"chunks": [UNFOLD_ROWS - 1, UNFOLD_ROWS]},
        "machine": {"gpu": gpu},
    })  # fmt: skip
    program = build_program(spec, target, read_drafter(TINY / "drafter", target))
    return {
        graph.name: {op.kind for op in absorb(graph, spec).ops if op.kind.startswith(("mla", "attend"))}
        for graph in program.segments
    }


def test_a_gpu_unfolds_the_keys_for_long_chunks_only() -> None:
    found = kinds("h200")
    assert found["verify[7]"] == {"attend_tree"}
    assert found[f"prefill[{UNFOLD_ROWS - 1}]"] == {"attend_causal"}
    assert found[f"prefill[{UNFOLD_ROWS}]"] == {"mla_causal"}


def test_a_cpu_absorbs_every_segment() -> None:
    """A chunk of 512 rows kept the definition on a CPU too, so a prompt's logits depended in their last bits on how it
    was cut into chunks."""
    found = kinds("cpu")
    assert found[f"prefill[{UNFOLD_ROWS}]"] == found[f"prefill[{UNFOLD_ROWS - 1}]"] == {"attend_causal"}
