"""Fusion: a table of patterns, each of which becomes one op whose meaning is the composition of its parts.

A pattern reads like the code it matches: `g = linear(x, _); u = linear(x, _); y = swiglu(g, u)`. A name stands for the
same value wherever it occurs, `_` for any value. The last step may be starred: `y* = linear(n, _)` takes every such
reader of `n`. What a part makes that others read stays an out of the fused op; the rest becomes private to it.
Patterns are tried in order, each op is fused once, and nothing is fused that would make a cycle.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ddtree_compile.ir.graph import Graph, Op, Space, Value
from ddtree_compile.passes.stage import dependencies
from ddtree_compile.spec import CompileSpec

LATENT = "c = cut(a); n = rms_norm(c, _); k = cut(a); p = rope(k, _); r = cat(n, p); h = heads(r)"
HEADS = "x = linear(a, _); h = heads(x); n = rms_norm(h, _); r = rope(n, _)"

PATTERNS: tuple[tuple[str, str], ...] = (
    ("routing", "s = linear(x, _); i = route(s, _, _)"),
    ("expert_gate_up", "g = expert_linear(x, i, _); u = expert_linear(x, i, _); y = swiglu(g, u)"),
    ("expert_down", "e = expert_linear(h, i, _); y = combine(e, i, _)"),
    ("gate_up", "g = linear(x, _); u = linear(x, _); y = swiglu(g, u)"),
    ("latent_store", f"{LATENT}; t = keep(h)"),
    ("latent_write", f"{LATENT}; write_chunk(h, _, _, _)"),
    ("query_split", "q = linear(x, _); h = heads(q); n = cut(h); c = cut(h); p = rope(c, _)"),
    ("head_store", f"{HEADS}; t = keep(r)"),
    ("head_write", f"{HEADS}; write_chunk(r, _, _, _)"),
    ("head_turn", HEADS),
    ("value_store", "x = linear(a, _); h = heads(x); t = keep(h)"),
    ("value_write", "x = linear(a, _); h = heads(x); write_chunk(h, _, _, _)"),
    ("values", "x = linear(a, _); h = heads(x)"),
    ("latent_query", "l = head_linear(n, _); q = cat(l, _)"),
    ("latent_out", "m = merge(_, _); o = head_linear(m, _); f = flat(o); y = linear(f, _); z = add(_, y)"),
    ("attention_out", "m = merge(_, _); f = flat(m); y = linear(f, _); z = add(_, y)"),
    ("flat_out", "f = flat(m); y = linear(f, _); z = add(_, y)"),
    ("linear_add", "y = linear(x, _); z = add(_, y)"),
    ("add_add", "a = add(r, s); z = add(_, a)"),
    ("tap_context", "j = cat(...); f = linear(j, _); n = rms_norm(f, _)"),
    ("draft_head", "d = draft_rows(x); n = rms_norm(d, _); l = linear(n, _); t = top_log_probs(l)"),
    ("last_head", "r = last_row(x, _); n = rms_norm(r, _); l = linear(n, _)"),
    ("norm_linears", "n = rms_norm(x, _); y* = linear(n, _)"),
    ("commit_caches", "p = walk(...); w* = commit_rows(p, ...)"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a pattern: the op kind, the names of its arguments (`...`: any number more), its first out's name."""

    out: str
    kind: str
    args: tuple[str, ...]
    every: bool

    @staticmethod
    def parse(text: str) -> Step:
        match = re.fullmatch(r"(?:(\w+)(\*?) = )?(\w+)\((.*)\)", text.strip())
        assert match, f"not a pattern step: {text!r}"
        out, star, kind, args = match.groups()
        return Step(out or "", kind, tuple(filter(None, args.split(", "))), bool(star))


TEMPLATES = tuple((name, tuple(Step.parse(part) for part in text.split(";"))) for name, text in PATTERNS)


def fuse(graph: Graph, spec: CompileSpec) -> Graph:
    """Apply `PATTERNS` in order."""
    index = _Index(graph.ops, _after(dependencies(graph)))
    for name, steps in TEMPLATES:
        groups = _matches(index, steps)
        if groups:
            index = _replace(index, name, groups)
    return graph.with_ops(index.ops)


