"""Small model pairs, engines on poisoned memory, and everything a run leaves behind, to be compared bit for bit.

`Lab` makes a plan over models on disk and runs requests. `Watched` wraps an executor: it poisons ROUND memory before
each round and keeps the bits of every logits row that decided a token.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ddtree_compile.compiler import compile_spec, load
from ddtree_compile.plan import Plan
from ddtree_compile.runtime.cpu import CpuExecutor
from ddtree_compile.runtime.engine import Engine
from ddtree_compile.runtime.sampling import Generation, SamplingParams
from ddtree_compile.spec import CompileSpec
from support.checkpoints import KIMI, QWEN3, make_drafter, make_kimi, make_qwen3, make_spec
from support.planted import Coverage, Planted

LAYERS = {"num_hidden_layers": 2}
CACHES = ("latent.", "k.", "v.", "ctx.")


@dataclass
class Watched:
    """An executor that keeps the bits of what decided: `logits[seed, position]` of every row on a walked path."""

    inner: CpuExecutor | Planted
    poisoned: bool = True
    logits: dict[tuple[int, int], bytes] = field(default_factory=dict)
    segments: Counter[str] = field(default_factory=Counter)

    def write(self, name: str, values: Any, at: int = 0) -> None:
        self.inner.write(name, values, at)

    def read(self, name: str) -> torch.Tensor:
        return self.inner.read(name)

    def close(self) -> None:
        self.inner.close()

    def run(self, segment: str) -> None:
        self.segments[segment] += 1
        self.inner.run(segment)
        if segment in ("commit", "plain_commit"):
            self._keep(tree=segment == "commit")
        if segment == "seat":
            slot = int(self.read("prompt.slot"))
            self.logits[int(self.read("seed")[slot]), int(self.read("length")[slot]) - 1] = _bits(
                self.read("logits")[0]
            )

    def _keep(self, *, tree: bool) -> None:
        """Follow what each sequence emitted down its tree."""
        logits, nodes = self.read("logits"), int(self.read("row_nodes"))
        lengths, seeds, emitted = (self.read(name).tolist() for name in ("length", "seed", "emitted"))
        for s, count in enumerate(self.read("accepted").tolist()):
            children: dict[tuple[int, int], int] = {}
            if tree:
                parents, tokens = self.read("tree.parents")[s].tolist(), self.read("tree.tokens")[s].tolist()
                children = {(parents[n], tokens[n]): n for n in range(1, nodes) if parents[n] >= 0}
            node = 0
            for i in range(count):
                self.logits[seeds[s], lengths[s] - count + i] = _bits(logits[s * nodes + node])
                node = children[node, emitted[s][i]] if i < count - 1 else node

    def caches(self, seed: int, length: int) -> dict[str, bytes]:
        """The bits of the first `length` positions of every cache of the request of a seed."""
        slot = self.read("seed").tolist().index(seed)
        cpu = self.inner.inner if isinstance(self.inner, Planted) else self.inner
        names = [name for name in cpu._places if name.startswith(CACHES)]
        return {name: _bits(self.read(name)[slot, :length]) for name in names}


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True)
class Run:
    """What a request left: its Generation, the logits of each position that gave a token, and its caches."""

    generation: Generation
    logits: dict[int, bytes]
    caches: dict[str, bytes]

    def same(self, other: Run, *, context: bool) -> None:
        """Assert equality bit for bit; `context`: of the drafter's caches too (plain rounds do not fill them)."""
        assert self.generation.token_ids == other.generation.token_ids
        assert self.generation.finish_reason == other.generation.finish_reason
        assert self.generation.stop_reason == other.generation.stop_reason
        wrong = [position for position in self.logits if self.logits[position] != other.logits[position]]
        assert not wrong, f"logits differ at positions {wrong}"
        assert self.logits.keys() == other.logits.keys()
        for name, bits in self.caches.items():
            assert (name.startswith("ctx.") and not context) or bits == other.caches[name], f"{name} differs"


@dataclass(frozen=True)
class Lab:
    """A plan and its weights, from which engines are made."""

    plan: Plan
    weights: dict[str, Any]

    @classmethod
    def make(cls, root: Path, buckets: Sequence[int], **tables: Any) -> Lab:
        """Compile a spec over `root/target` and `root/drafter`."""
        spec = CompileSpec.parse(make_spec(root, list(buckets), **tables))
        plan = compile_spec(spec)
        return cls(plan, load(spec, plan)[0])

    def watched(
        self, truths: Mapping[int, Sequence[int]] | None = None, *, seed: int = 0, stops: Sequence[int] = (),
        coverage: Coverage | None = None,
    ) -> tuple[Engine, Watched]:  # fmt: skip
        """An engine on poisoned memory, planted when `truths` are given."""
        executor: CpuExecutor | Planted = CpuExecutor(self.plan, self.weights, poisoned=True)
        if truths is not None:
            executor = Planted(executor, truths, random.Random(seed), coverage or Coverage())
        watched = Watched(executor)
        return Engine(self.plan, watched, stops), watched

    def run(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], **planting: Any) -> list[Run]:
        """Run requests of distinct seeds, no more than there are slots, and collect what they left."""
        engine, watched = self.watched(**planting)
        with engine:
            made = engine.generate(prompts, params)
            return [
                Run(
                    one,
                    {at: bits for (seed, at), bits in watched.logits.items() if seed == own.seed},
                    watched.caches(own.seed, len(one.context) - 1),
                )
                for one, own in zip(made, params, strict=True)
            ]


def make_models(root: Path, family: str, *, dtype: str = "float32", block: int = 8, **changes: Any) -> Path:
    """A small target of a family ("kimi" or "qwen3") and its drafter; `changes` go into the target's config."""
    changed = {**LAYERS, **changes}
    make, config = (make_kimi, KIMI) if family == "kimi" else (make_qwen3, QWEN3)
    model = make(root / "target", **changed)
    if dtype != "float32":
        model.to(getattr(torch, dtype)).save_pretrained(root / "target")
    make_drafter(root / "drafter", {**config, **changed}, block_size=block, dtype=dtype)
    return root


def prompts_of(lengths: Sequence[int], vocab: int = 97, seed: int = 0) -> list[list[int]]:
    """Random prompts."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "top_k": {"temperature": 1.2, "top_k": 7},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "all": {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
}


@contextmanager
def one_thread() -> Iterator[None]:
    """Small tensors run ten times faster on one thread than on several that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
