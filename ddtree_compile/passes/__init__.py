"""The pipeline: legal graph in, legal graph out, one pass a file. `run_passes` checks and times each.

`LOSSY` passes change the order of rounding; all others keep every bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ddtree_compile.ir.check import check_graph
from ddtree_compile.ir.graph import Graph
from ddtree_compile.passes.absorb import absorb
from ddtree_compile.passes.drop_dead import drop_dead
from ddtree_compile.passes.fuse import fuse
from ddtree_compile.passes.stage import stage
from ddtree_compile.spec import CompileSpec

Pass = Callable[[Graph, CompileSpec], Graph]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("absorb", absorb),  # MLA over latent keys, before anything hides its parts
    ("drop_dead", drop_dead),  # what absorb left unread
    ("fuse", fuse),  # one op where one kernel will do
    ("stage", stage),  # which ops may run at once: buffers are packed by it
)
LOSSY = ("absorb",)

Observer = Callable[[str, Graph, Graph, float], None]


def run_passes(graph: Graph, spec: CompileSpec, observe: Observer | None = None) -> Graph:
    """Run `PASSES` in order, checking what goes in and what comes out. `observe(name, before, after, seconds)`."""
    check_graph(graph)
    for name, run in PASSES:
        started = time.perf_counter()
        after = run(graph, spec)
        seconds = time.perf_counter() - started
        check_graph(after)
        if observe is not None:
            observe(name, graph, after, seconds)
        graph = after
    return graph
