"""Writes docs/corridor.md: one tiny round, with a real dump at each stage of the corridor.

    python docs/corridor.py            prints the page
    python docs/corridor.py --write    writes it beside this file

A test compares the page with what the code does now, so a change of a pass shows here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ddtree_compile.compiler import plan_program, read_models
from ddtree_compile.ir.graph import Graph
from ddtree_compile.ir.text import print_graph
from ddtree_compile.models.round import build_program
from ddtree_compile.passes import PASSES
from ddtree_compile.passes.buffers import Arena, lifetimes
from ddtree_compile.passes.picture import arena_text
from ddtree_compile.plan import Plan
from ddtree_compile.runtime.cpu import CpuExecutor
from ddtree_compile.runtime.engine import Engine
from ddtree_compile.runtime.sampling import SamplingParams
from ddtree_compile.runtime.weights import load_weights
from ddtree_compile.spec import CompileSpec, read_spec

HERE = Path(__file__).parent
SHOWN = "l01"  # the layer whose ops are shown: the one with experts
PROMPT = [1, 2, 3]

PAGE = """# The corridor, walked once

    spec.toml -> CompileSpec -> Graph -> passes -> Graph -> place -> Plan -> Engine -> tokens

Everything below was printed by `python docs/corridor.py` from `docs/tiny/`: random weights, two target layers (the
second with experts), a drafter of one layer that drafts three tokens, trees of seven nodes. Of the target only layer
`{layer}` is shown. `%` is a temporary, `$` STATE, `&` ROUND, `!` IO, `@` a weight; what follows `;` is the op's scope.

## 1. The spec

{spec}

## 2. The logical graph

`models/` turns the two configs into one graph a segment: {segments}. This is `verify[7]`, eight rows (the root and
seven nodes), before any pass. Attention is written as MLA is defined.

{logical}

## 3. Passes

`passes.PASSES` is the whole pipeline; each takes a legal graph and gives a legal graph.

{passes}

After `absorb`, attention runs over the latent keys themselves. `drop_dead` removes what nobody reads any more.

{absorbed}

`fuse` makes one op where one kernel will do; its meaning is the composition of its parts, which stay inside it. `stage`
says which ops may run at once (`@n`).

{fused}

## 4. The plan

Each segment's temporaries are packed by their lifetimes in stages; one arena serves all segments.

{arena}

`verify[7]`'s arena, bytes upwards, stages to the right:

{picture}

## 5. A round

The prompt {prompt} was prefilled and its first token picked. Then one round, segment by segment:

{round}

And the whole of it, through the library:

{generation}
"""


def fenced(text: str, language: str = "") -> str:
    """A code block."""
    return f"```{language}\n{text.rstrip()}\n```"


def layer_of(graph: Graph) -> str:
    """The printed ops of the shown layer, with the bodies of fused ones."""
    kept = [op for op in graph.ops if f"/{SHOWN}/" in f"{op.scope}/"]
    lines = print_graph(graph.with_ops(tuple(kept))).splitlines()
    return fenced("\n".join(line[2:] for line in lines if line.startswith("  ") and not line.startswith("  in ")))


def after(graph: Graph, last: str, spec: CompileSpec) -> Graph:
    """The graph as pass `last` leaves it."""
    for name, run in PASSES:
        graph = run(graph, spec)
        if name == last:
            break
    return graph


def arena_table(plan: Plan) -> str:
    """A row a segment: ops, stages, bytes and their lower bound."""
    rows = ["segment        ops  stages  bytes  lower bound"]
    for s in plan.segments:
        stages = max(op.stage for op in s.graph.ops) + 1
        rows.append(f"{s.name:13} {len(s.graph.ops):4} {stages:7} {s.temp_bytes:6} {s.lower_bound:12}")
    return fenced("\n".join([*rows, f"one arena for all: {plan.arena} bytes"]))


def one_round(plan: Plan) -> str:
    """What each segment of the first round leaves behind."""
    executor = CpuExecutor(plan, load_weights(plan.weights, {}))
    engine = Engine(plan, executor)
    stream = engine.stream([PROMPT], SamplingParams(max_new_tokens=8, bucket=7))
    first = next(stream)
    lines = [f"prefill, pick, seat: token {first.token_ids[0]} is the root, at position {len(PROMPT)}"]
    executor.write("active", [1])

    def read(name: str) -> list[int]:
        return executor.read(name).flatten().tolist()

    for segment in ("draft", "tree", "verify[7]", "pick[greedy]", "commit"):
        executor.run(segment)
        if segment == "draft":
            log_probs, ids = executor.read("draft.lp"), executor.read("draft.ids")
            lines.append("draft: the three likeliest tokens of each depth, with their log-probabilities")
            for depth in range(ids.shape[0]):
                best = (f"{int(ids[depth, k])} ({float(log_probs[depth, k]):.2f})" for k in range(3))
                lines.append(f"    depth {depth + 1}: {', '.join(best)}")
        if segment == "tree":
            lines.append(f"tree: tokens  {read('tree.tokens')}")
            lines.append(f"      parents {read('tree.parents')}")
            bits = executor.read("tree.bits")[0, :, 0].tolist()
            lines.append(f"      ancestor bits {', '.join(format(word, '08b') for word in bits)}")
        if segment == "verify[7]":
            lines.append(f"verify[7]: logits of eight rows, f32{list(executor.read('logits').shape)}")
        if segment == "pick[greedy]":
            lines.append(f"pick: the target's own choice at each row: {read('picks')}")
        if segment == "commit":
            count = int(executor.read("accepted")[0])
            lines.append(f"commit: the walk says {read('emitted')[:count]}, so {count} rows enter the caches;")
            lines.append(f"      length is now {read('length')[0]}, the new root {read('root')[0]}")
    engine.close()
    return fenced("\n".join(lines))


def page() -> str:
    """The whole page."""
    torch.set_num_threads(1)
    path = HERE / "tiny" / "spec.toml"
    spec = read_spec(path)
    models = read_models(spec)
    program = build_program(spec, models.target, models.drafter)
    plan = plan_program(spec, models, program)
    logical = next(graph for graph in program.segments if graph.name == "verify[7]")
    segment = plan.segment("verify[7]")
    buffers = lifetimes(segment.graph)
    arena = Arena(segment.temp_bytes, segment.offsets, segment.lower_bound, segment.temp_bytes == segment.lower_bound)
    with Engine.from_spec(path) as engine:
        (generation,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=8, bucket=7))
    return PAGE.format(
        layer=SHOWN,
        spec=fenced(path.read_text(), "toml"),
        segments=", ".join(f"`{graph.name}`" for graph in program.segments),
        logical=layer_of(logical),
        passes=fenced("\n".join(name for name, _ in PASSES)),
        absorbed=layer_of(after(logical, "drop_dead", spec)),
        fused=layer_of(segment.graph),
        arena=arena_table(plan),
        picture=fenced(arena_text(buffers, arena)),
        prompt=PROMPT,
        round=one_round(plan),
        generation=fenced(
            f"engine.generate([{PROMPT}], SamplingParams(max_new_tokens=8, bucket=7))\n"
            f"token_ids      {list(generation.token_ids)}\n"
            f"accept_lengths {list(generation.accept_lengths)}\n"
            f"finish_reason  {generation.finish_reason} ({generation.stop_reason})"
        ),
    )


if __name__ == "__main__":
    if "--write" in sys.argv:
        (HERE / "corridor.md").write_text(page(), encoding="utf-8")
    else:
        print(page())