def _after(before: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each op the later ones that wait for it."""
    after: list[list[int]] = [[] for _ in before]
    for at, earlier in enumerate(before):
        for other in earlier:
            after[other].append(at)
    return after


def _matches(index: _Index, steps: tuple[Step, ...]) -> list[tuple[int, ...]]:
    """Op positions of each match of a pattern, none of them in two."""
    if not index.kinds.keys() >= {step.kind for step in steps}:
        return []
    taken: set[int] = set()
    groups: list[tuple[int, ...]] = []
    for at in index.kinds[steps[-2 if steps[-1].every else -1].kind]:
        group = index.every(steps, at) if steps[-1].every else index.ending(steps, at)
        if group and len(group) > 1 and not taken & set(group) and index.convex(group):
            groups.append(group)
            taken |= set(group)
    return groups


class _Index:
    """Who makes and who reads each value, the ops of each kind, and who waits for each op (`after`), by position."""

    def __init__(self, ops: tuple[Op, ...], after: list[list[int]]) -> None:
        self.ops, self.after = ops, after
        self.kinds: dict[str, list[int]] = {}
        self.maker: dict[str, int] = {}
        self.readers: dict[str, list[int]] = {}
        for at, op in enumerate(ops):
            if not op.body:
                self.kinds.setdefault(op.kind, []).append(at)
            for out in op.outs:
                self.maker[out.name] = at
            for arg in op.args:
                self.readers.setdefault(arg.name, []).append(at)

    def ending(self, steps: tuple[Step, ...], at: int) -> tuple[int, ...] | None:
        """The ops of a match whose last step is op `at`, or None. Steps are matched last to first."""
        bound: dict[str, str] = {}
        found: dict[int, int] = {}
        names = {step.out: i for i, step in enumerate(steps) if step.out}

        def match(i: int, position: int) -> bool:
            step, op = steps[i], self.ops[position]
            if i in found:
                return found[i] == position
            if op.kind != step.kind or op.body or position in found.values():
                return False
            found[i] = position
            exact = "..." not in step.args
            wanted = step.args if exact else step.args[: step.args.index("...")]
            if len(op.args) != len(wanted) if exact else len(op.args) < len(wanted):
                return False
            return all(unify(name, arg) for name, arg in zip(wanted, op.args, strict=False))

        def unify(name: str, value: Value) -> bool:
            if name == "_":
                return True
            if bound.setdefault(name, value.name) != value.name:
                return False
            if name not in names:
                return True
            maker = self.maker.get(value.name)
            return maker is not None and self.ops[maker].outs[0].name == value.name and match(names[name], maker)

        if not match(len(steps) - 1, at):
            return None
        for i in reversed(range(len(steps))):  # steps that nothing later in the pattern reads: siblings
            if i not in found and not any(
                match(i, reader)
                for arg in steps[i].args
                if arg in bound
                for reader in self.readers.get(bound[arg], [])
                if reader not in found.values() and self.ops[reader].kind == steps[i].kind
            ):
                return None
        return tuple(sorted(found.values()))

    def every(self, steps: tuple[Step, ...], at: int) -> tuple[int, ...] | None:
        """A match whose last step is starred: op `at` is the step before it, and every reader of its first out joins,
        provided that all readers fit."""
        head, last = steps[:-1], steps[-1]
        group = self.ending(head, at)
        if group is None:
            return None
        readers = self.readers.get(self.ops[at].outs[0].name, [])
        fit = [r for r in readers if self.ops[r].kind == last.kind and not self.ops[r].body]
        mandatory = last.args[0] == head[-1].out and "..." not in last.args
        if not fit or (mandatory and len(fit) < len(readers)):
            return None
        return tuple(sorted({*group, *fit}))

    def convex(self, group: tuple[int, ...]) -> bool:
        """Whether no path leaves the group and comes back."""
        inside, last = set(group), max(group)
        pending = [n for member in group for n in self.after[member] if n not in inside]
        seen: set[int] = set()
        while pending:
            node = pending.pop()
            if node in inside:
                return False
            if node < last and node not in seen:
                seen.add(node)
                pending += self.after[node]
        return True


def _replace(index: _Index, name: str, groups: list[tuple[int, ...]]) -> _Index:
    """Contract each group to one op and put the ops in an order that respects every dependency. What waits for a part
    waits for the whole: nobody has to look for dependencies again."""
    owner = {member: group for group in groups for member in group}
    units = [owner.get(at, (at,)) for at in range(len(index.ops)) if at not in owner or at == owner[at][0]]
    unit_of = {member: u for u, unit in enumerate(units) for member in unit}
    edges = [{unit_of[n] for member in unit for n in index.after[member]} - {u} for u, unit in enumerate(units)]
    waits = [0] * len(units)
    for targets in edges:
        for target in targets:
            waits[target] += 1
    order = list(_sorted(edges, waits))
    place = {u: at for at, u in enumerate(order)}
    ops = tuple(
        _fused(name, [index.ops[member] for member in units[u]], set(units[u]), index)
        if len(units[u]) > 1
        else index.ops[units[u][0]]
        for u in order
    )
    return _Index(ops, [[place[target] for target in edges[u]] for u in order])


def _sorted(edges: list[set[int]], waits: list[int]) -> Iterator[int]:
    """Kahn's order, the earliest free unit first."""
    free = [u for u, count in enumerate(waits) if count == 0]
    heapq.heapify(free)
    while free:
        u = heapq.heappop(free)
        yield u
        for target in edges[u]:
            waits[target] -= 1
            if waits[target] == 0:
                heapq.heappush(free, target)


def _fused(name: str, parts: list[Op], members: set[int], index: _Index) -> Op:
    made = {out.name for part in parts for out in part.outs}
    args = _unique(arg for part in parts for arg in part.args if arg.name not in made)
    outs = tuple(
        out
        for part in parts
        for out in part.outs
        if out.space is not Space.TEMP or any(reader not in members for reader in index.readers.get(out.name, []))
    )
    return Op(name, args, outs, (), parts[-1].scope, tuple(parts))


def _unique(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple({value.name: value for value in values}.values())
