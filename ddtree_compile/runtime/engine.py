"""The Engine: a plan on its device, with resident sequences. Prompts enter as token ids, `Generation`s leave.

A round is the plan's segments in order; the host writes STATE before the first, replays, and reads IO after the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from torch import Tensor

from ddtree_compile.errors import DeviceError, PromptError, SpecError
from ddtree_compile.ir.layouts import Parts
from ddtree_compile.ir.ops.commit import STOPS, Finish
from ddtree_compile.machine import GIB, host_memory
from ddtree_compile.plan import Plan
from ddtree_compile.runtime.choice import choose_round
from ddtree_compile.runtime.cpu import CpuExecutor, memory_needed
from ddtree_compile.runtime.sampling import MAX_SEED, Generation, SamplingParams
from ddtree_compile.runtime.sequences import Residents, Slot
from ddtree_compile.runtime.stream import Progress, Request, Stream


class Executor(Protocol):
    """What runs segments: the CPU's interpreter or a GPU's graphs."""

    def run(self, segment: str) -> None: ...
    def write(self, name: str, values: Sequence[int | float] | Tensor, at: int = 0) -> None: ...
    def read(self, name: str) -> Tensor: ...
    def close(self) -> None: ...


class Engine:
    """A plan with its weights on a device. Use it as a context manager, or `close` it."""

    def __init__(self, plan: Plan, executor: Executor, stop_token_ids: Sequence[int] = ()) -> None:
        self.plan = plan
        self.stop_token_ids = tuple(stop_token_ids)
        self._executor = executor
        self._sequences = int(plan.spec["cache"]["max_sequences"])
        self._slots = int(plan.spec["cache"]["max_seq_len"])
        self._residents = Residents(self._sequences)
        self._running: Stream | None = None
        self._closed = False
        for name in ("length", "root", "active", "remaining", "temperature", "seed", "top_k", "top_p", "min_p"):
            executor.write(name, [0] * self._sequences)
        executor.write("stops", [-1] * (self._sequences * STOPS))

    @classmethod
    def from_spec(
        cls, spec: object, device: str = "cpu", progress: Progress | None = None, *, poisoned: bool = False
    ) -> Engine:
        """Compile a spec (a CompileSpec, or the path of one) and load its weights.

        `progress(done, total)` counts bytes of weights. SpecError, CheckpointError or DeviceError say what is wrong.
        `poisoned` is the test mode in which memory is filled with NaN wherever nothing may be read.
        """
        from ddtree_compile.compiler import compile_spec, load
        from ddtree_compile.spec import CompileSpec, read_spec

        if not isinstance(spec, CompileSpec):
            spec = read_spec(Path(str(spec)))
        if device != "cpu":
            raise DeviceError(f'device {device!r}: this version runs plans on the CPU only; use device="cpu"')
        plan = compile_spec(spec)
        refuse_unrunnable(plan)
        weights, stops = load(spec, plan, progress)
        return cls.from_plan(plan, weights, stops, poisoned=poisoned)

    @classmethod
    def from_plan(
        cls, plan: Plan, weights: Mapping[str, Parts], stop_token_ids: Sequence[int] = (), *, poisoned: bool = False
    ) -> Engine:
        """An engine on the CPU for a plan whose packed weights are at hand."""
        return cls(plan, CpuExecutor(plan, weights, poisoned=poisoned), stop_token_ids)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Generation]:
        """Run lists of token ids to their ends. One SamplingParams for all, or one each. More prompts than the plan has
        sequences wait for a free one. PromptError names a prompt that cannot be served."""
        stream = self.stream(prompts, sampling_params)
        done: dict[int, Generation] = {}
        for piece in stream:
            if piece.generation is not None:
                done[piece.index] = piece.generation
        return [done[index] for index in range(len(prompts))]

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Progress | None = None,
    ) -> Stream:
        """As `generate`, a `Piece` for each round of each sequence as it comes. A new call ends an unfinished one.
        `progress(done, total)` counts a prompt's tokens while they are run."""
        if self._closed:
            raise DeviceError("this engine is closed; make a new one")
        requests = self._requests(prompts, sampling_params)
        if self._running is not None:
            self._running.close()
        self._running = Stream(self, requests, progress)
        return self._running

    def extend(
        self, generation: Generation, token_ids: Sequence[int], sampling_params: SamplingParams | None = None
    ) -> Generation:
        """Continue a sequence: what it has said so far, then `token_ids` (may be empty), then new tokens."""
        return self.generate([(*generation.context, *token_ids)], sampling_params)[0]

    def close(self) -> None:
        """Give the device's memory back."""
        if not self._closed:
            if self._running is not None:
                self._running.close()
            self._executor.close()
            self._closed = True

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _requests(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        shared = SamplingParams() if params is None else params
        if isinstance(shared, SamplingParams):
            each = [replace(shared, seed=(shared.seed + i) & MAX_SEED) for i in range(len(prompts))]
        else:
            each = list(shared)
        if not all(type(own) is SamplingParams for own in each):
            raise PromptError("sampling parameters must be a SamplingParams, or a list of one for each prompt")
        if any(isinstance(prompt, int | str) for prompt in prompts):
            raise PromptError("prompts must be a list of lists of token ids; encode text with load_tokenizer first")
        if len(each) != len(prompts):
            raise PromptError(f"{len(prompts)} prompts but {len(each)} sampling parameters: give one, or one each")
        return [self._request(i, tuple(prompt), own) for i, (prompt, own) in enumerate(zip(prompts, each, strict=True))]

    def _request(self, index: int, prompt: tuple[int, ...], params: SamplingParams) -> Request:
        if not prompt:
            raise PromptError(f"prompt {index} is empty: give at least one token")
        if len(prompt) > self._slots:
            raise PromptError(
                f"prompt {index} has {len(prompt)} tokens, but the cache holds {self._slots}: shorten it, or raise "
                f"cache.max_seq_len"
            )
        vocab = int(self.plan.model["vocab"])
        for token in prompt:
            if type(token) is not int or not 0 <= token < vocab:
                raise PromptError(f"prompt {index} holds token id {token!r}: ids go from 0 to {vocab - 1}")
        if len(self._stops(params)) > STOPS:
            raise PromptError(f"prompt {index} has {len(self._stops(params))} stop tokens: at most {STOPS} fit")
        return Request(index, prompt, params, segments=choose_round(self.plan, params, len(prompt)))

    def _stops(self, params: SamplingParams) -> tuple[int, ...]:
        own = () if params.ignore_eos else self.stop_token_ids
        return tuple(dict.fromkeys((*params.stop_token_ids, *own)))

    # What a Stream drives.

    def admit(self, request: Request) -> bool:
        """Give a request a slot and write its STATE; False when all slots are busy."""
        claimed = self._residents.claim(request.prompt, speculate=request.params.speculate)
        if claimed is None:
            return False
        request.slot, request.cached = claimed
        at, params, stops = request.slot.index, request.params, self._stops(request.params)
        write = self._executor.write
        write("length", [request.cached], at)
        write("active", [0], at)
        write("remaining", [params.max_new_tokens], at)
        write("stops", [*stops, *[-1] * (STOPS - len(stops))], at * STOPS)
        write("temperature", [params.heat], at)
        write("seed", [params.seed], at)
        write("top_k", [params.top_k], at)
        write("top_p", [params.top_p], at)
        write("min_p", [params.min_p], at)
        return True

    def prefill(self, request: Request, progress: Progress | None = None) -> tuple[list[int], Finish]:
        """Run what is not resident of a prompt, chunk by chunk, and pick the first token."""
        slot = request.slot
        assert slot is not None
        write, run = self._executor.write, self._executor.run
        write("prompt.slot", [slot.index])
        while len(slot.tokens) < len(request.prompt):
            start = len(slot.tokens)
            left = len(request.prompt) - start
            chunk = min((c for c in self.plan.chunks if c >= left), default=max(self.plan.chunks))
            part = request.prompt[start : start + chunk]
            write("prompt.tokens", part)
            write("prompt.start", [start])
            write("prompt.count", [len(part)])
            run(f"prefill[{chunk}]")
            slot.extend(part, drafted=True)
            if progress is not None:
                progress(len(slot.tokens), len(request.prompt))
        run(self._pick([request]))
        run("seat")
        return self._said(slot)

    def step(self, requests: Sequence[Request]) -> list[tuple[list[int], Finish]]:
        """One round of requests that share their segments."""
        slots = [request.slot for request in requests if request.slot is not None]
        live = {slot.index for slot in slots}
        self._executor.write("active", [int(index in live) for index in range(self._sequences)])
        segments = requests[0].segments
        for segment in segments:
            self._executor.run(self._pick(requests) if segment == "pick" else segment)
        said = [self._said(slot) for slot in slots]
        for request, slot, (tokens, _) in zip(requests, slots, said, strict=True):
            root = request.tokens[-1]
            slot.extend([root, *tokens[:-1]], drafted="draft" in segments)
        return said

    def release(self, request: Request) -> None:
        """The request is over; its slot stays resident."""
        if request.slot is not None:
            request.slot.busy = False

    def _said(self, slot: Slot) -> tuple[list[int], Finish]:
        count = int(self._executor.read("accepted")[slot.index])
        emitted = self._executor.read("emitted")[slot.index, :count].tolist()
        return emitted, Finish(int(self._executor.read("finish")[slot.index]))

    @staticmethod
    def _pick(requests: Sequence[Request]) -> str:
        if any(request.params.filtered for request in requests):
            return "pick[filter]"
        sampled = any(request.params.heat > 0 for request in requests)
        return "pick[sample]" if sampled else "pick[greedy]"


def refuse_unrunnable(plan: Plan) -> None:
    """SpecError or DeviceError for what can be planned but not run by this version, on this machine."""
    if plan.model["fp8"]:
        raise SpecError("the target is an fp8 checkpoint: it can be planned, but this version cannot run it; use bf16")
    ranks = plan.spec["machine"]["tensor_parallel"]
    if ranks > 1:
        raise SpecError(
            f"machine.tensor_parallel = {ranks}: a group can be planned, but this version runs one rank; set 1"
        )
    needed, present = memory_needed(plan), host_memory()
    if needed > present:
        raise DeviceError(
            f"running the plan on a CPU needs {needed / GIB:.1f} GiB, and this machine has {present / GIB:.1f}: choose "
            f"a smaller model, or fewer or shorter sequences"
        )
    dtype = plan.spec["cache"]["dtype"]
    if dtype not in ("auto", plan.model["dtype"]):
        raise SpecError(f'cache.dtype = "{dtype}": this version keeps caches in the model\'s dtype; use "auto"')
