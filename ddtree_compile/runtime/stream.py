"""A stream of rounds: requests wait for a slot, are prefilled, step in groups, and leave when they are over."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from ddtree_compile.ir.ops.commit import Finish
from ddtree_compile.runtime.sampling import FinishReason, Generation, Piece, SamplingParams
from ddtree_compile.runtime.sequences import Slot

ENDS: Final[dict[Finish, tuple[FinishReason, str | None]]] = {
    Finish.STOP: ("stop", None),  # and its reason is the token
    Finish.LIMIT: ("length", "max_new_tokens"),
    Finish.CONTEXT: ("length", "context_full"),
    Finish.NONE: ("cancelled", None),
}


Progress = Callable[[int, int], None]


@dataclass
class Request:
    """A prompt on its way: `tokens` are the new ones so far."""

    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    slot: Slot | None = None
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    segments: tuple[str, ...] = ()
    cancelled: bool = False

    def end(self, finish: Finish) -> Generation | None:
        """The Generation, if the sequence is over."""
        if finish is Finish.NONE and not self.cancelled:
            return None
        reason, why = ENDS[finish]
        why = self.tokens[-1] if finish is Finish.STOP else why
        return Generation(
            tuple(self.tokens), reason, why, len(self.accept_lengths), tuple(self.accept_lengths), self.cached,
            self.prompt + tuple(self.tokens),
        )  # fmt: skip


class Rounds(Protocol):
    """What drives requests: the Engine."""

    def admit(self, request: Request) -> bool: ...
    def prefill(self, request: Request, progress: Progress | None = None) -> tuple[list[int], Finish]: ...
    def step(self, requests: Sequence[Request]) -> list[tuple[list[int], Finish]]: ...
    def release(self, request: Request) -> None: ...


class Stream:
    """Iterates over `Piece`s. `cancel` ends one request, or all, before the next round; `seconds` says where time
    went."""

    def __init__(self, engine: Rounds, requests: list[Request], progress: Progress | None = None) -> None:
        self.seconds = {"prefill": 0.0, "decode": 0.0}
        self._engine = engine
        self._requests = requests
        self._progress = progress
        self._pieces = self._run()

    def __iter__(self) -> Generator[Piece]:
        return self._pieces

    def __next__(self) -> Piece:
        return next(self._pieces)

    def cancel(self, index: int | None = None) -> None:
        """End request `index` (all, if None); its Generation says "cancelled" and keeps what it has."""
        for request in self._requests:
            if index in (None, request.index):
                request.cancelled = True

    def close(self) -> None:
        """Stop, and leave the sequences resident."""
        self._pieces.close()

    def _run(self) -> Generator[Piece]:
        waiting, live = list(self._requests), list[Request]()
        try:
            while waiting or live:
                for request in [r for r in (*live, *waiting) if r.cancelled]:
                    yield self._over(request, [], Finish.NONE, live, waiting)
                while waiting and not waiting[0].cancelled and self._engine.admit(waiting[0]):
                    request = waiting.pop(0)
                    live.append(request)
                    started = time.perf_counter()
                    tokens, finish = self._engine.prefill(request, self._progress)
                    self.seconds["prefill"] += time.perf_counter() - started
                    yield self._over(request, tokens, finish, live, waiting)
                for members in _groups(live):
                    group = [request for request in members if not request.cancelled]
                    if not group:
                        continue
                    started = time.perf_counter()
                    said = self._engine.step(group)
                    self.seconds["decode"] += time.perf_counter() - started
                    for request, (tokens, finish) in zip(group, said, strict=True):
                        request.accept_lengths.append(len(tokens))
                        yield self._over(request, tokens, finish, live, waiting)
        finally:
            for request in live:
                self._engine.release(request)

    def _over(
        self, request: Request, tokens: list[int], finish: Finish, live: list[Request], waiting: list[Request]
    ) -> Piece:
        """Take a round's tokens in; a request that has ended leaves."""
        request.tokens += tokens
        generation = request.end(finish) if finish is not Finish.NONE or not tokens else None
        if generation is not None:
            self._engine.release(request)
            (live if request in live else waiting).remove(request)
        return Piece(request.index, tuple(tokens), generation)


def _groups(live: Sequence[Request]) -> list[list[Request]]:
    """Requests by the segments of their rounds."""
    groups: dict[tuple[str, ...], list[Request]] = {}
    for request in live:
        groups.setdefault(request.segments, []).append(request)
    return list(groups.values())
