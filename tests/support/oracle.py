"""transformers as the oracle of an engine: what the engine computed is recorded, and checked against full forwards.

`Recorder` wraps an engine's executor and keeps the logits of every prefill, verify and plain segment together with
the tokens that stand before each row. `Oracle` runs the official model on those tokens anew. A row may differ by
`TOLERANCE` of its largest logit; a token may differ only where the oracle's own margin, or a router's, is inside it.
`Tally` counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddtree_compile.runtime.engine import Engine, Executor

TOLERANCE = 1e-4

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """One sequence's rows of a segment. Row n follows `context`, then the tokens of its path: `paths[n]`."""

    segment: str
    context: Tokens
    paths: tuple[Tokens, ...]
    logits: Tensor


class Recorder:
    """An executor that keeps what a segment left in `logits`."""

    def __init__(self, engine: Engine) -> None:
        self.rows: list[Rows] = []
        self._engine = engine
        self._inner: Executor = engine._executor
        engine._executor = self

    def run(self, segment: str) -> None:
        self._inner.run(segment)
        if segment.startswith("prefill["):
            self._keep_prefill(segment)
        elif segment == "plain" or segment.startswith("verify["):
            self._keep_tree(segment)

    def write(self, name: str, values: Any, at: int = 0) -> None:
        self._inner.write(name, values, at)

    def read(self, name: str) -> Tensor:
        return self._inner.read(name)

    def close(self) -> None:
        self._inner.close()

    def _keep_prefill(self, segment: str) -> None:
        slot, start, count = (int(self.read(f"prompt.{name}")) for name in ("slot", "start", "count"))
        before = tuple(self._engine._residents.slots[slot].tokens[:start])
        context = (*before, *self.read("prompt.tokens")[:count].tolist())
        self.rows.append(Rows(segment, context, ((),), self.read("logits")[:1]))

    def _keep_tree(self, segment: str) -> None:
        nodes = int(self.read("row_nodes"))
        valid, logits = self.read("row_sequence"), self.read("logits")
        root, length = self.read("root"), self.read("length")
        trees = None if segment == "plain" else (self.read("tree.tokens"), self.read("tree.parents"))
        for s in range(len(root)):
            rows = [s * nodes + n for n in range(nodes) if valid[s * nodes + n] == s]
            if not rows:
                continue
            assert rows == list(range(s * nodes, s * nodes + len(rows))), "valid rows come first"
            paths: list[Tokens] = [(int(root[s]),)]
            for n in range(1, len(rows)):
                assert trees is not None
                paths.append((*paths[int(trees[1][s, n])], int(trees[0][s, n])))
            context = tuple(self._engine._residents.slots[s].tokens)
            assert len(context) == int(length[s])
            self.rows.append(Rows(segment, context, tuple(paths), logits[rows]))


@dataclass
class Tally:
    """What was compared, and the places where a tie decided."""

    configs: int = 0
    tokens: int = 0
    rows: int = 0
    token_ties: int = 0
    router_ties: int = 0
    worst: float = 0.0
    segments: set[str] = field(default_factory=set)
    accepted: dict[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        lengths = " ".join(f"{length}:{count}" for length, count in sorted(self.accepted.items()))
        return (
            f"{self.configs} configs, {self.tokens} tokens, {self.rows} rows of logits: worst relative difference "
            f"{self.worst:.1e}; {self.token_ties} token ties, {self.router_ties} rows behind a router's tie; rounds by "
            f"accepted length {lengths}"
        )

    def assert_rare(self) -> None:
        assert self.token_ties <= 1e-3 * self.tokens, str(self)
        assert self.router_ties <= 1e-2 * self.rows, str(self)


class Oracle:
    """The official model, run on whole sequences."""

    def __init__(self, model: Any, tally: Tally) -> None:
        self.model, self.tally = model, tally
        self._margins: list[Tensor] = []
        for module in model.modules():
            if type(module).__name__ == "DeepseekV3TopkRouter":
                module.register_forward_hook(self._watch)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [B, T]: logits [B, T, V] and, for each place, the smallest margin of any router up to it [B, T]."""
        self._margins = []
        with torch.no_grad():
            logits = self.model(input_ids=tokens, use_cache=False).logits
        margins = [margin.view(tokens.shape) for margin in self._margins]
        least = torch.stack(margins).amin(0) if margins else torch.full(tokens.shape, torch.inf)
        return logits, least.cummin(-1).values

    def check(self, rows: Sequence[Rows], sequences: Sequence[Tokens], every: int) -> None:
        """Compare recorded rows. Those on `sequences` (prompts with their new tokens) are all compared, the others of
        every `every`-th record."""
        known = {tokens: self.forward(torch.tensor([tokens])) for tokens in dict.fromkeys(sequences)}
        for at, record in enumerate(rows):
            self.tally.segments.add(record.segment)
            aside: dict[int, list[int]] = {}
            for n, path in enumerate(record.paths):
                whole = record.context + path
                home = next((tokens for tokens in known if tokens[: len(whole)] == whole), None)
                if home is not None:
                    logits, margins = known[home]
                    self.compare(
                        record.logits[n], logits[0, len(whole) - 1], margins[0, len(whole) - 1], record.segment
                    )
                elif at % every == 0:
                    aside.setdefault(len(whole), []).append(n)
            for rest in aside.values():
                logits, margins = self.forward(torch.tensor([record.context + record.paths[n] for n in rest]))
                for i, n in enumerate(rest):
                    self.compare(record.logits[n], logits[i, -1], margins[i, -1], record.segment)

    def compare(self, ours: Tensor, official: Tensor, margin: Tensor, where: str) -> None:
        """One row of logits [V]."""
        self.tally.rows += 1
        error = float((ours - official).abs().max() / official.abs().max())
        if error <= TOLERANCE:
            self.tally.worst = max(self.tally.worst, error)
            return
        assert margin <= TOLERANCE, f"{where}: logits differ by {error:.1e} of the largest, no router is near a tie"
        self.tally.router_ties += 1

    def check_tokens(self, prompt: Tokens, new: Tokens) -> None:
        """Every token is the official argmax of what stands before it, or tied with it."""
        logits, margins = self.forward(torch.tensor([prompt + new]))
        for i, token in enumerate(new):
            row = logits[0, len(prompt) + i - 1]
            self.tally.tokens += 1
            if int(row.argmax()) == token:
                continue
            lag = float((row.max() - row[token]) / row.abs().max())
            near = lag <= TOLERANCE or bool(margins[0, len(prompt) + i - 1] <= TOLERANCE)
            assert near, (
                f"token {i} is {token}, the official one {int(row.argmax())}, {lag:.1e} of the largest logit ahead"
            )
            self.tally.token_ties += 1

    def check_generate(self, prompt: Tokens, new: Tokens) -> None:
        """The official greedy `generate`, with its own cache, says the same up to the first tie."""
        with torch.no_grad():
            out = self.model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                max_new_tokens=len(new), pad_token_id=0,
            )  # fmt: skip
        official = tuple(out[0, len(prompt) :].tolist())
        assert len(official) == len(new)
        same = next((i for i in range(len(new)) if official[i] != new[i]), None)
        if same is not None:
            self.check_tokens(prompt, (*new[:same], official[same]))

    def _watch(self, module: Any, _args: Any, out: Any) -> None:
        """By how much the last expert taken leads the first one left, for each place."""
        scores = (out[0].sigmoid() + module.e_score_correction_bias).sort(-1, descending=True).values
        k = module.top_k
        none = torch.full(scores.shape[:1], torch.inf)
        self._margins.append(none if k == scores.shape[1] else scores[:, k - 1] - scores[:, k])
