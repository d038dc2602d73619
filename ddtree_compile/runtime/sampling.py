"""What a request asks for, and what comes back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from ddtree_compile.errors import PromptError

COLDEST = 1e-5  # a temperature below it is greedy: logits over less than that may leave fp32, where all infinities tie
MAX_SEED = (1 << 63) - 1

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick tokens and when to end. The defaults are greedy; so is a temperature below 1e-5.

    Filters come in this order: temperature, top-k (0: all), top-p (renormalised after top-k), min-p. With `top_p` < 1
    at most 1,024 tokens are looked at. A draw depends on (`seed`, position, token) alone; request i of a list that
    shares one SamplingParams has `seed + i`. The checkpoint's own end tokens end a sequence unless `ignore_eos`.
    `bucket` is the tree budget of each round (None: the plan's choice), `shape` "chain" drafts a chain even where the
    plan has trees; `speculate=False` decodes one token a round, whatever the other two say. None of the three changes
    the tokens.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    bucket: int | None = None
    speculate: bool = True
    shape: Literal["tree", "chain"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0, above=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _whole("top_k", self.top_k, 0, 1 << 30)
        _whole("seed", self.seed, 0, MAX_SEED)
        _whole("max_new_tokens", self.max_new_tokens, 1, (1 << 31) - 1)
        for name in ("ignore_eos", "speculate"):
            if type(getattr(self, name)) is not bool:
                raise PromptError(f"sampling parameter {name} = {getattr(self, name)!r}: it must be True or False")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, (1 << 31) - 1)
        if self.shape not in (None, "tree", "chain"):
            raise PromptError(f'sampling parameter shape = {self.shape!r}: it must be "tree", "chain" or None')

    @property
    def heat(self) -> float:
        """The temperature that the device is given: 0 is greedy."""
        return self.temperature if self.temperature >= COLDEST else 0.0

    @property
    def filtered(self) -> bool:
        return self.heat > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


def _check(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    legal = type(value) in (int, float) and math.isfinite(value)
    if not legal or not (low <= value <= high) or (above and value == low):
        rule = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise PromptError(f"sampling parameter {name} = {value!r}: it must be a number {rule}")


def _whole(name: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise PromptError(f"sampling parameter {name} = {value!r}: it must be a whole number from {low} to {high}")


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished sequence.

    `stop_reason` is the stop token, "max_new_tokens" or "context_full"; None when cancelled. `accept_lengths[i]` is how
    many tokens round i added, so 1 + their sum = len(token_ids): the 1 was picked by the prefill. `cached_tokens` of
    the prompt were resident and not run again. `context` is the prompt and the new tokens: what `Engine.extend`
    continues.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    rounds: int
    accept_lengths: tuple[int, ...]
    cached_tokens: int
    context: tuple[int, ...] = field(repr=False, default=())


@dataclass(frozen=True, slots=True)
class Piece:
    """What a round added to request `index` of a stream; `generation` is set on its last piece."""

    index: int
    token_ids: tuple[int, ...]
    generation: Generation | None = None
