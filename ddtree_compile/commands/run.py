"""`run`: a prompt in, text out as it comes, then what speculation was worth."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn

from ddtree_compile.commands import show_run
from ddtree_compile.commands.options import (
    AsJson,
    DrafterDir,
    Logging,
    LogLevel,
    TargetDir,
    Version,
    console,
    print_json,
)
from ddtree_compile.commands.prompts import Asked, Prompt, Sampling, read_prompt, sampling_params
from ddtree_compile.commands.run_options import (
    Bucket,
    Chat,
    Compare,
    Device,
    MaxNewTokens,
    MinP,
    OnDevice,
    Plain,
    PromptFile,
    PromptText,
    Seed,
    SpecArgument,
    Temperature,
    TokenIds,
    TopK,
    TopP,
)
from ddtree_compile.commands.source import spec_of
from ddtree_compile.embedded import embedded_spec
from ddtree_compile.errors import PromptError, SpecError

if TYPE_CHECKING:
    from ddtree_compile.runtime.engine import Engine
    from ddtree_compile.runtime.sampling import Generation, SamplingParams
    from ddtree_compile.spec import CompileSpec

INTERRUPTED = 130
MODES: dict[str, dict[str, Any]] = {
    "plain": {"speculate": False, "bucket": None},
    "chain": {"shape": "chain", "bucket": None},
    "tree": {"shape": "tree"},
}
WARM_UP = 4  # tokens that each mode of a comparison makes first, so that none pays for first use

log = logging.getLogger("ddtree_compile")


def run(
    spec: SpecArgument = None,
    prompt: PromptText = None,
    prompt_file: PromptFile = None,
    token_ids: TokenIds = None,
    chat: Chat = False,
    max_new_tokens: MaxNewTokens = 200,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    bucket: Bucket = None,
    no_speculation: Plain = False,
    compare: Compare = False,
    device: OnDevice = Device.CPU,
    target: TargetDir = None,
    drafter: DrafterDir = None,
    as_json: AsJson = False,
    log_level: Logging = LogLevel.WARNING,
    version: Version = False,
) -> None:
    """Generate text and show what speculation brings. With no argument: the embedded model, on this CPU.

    The text goes to stdout as it comes, everything else to stderr. With --json stdout is one JSON object instead.
    """
    read = _read(spec, target, drafter)
    _check_round(read, bucket, no_speculation=no_speculation, compare=compare)
    asked = read_prompt(Asked(prompt, prompt_file, token_ids, chat), read)
    params = sampling_params(
        Sampling(temperature, top_k, top_p, min_p), asked.defaults, chat=chat, seed=seed,
        max_new_tokens=max_new_tokens, bucket=bucket, speculate=not no_speculation,
    )  # fmt: skip
    started = time.perf_counter()
    with _load(read, device) as engine:
        job = Job(engine, asked, time.perf_counter() - started, _name(spec, read, target), device, as_json)
        cancelled = _compare(job, params) if compare else _run(job, params)
    if cancelled:
        raise typer.Exit(INTERRUPTED)


@dataclass(frozen=True, slots=True)
class Job:
    """A loaded engine and a prompt for it. `load` is in seconds."""

    engine: Engine
    prompt: Prompt
    load: float
    model: str
    device: str
    as_json: bool

    def head(self) -> dict[str, Any]:
        """What both JSON forms begin with."""
        return {"device": str(self.device), "model": self.model}


def _run(job: Job, params: SamplingParams) -> bool:
    """Generate once; was it interrupted."""
    generation, seconds = _generate(job, params, _print_text(job))
    if job.as_json:
        sequences = [show_run.sequence_json(generation, job.prompt.tokenizer)]
        print_json(job.head() | {"sequences": sequences, "seconds": {"load": job.load, **seconds}})
    else:
        horizon = int(job.engine.plan.model["block"]) - 1
        taken = {"load": job.load, **seconds}
        show_run.statistics(_stderr(), generation, horizon, len(job.prompt.token_ids), taken)
    return generation.finish_reason == "cancelled"


def _compare(job: Job, params: SamplingParams) -> bool:
    """Generate plainly, with chains and with trees; was it interrupted."""
    trees = job.engine.plan.spec["tree"]["shape"] == "tree"
    modes = {name: changes for name, changes in MODES.items() if trees or name != "tree"}
    warm_up = replace(params, max_new_tokens=min(WARM_UP, params.max_new_tokens))
    for changes in modes.values():
        job.engine.generate([job.prompt.token_ids[:1]], replace(warm_up, **changes))
    runs: list[show_run.Run] = []
    for name, changes in modes.items():
        say = _print_text(job) if not runs else _silent
        silent = job.as_json or bool(runs)
        with _working(f"{name} ...", shown=silent):
            generation, seconds = _generate(job, replace(params, **changes), say, bar=not silent)
        runs.append(show_run.Run(name, generation, seconds))
        if generation.finish_reason == "cancelled":
            break
    if job.as_json:
        rows = show_run.compare_json(runs, job.prompt.tokenizer)
        print_json(job.head() | {"compare": rows, "seconds": {"load": job.load}})
    else:
        show_run.compare_table(console(), runs)
    return runs[-1].generation.finish_reason == "cancelled"


def _generate(
    job: Job, params: SamplingParams, say: Callable[[tuple[int, ...], bool], None], *, bar: bool = True
) -> tuple[Generation, dict[str, float]]:
    """The finished sequence and where its seconds went; `say(tokens, last)` is called with every round's."""
    reading = _Bar(f"prompt of {len(job.prompt.token_ids)} tokens", MofNCompleteColumn(), shown=bar)
    stream = job.engine.stream([job.prompt.token_ids], params, reading.move)
    with _cancel_on_interrupt(stream.cancel):
        with reading:
            piece = next(stream)
        if say is not _silent:
            _echo(job)
        while piece.generation is None:
            say(piece.token_ids, False)
            piece = next(stream)
        say(piece.token_ids, True)
    return piece.generation, stream.seconds


