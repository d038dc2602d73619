"""Chat templates: messages enter, the text of a prompt leaves.

A checkpoint's template is a Jinja program from outside, so that it runs in jinja2's immutable sandbox and sees plain
data only. What it may use (trimmed blocks, loop controls, `raise_exception`, `strftime_now`, `tojson` without HTML
escapes, `generation` blocks) is what transformers' apply_chat_template offers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ddtree_compile.errors import CheckpointError, PromptError
from ddtree_compile.text.config_files import (
    NAMED_TOKENS,
    TOKENIZER_CONFIG,
    read_object,
    read_text,
    read_tokenizer_config,
    token_text,
)
from ddtree_compile.text.tiktoken_model import TIKTOKEN_MODEL

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_JSON = "chat_template.json"
DEFAULT_NAME = "default"
KIMI_VARIABLES = {"thinking": True, "preserve_thinking": False}
"""What Kimi's own tokenizer passes unless told otherwise; its template asks `preserve_thinking is false`."""

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template's own expressions can raise."""


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template, the file it came from, and what it sees by default (`bos_token` and so on)."""

    template: jinja2.Template
    path: Path
    defaults: Mapping[str, Any]

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt's text for `messages` (each a mapping with a `role`); encode it with `special=True`.

        `variables` reach the template by name (`tools`, `enable_thinking`, `thinking`). Keys whose value is None are
        left out of messages, and a message's reasoning may be under `reasoning_content`, `thinking` or `reasoning`.
        Raises PromptError where messages are malformed or the template refuses them.
        """
        context = {"tools": None, "documents": None, **self.defaults, **_plain(variables, "template variables")}
        chat = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        if not chat:
            raise PromptError("messages: the conversation is empty; pass at least one message")
        try:
            return self.template.render({**context, "messages": chat, "add_generation_prompt": add_generation_prompt})
        except _TEMPLATE_FAILURES as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise PromptError(
                f"{self.path}: the chat template refused the messages ({reason}); change them or pass a raw prompt"
            ) from error


def load_chat_template(directory: Path) -> ChatTemplate | None:
    """The chat template of the model in `directory`, or None where it has none.

    Looked for in chat_template.jinja, chat_template.json and tokenizer_config.json, in that order; of several named
    templates the one named "default" is taken. Raises CheckpointError where a file or the template's syntax is broken.
    """
    found = find_chat_template(directory)
    if found is None:
        return None
    source, path = found
    try:
        template = _environment().from_string(source, globals=_GLOBALS)
    except (jinja2.TemplateError, RecursionError) as error:
        line = f" at its line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise CheckpointError(f"{path}: the chat template is not valid Jinja{line} ({error}); correct it") from error
    config = read_tokenizer_config(directory)
    texts = {key: token_text(config.get(key), directory / TOKENIZER_CONFIG, key) for key in NAMED_TOKENS}
    tokens = {key: text for key, text in texts.items() if text is not None}
    is_kimi = (directory / TIKTOKEN_MODEL).exists()
    return ChatTemplate(template, path, tokens | (KIMI_VARIABLES if is_kimi else {}))


def find_chat_template(directory: Path) -> tuple[str, Path] | None:
    """The template's source, not compiled, and the file it stands in; None if there is none. Raises CheckpointError."""
    path = directory / TEMPLATE_FILE
    if path.exists():
        return read_text(path), path
    for name in (TEMPLATE_JSON, TOKENIZER_CONFIG):
        value: object = read_object(directory, name).get("chat_template")
        if value is not None:
            return _default_source(value, directory / name), directory / name
    return None


def _default_source(value: object, path: Path) -> str:
    """One template is a string; several are an object by name or a list of {name, template}."""
    if isinstance(value, list):
        entries = cast(list[object], value)
        named = [cast(dict[str, object], entry) for entry in entries if isinstance(entry, dict)]
        value = {str(entry.get("name")): entry.get("template") for entry in named}
    if isinstance(value, dict):
        value = cast(dict[str, object], value).get(DEFAULT_NAME)
    if not isinstance(value, str):
        raise CheckpointError(
            f'{path}: chat_template must be a string, or templates with one named "{DEFAULT_NAME}"; correct the file'
        )
    return value


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise PromptError(f"{where}: a message is an object with `role` and `content`, not {type(message).__name__}")
    plain = _plain(cast(Mapping[str, object], message), where)
    kept = {key: value for key, value in plain.items() if value is not None}
    if not isinstance(kept.get("role"), str):
        raise PromptError(f'{where}: needs a `role`, such as "user"')
    reasoning = next((kept[key] for key in _REASONING_KEYS if key in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _plain(value: Any, where: str) -> Any:
    """A copy of JSON-like data in plain types: other objects carry methods that the sandbox does not know."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        items = cast(Mapping[object, object], value).items()
        return {str(key): _plain(item, f"{where}.{key}") for key, item in items}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(cast(Sequence[object], value))]
    raise PromptError(
        f"{where}: {type(value).__name__} is not JSON-like data; pass strings, numbers, lists and objects"
    )


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is rendered in place."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


_GLOBALS = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
