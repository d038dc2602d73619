"""What `run` is asked to say: from its flags and the target's text files to token ids and sampling parameters.

Nothing here needs torch or weights, so that a wrong flag is answered at once.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ddtree_compile.errors import PromptError

if TYPE_CHECKING:
    from ddtree_compile.runtime.sampling import SamplingParams
    from ddtree_compile.spec import CompileSpec
    from ddtree_compile.text import Defaults, Tokenizer

T = TypeVar("T", int, float)

STDIN = "-"

# Without a newline at its end: that would be a token of its own, where the model expects newline and indent as one.
DEFAULT_PROMPT = '''class Stack:
    """A last-in, first-out stack."""

    def __init__(self'''
DEFAULT_QUESTION = "Write a Python function that adds two numbers."


@dataclass(frozen=True, slots=True)
class Asked:
    """The prompt as flags gave it: at most one of the three."""

    text: str | None = None
    file: str | None = None
    token_ids: str | None = None
    chat: bool = False

    def check(self) -> None:
        """PromptError when two of the flags contradict each other."""
        flags = {"--prompt": self.text, "--prompt-file": self.file, "--token-ids": self.token_ids}
        given = [flag for flag, value in flags.items() if value is not None]
        if len(given) > 1:
            raise PromptError(f"{' and '.join(given)} were given: a prompt comes from one of them")
        if self.chat and self.token_ids is not None:
            raise PromptError("--chat needs text: give --prompt or --prompt-file instead of --token-ids")

    @property
    def silent(self) -> bool:
        """Whether no prompt was given at all."""
        return self.text is None and self.file is None and self.token_ids is None


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling flags; None where they were not given."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids for the engine, and the text that they came from (None: they were given as ids)."""

    token_ids: list[int]
    text: str | None
    tokenizer: Tokenizer | None
    defaults: Defaults


def read_prompt(asked: Asked, spec: CompileSpec) -> Prompt:
    """The prompt in the target's tokens. PromptError or CheckpointError, one line, when there is no way to it."""
    asked.check()
    prompt = _encode(asked, spec)
    count, slots = len(prompt.token_ids), spec.cache.max_seq_len
    if not count or prompt.text == "":  # a lone [BOS] is no prompt that anyone means
        raise PromptError("the prompt is empty: give at least one token, or no prompt for the default one")
    if count > slots:
        raise PromptError(
            f"the prompt has {count} tokens, but the cache holds {slots}: shorten it, or raise cache.max_seq_len"
        )
    return prompt


def _encode(asked: Asked, spec: CompileSpec) -> Prompt:
    from ddtree_compile.models.config import load_config
    from ddtree_compile.text import load_defaults, load_tokenizer

    directory = spec.target_dir
    config = load_config(directory / "config.json")
    tokenizer = load_tokenizer(directory)
    defaults = load_defaults(directory, config, tokenizer)
    if asked.token_ids is not None:
        return Prompt(_ids(asked.token_ids), None, tokenizer, defaults)
    if tokenizer is None:
        raise PromptError(f"{directory} has no tokenizer: give --token-ids, such as --token-ids 1,2,3")
    text = _text(asked)
    if asked.chat:
        text = _chat(directory, text)
        return Prompt(tokenizer.encode(text, special=True), text, tokenizer, defaults)
    return Prompt(tokenizer.encode_prompt(text), text, tokenizer, defaults)


def sampling_params(
    sampling: Sampling, defaults: Defaults, *, chat: bool, seed: int, max_new_tokens: int, bucket: int | None,
    speculate: bool,
) -> SamplingParams:  # fmt: skip
    """The request's parameters: what flags say, then with --chat what the checkpoint recommends, then greedy."""
    from ddtree_compile.runtime.sampling import SamplingParams

    own = _recommended(defaults) if chat else Sampling()
    temperature = _first(sampling.temperature, own.temperature, 0.0)
    if temperature == 0.0 and sampling.temperature is None:
        for flag, value in (("top-k", sampling.top_k), ("top-p", sampling.top_p), ("min-p", sampling.min_p)):
            if value is not None:
                raise PromptError(f"--{flag} {value:g} has no effect on greedy picks: give --temperature as well")
    return SamplingParams(
        temperature=temperature,
        top_k=_first(sampling.top_k, own.top_k, 0),
        top_p=_first(sampling.top_p, own.top_p, 1.0),
        min_p=_first(sampling.min_p, own.min_p, 0.0),
        seed=seed,
        max_new_tokens=max_new_tokens,
        bucket=bucket,
        speculate=speculate,
    )


def _recommended(defaults: Defaults) -> Sampling:
    """generation_config's sampling, as transformers reads it: `do_sample` without a temperature means 1."""
    if defaults.do_sample is False:
        return Sampling()
    temperature = defaults.temperature
    if temperature is None and defaults.do_sample:
        temperature = 1.0
    return Sampling(temperature, defaults.top_k, defaults.top_p, defaults.min_p)


def _first(*values: T | None) -> T:
    return next(value for value in values if value is not None)


def _ids(text: str) -> list[int]:
    words = [word for word in re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]")) if word]
    for word in words:
        if not re.fullmatch(r"[0-9]{1,10}", word):
            raise PromptError(f"--token-ids holds {word!r}: give whole numbers with commas or spaces between them")
    if not words:
        raise PromptError("--token-ids is empty: give at least one token id")
    return [int(word) for word in words]


def _text(asked: Asked) -> str:
    if asked.text is not None:
        return asked.text
    if asked.file is None:
        return DEFAULT_QUESTION if asked.chat else DEFAULT_PROMPT
    try:
        raw = sys.stdin.buffer.read() if asked.file == STDIN else Path(asked.file).read_bytes()
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"--prompt-file {asked.file}: not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PromptError(f"--prompt-file {asked.file}: cannot be read: {reason}") from None


def _chat(directory: Path, text: str) -> str:
    from ddtree_compile.text import load_chat_template

    template = load_chat_template(directory)
    if template is None:
        raise PromptError(f"--chat: {directory} has no chat template; leave --chat out for a raw prompt")
    return template.render([{"role": "user", "content": text}])
