"""Price a machine before renting it: Kimi K2.6 with its DFlash drafter on 8 GPUs, from the models' configs alone.

python examples/plan_kimi.py [SPEC]
"""

import sys
from pathlib import Path

from ddtree_compile import compile_spec, read_spec

SPEC = Path(__file__).parent.parent / "plans" / "kimi-k2.6-8x-rtx-pro-6000" / "spec.toml"
GIB = 1 << 30


def main(path: Path) -> None:
    """Print whether the plan fits and which tree is best at each context."""
    report = compile_spec(read_spec(path)).report
    memory = report["memory"]
    print(f"{report['tensor_parallel']} x {report['gpu']}")
    print(f"{memory['total'] / GIB:.1f} of {memory['capacity'] / GIB:.1f} GiB a rank: fits = {memory['fits']}")
    rows = {(row["context"], row["shape"], row["nodes"]): row for row in report["buckets"]}
    for context, nodes in report["best"].items():
        if nodes is None:
            print(f"context {context}: which tree is best depends on acceptance; the spec has no [acceptance]")
            continue
        row = rows[int(context), report["best_shape"][context], nodes]
        print(
            f"context {context}: best is a {row['shape']} of {nodes} nodes, "
            f"{row['predicted_us'] / 1000:.1f} ms a round, "
            f"{row['expected_tokens']:.2f} tokens a round, {row['tokens_per_second']:.0f} tokens a second"
        )


if __name__ == "__main__":
    main(Path((sys.argv[1:2] or [SPEC])[0]))
