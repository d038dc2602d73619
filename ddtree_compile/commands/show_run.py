"""How `run` shows what came out: text as it comes, statistics of a run, a comparison of three, and their JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ddtree_compile.runtime.sampling import Generation
    from ddtree_compile.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Run:
    """One mode of a comparison. `seconds` has prefill and decode."""

    mode: str
    generation: Generation
    seconds: Mapping[str, float]

    @property
    def tokens_per_second(self) -> float | None:
        return rate(self.generation, self.seconds["decode"])


def writer(to: TextIO, tokenizer: Tokenizer | None) -> Callable[[tuple[int, ...], bool], None]:
    """A function of (a round's tokens, is it the last round) that writes them: text, never a part of a character; token
    ids without a tokenizer. What it wrote ends with a newline."""
    from ddtree_compile.text import StreamDecoder

    reconfigure = getattr(to, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")  # a terminal that is not UTF-8 shows `?` for what it lacks
    decoder = None if tokenizer is None else StreamDecoder(tokenizer)
    ended = True

    def write(tokens: tuple[int, ...], last: bool) -> None:
        nonlocal ended
        if decoder is None:
            text = "".join(f"{token} " for token in tokens)
        else:
            text = decoder.push(tokens) + (decoder.finish() if last else "")
        ended = text.endswith("\n") if text else ended
        to.write(text + ("\n" if last and not ended else ""))
        to.flush()

    return write


def depths(accept_lengths: Sequence[int], horizon: int, *, cut: bool) -> list[tuple[int, int]]:
    """For depth 1 to `horizon` at most: how many rounds accepted the drafted token there, and how many got that far
    (accepted the depth before). A last round that was `cut` short refused nothing."""
    last = len(accept_lengths) - 1
    rows: list[tuple[int, int]] = []
    while len(rows) < horizon:
        depth = len(rows) + 1
        accepted = sum(length > depth for length in accept_lengths)
        reached = sum(
            length > depth or (length == depth and not (cut and at == last)) for at, length in enumerate(accept_lengths)
        )
        if not reached:
            break
        rows.append((accepted, reached))
    return rows


def rate(generation: Generation, decode: float) -> float | None:
    """Tokens a second of decoding; the first token belongs to the prefill."""
    return sum(generation.accept_lengths) / decode if generation.rounds and decode > 0 else None


def statistics(
    to: Console, generation: Generation, horizon: int, prompt_tokens: int, seconds: Mapping[str, float]
) -> None:
    """The lines below the text. `horizon` is how many tokens a round drafts at most."""
    to.rule(style="dim")
    lines = [("tokens", f"{len(generation.token_ids)}, ended by {_reason(generation)}")]
    if generation.rounds:
        each = sum(generation.accept_lengths) / generation.rounds
        lines.append(("rounds", f"{generation.rounds}, {each:.2f} tokens a round"))
    rows = depths(generation.accept_lengths, horizon, cut=generation.finish_reason != "cancelled")
    if any(accepted for accepted, _ in rows):
        shares = [f"{depth}: {accepted / reached:.0%}" for depth, (accepted, reached) in enumerate(rows, start=1)]
        lines.append(("accepted", f"by depth, of the rounds that got there  {'  '.join(shares)}"))
    speed = rate(generation, seconds["decode"])
    if speed is not None:
        lines.append(("speed", f"{speed:.1f} tokens a second"))
    cached = f", {generation.cached_tokens} of them cached" if generation.cached_tokens else ""
    prefill = f"{seconds['prefill']:.2f} ({prompt_tokens} tokens{cached})"
    lines.append(("seconds", f"load {seconds['load']:.2f}, prefill {prefill}, decode {seconds['decode']:.2f}"))
    for name, value in lines:
        to.print(f"{name:9}{value}", markup=False, soft_wrap=True)


def _reason(generation: Generation) -> str:
    if generation.finish_reason == "stop":
        return f"stop token {generation.stop_reason}"
    names = {"max_new_tokens": "the limit of new tokens", "context_full": "a full cache", None: "an interrupt"}
    return names.get(generation.stop_reason, str(generation.stop_reason))  # type: ignore[arg-type]


def sequence_json(generation: Generation, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """An element of `sequences`. `text` is null without a tokenizer."""
    return {
        "token_ids": list(generation.token_ids),
        "text": None if tokenizer is None else tokenizer.decode(generation.token_ids),
        "finish_reason": generation.finish_reason,
        "stop_reason": generation.stop_reason,
        "rounds": generation.rounds,
        "accept_lengths": list(generation.accept_lengths),
        "cached_tokens": generation.cached_tokens,
    }


def compare_json(runs: Sequence[Run], tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """One object a mode: `mode` plain, chain or tree; `tokens_per_round`, `tokens_per_second`, `speed_up` over plain
    (null without a round); `same_tokens` as plain; the keys of `run --json`'s sequences; `seconds` prefill, decode."""
    return [
        {
            "mode": run.mode,
            "tokens_per_round": _per_round(run.generation),
            "tokens_per_second": run.tokens_per_second,
            "speed_up": _speed_up(run, runs[0]),
            "same_tokens": run.generation.token_ids == runs[0].generation.token_ids,
            **sequence_json(run.generation, tokenizer),
            "seconds": dict(run.seconds),
        }
        for run in runs
    ]


def compare_table(to: Console, runs: Sequence[Run]) -> None:
    """The modes side by side."""
    table = Table("", "rounds", "tokens a round", "tokens a second", "speed-up", "same tokens")
    for run in runs:
        same = "yes" if run.generation.token_ids == runs[0].generation.token_ids else "no"
        figures = (_per_round(run.generation), run.tokens_per_second, _speed_up(run, runs[0]))
        each, speed, ratio = ("" if value is None else f"{value:.2f}" for value in figures)
        table.add_row(run.mode, str(run.generation.rounds), each, speed, ratio, same)
    to.print(table)


def _per_round(generation: Generation) -> float | None:
    return sum(generation.accept_lengths) / generation.rounds if generation.rounds else None


def _speed_up(run: Run, plain: Run) -> float | None:
    speed, base = run.tokens_per_second, plain.tokens_per_second
    return None if speed is None or base is None else speed / base