def _read(path: Path | None, target: Path | None, drafter: Path | None) -> CompileSpec:
    if path is not None and os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises where a name is too long
        raise SpecError(f"{path}: is a directory; bundles come with a later version: name a spec's TOML file")
    return spec_of(embedded_spec() if path is None else path, target, drafter)


def _check_round(spec: CompileSpec, bucket: int | None, *, no_speculation: bool, compare: bool) -> None:
    """What the engine would refuse too, before minutes of loading."""
    if no_speculation and (compare or bucket is not None):
        other = "--compare" if compare else f"--bucket {bucket}"
        raise PromptError(f"--no-speculation and {other} exclude each other: leave one out")
    if bucket is not None and bucket not in spec.tree.buckets:
        raise PromptError(f"--bucket {bucket}: the spec has buckets {', '.join(map(str, spec.tree.buckets))}")


def _name(path: Path | None, spec: CompileSpec, target: Path | None) -> str:
    """The model's name in JSON: its target's directory."""
    return "embedded" if path is None and target is None else spec.target_dir.resolve().name


@contextmanager
def _load(spec: CompileSpec, device: Device) -> Generator[Engine]:
    """Compile and load, with a bar of the weights' bytes."""
    with _Bar("loading", DownloadColumn()) as bar:
        from ddtree_compile.runtime.engine import Engine

        engine = Engine.from_spec(spec, device.value, bar.move)
    with engine:
        yield engine


class _Bar:
    """A bar on a terminal's stderr that leaves no trace; `move(done, total)` moves it."""

    def __init__(self, title: str, counts: DownloadColumn | MofNCompleteColumn, *, shown: bool = True) -> None:
        to = _stderr()
        self._title = title
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), counts, console=to, transient=True, redirect_stdout=False,
            disable=not (shown and to.is_terminal),
        )  # fmt: skip
        self._task = self._bars.add_task(title, total=None)

    def move(self, done: int, total: int) -> None:
        log.debug("%s: %d of %d", self._title, done, total)
        self._bars.update(self._task, completed=done, total=total)

    def __enter__(self) -> _Bar:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


@contextmanager
def _working(title: str, *, shown: bool) -> Generator[None]:
    to = _stderr()
    if shown and to.is_terminal:
        with to.status(title):
            yield
    else:
        yield


@contextmanager
def _cancel_on_interrupt(cancel: Callable[[], None]) -> Generator[None]:
    """The first Ctrl-C ends the sequence after its round, a second one the process."""

    def handle(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cancel()

    try:
        before = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not in the main thread, where Python lets nobody handle signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _echo(job: Job) -> None:
    """The prompt, dim, where someone is looking: the text goes on behind it."""
    to = _stderr()
    if not job.as_json and to.is_terminal and job.prompt.text is not None:
        to.print(job.prompt.text, style="dim", markup=False, end="", soft_wrap=True)


def _print_text(job: Job) -> Callable[[tuple[int, ...], bool], None]:
    """What prints a round's tokens on stdout as text, or as ids where there is no tokenizer."""
    if job.as_json:
        return _silent
    return show_run.writer(sys.stdout, job.prompt.tokenizer)


def _silent(tokens: tuple[int, ...], last: bool) -> None:
    """Say nothing."""


def _stderr() -> Console:
    return Console(stderr=True, highlight=False)
