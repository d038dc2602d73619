"""Resident sequences: which tokens each slot's caches hold, and which slot a new prompt should continue.

A slot keeps the caches of its last request. A new prompt reuses the longest prefix it shares with any idle slot:
every cache is rewound by setting its length, and only the rest of the prompt is run. The drafter's context caches
may lag behind the target's (a request without speculation does not fill them), so a speculating request reuses no
more than both hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Slot:
    """One row of STATE. `tokens` are committed: their K/V is in the target's caches; the first `drafted` of them are
    in the drafter's. `used` is the time of the last request, in requests."""

    index: int
    tokens: list[int] = field(default_factory=list)
    drafted: int = 0
    busy: bool = False
    used: int = 0

    def reusable(self, prompt: Sequence[int], *, speculate: bool) -> int:
        """How many tokens of `prompt` need not be run. The last one always is: its logits give the next token."""
        limit = min(len(prompt) - 1, self.drafted if speculate else len(self.tokens), len(self.tokens))
        for i in range(limit):
            if self.tokens[i] != prompt[i]:
                return i
        return limit

    def rewind(self, length: int) -> None:
        """Forget what lies behind the first `length` tokens."""
        del self.tokens[length:]
        self.drafted = min(self.drafted, length)

    def extend(self, tokens: Sequence[int], *, drafted: bool) -> None:
        """`tokens` were committed, to the drafter's caches as well when `drafted` (and those had no gap)."""
        if drafted and self.drafted == len(self.tokens):
            self.drafted += len(tokens)
        self.tokens.extend(tokens)


class Residents:
    """All slots. `claim` gives the idle one that serves a prompt best."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot(index) for index in range(count)]
        self._requests = 0

    def claim(self, prompt: Sequence[int], *, speculate: bool) -> tuple[Slot, int] | None:
        """The idle slot with the longest reusable prefix, rewound to it, and its length; None when all are busy.

        Of equals, the one whose caches hold least, then the one not used for longest.
        """
        idle = [slot for slot in self.slots if not slot.busy]
        if not idle:
            return None
        self._requests += 1
        shared = {slot.index: slot.reusable(prompt, speculate=speculate) for slot in idle}
        best = min(idle, key=lambda slot: (-shared[slot.index], bool(slot.tokens), slot.used, slot.index))
        best.rewind(shared[best.index])
        best.busy, best.used = True, self._requests
        return best, shared[best.index]
