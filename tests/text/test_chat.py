"""Chat templates against transformers' apply_chat_template."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from ddtree_compile.errors import CheckpointError, PromptError
from ddtree_compile.text import ChatTemplate, load_chat_template

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message.role + '\\n' + message['content'] + '<|im_end|>' }}
    {% if not loop.last %}
{{ '\\n' }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"""

KIMI_LIKE = """{%- macro opening(message) -%}
{%- if message['role'] == 'user' -%}<|im_user|>{%- elif message['role'] == 'assistant' -%}<|im_assistant|>
{%- else -%}<|im_system|>{%- endif -%}{{ message.get('name') or message['role'] }}<|im_middle|>
{%- endmacro -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
  {%- if loop.first and messages[0]['role'] != 'system' -%}
  <|im_system|>system<|im_middle|>You are an assistant<|im_end|>
  {%- endif -%}
  {{- opening(message) -}}
  {%- if message['content'] is string -%}{{ message['content'] }}
  {%- elif message['content'] is not none and message['content'] is iterable -%}
    {%- for part in message['content'] if part['type'] == 'text' -%}{{ part['text'] }}{%- endfor -%}
  {%- endif -%}
  {%- for call in message.get('tool_calls') or [] -%}
    <|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>{{ call['function']['arguments'] }}<|tool_call_end|>
  {%- endfor -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>
  {%- if thinking is defined and thinking is false -%}<think></think>{%- else -%}<think>{%- endif -%}
{%- endif -%}"""

QWEN3_LIKE = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query_index %}
            {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- generation %}{{- content }}{%- endgeneration %}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.function.name }}{{- '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

LLAMA_LIKE = """{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}
[{{ m.role }}] {{ m.content }} {{ eos_token }}{% endfor %}{{ strftime_now('%Y') }}{{ pad_token }}"""

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "<b>天气</b> & 'more'", "parameters": {}},
}
CALL = {"id": "weather:0", "type": "function", "function": {"name": "weather", "arguments": {"city": "北京"}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <there> & 'you' 你好"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"},
        {"role": "user", "content": "3"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "one moment", "reasoning_content": "look it up", "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny", "name": "weather"},
        {"role": "assistant", "content": "sunny", "reasoning": "easy", "tool_calls": None},
    ],
]


@pytest.mark.parametrize(
    "source", [CHATML, KIMI_LIKE, QWEN3_LIKE, LLAMA_LIKE], ids=["chatml", "kimi", "qwen3", "llama"]
)
@pytest.mark.parametrize("chat", CHATS, ids=["one", "thinking", "tools"])
@pytest.mark.parametrize(
    "variables",
    [{}, {"tools": [TOOL]}, {"enable_thinking": False, "thinking": False}, {"add_generation_prompt": False}],
    ids=["plain", "tools", "no-thinking", "no-generation"],
)
def test_renders_as_transformers(
    tmp_path: Path,
    qwen_directory: Path,
    put: Any,
    transformers_tokenizer: Any,
    source: str,
    chat: list[dict[str, Any]],
    variables: dict[str, Any],
) -> None:
    shutil.copytree(qwen_directory, tmp_path, dirs_exist_ok=True)
    put(tmp_path, "chat_template.jinja", source)
    ours = load_chat_template(tmp_path)
    assert ours is not None
    theirs = transformers_tokenizer(tmp_path)
    expected = theirs.apply_chat_template(chat, tokenize=False, **{"add_generation_prompt": True, **variables})
    assert ours.render(chat, **variables) == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("chat_template.jinja", "A", "A"),
        ("chat_template.json", {"chat_template": "B"}, "B"),
        ("tokenizer_config.json", {"chat_template": "C"}, "C"),
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": "tool_use", "template": "D"}, {"name": "default", "template": "E"}]},
            "E",
        ),
        ("tokenizer_config.json", {"chat_template": {"default": "F"}}, "F"),
    ],
)
def test_where_a_template_is_found(tmp_path: Path, put: Any, name: str, value: object, expected: str) -> None:
    assert load_chat_template(tmp_path) is None
    put(tmp_path, name, value)
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == expected


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "chat_template.jinja",
            "ok\n{% if %}",
            "chat_template.jinja: the chat template is not valid Jinja at its line 2",
        ),
        ("chat_template.json", "nope", "chat_template.json: not valid JSON"),
        ("chat_template.json", {"chat_template": 3}, "chat_template must be a string, or templates with one named"),
        ("tokenizer_config.json", {"chat_template": [{"name": "rag", "template": "x"}]}, 'one named "default"'),
        ("tokenizer_config.json", {"chat_template": "x", "bos_token": []}, "bos_token must be a string"),
    ],
)
def test_a_broken_template_file_is_one_clear_error(
    tmp_path: Path, put: Any, name: str, value: object, message: str
) -> None:
    put(tmp_path, name, value)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_chat_template(tmp_path)
    assert "\n" not in str(caught.value)


def compiled(directory: Path, source: str) -> ChatTemplate:
    (directory / "chat_template.jinja").write_text(source, encoding="utf-8")
    template = load_chat_template(directory)
    assert template is not None
    return template


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ range(1000000) }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_template_that_fails_is_a_prompt_error(tmp_path: Path, source: str, reason: str) -> None:
    template = compiled(tmp_path, source)
    with pytest.raises(PromptError, match="the chat template refused the messages") as caught:
        template.render([{"role": "user", "content": "x"}])
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "variables", "message"),
    [
        ([], {}, "messages: the conversation is empty"),
        (["hi"], {}, r"messages\[0\]: a message is an object"),
        ([{"role": "user"}, {"content": "x"}], {}, r"messages\[1\]: needs a `role`"),
        (
            [{"role": "user", "content": [{"image": object()}]}],
            {},
            r"messages\[0\]\.content\[0\]\.image: object is not",
        ),
        ([{"role": "user", "content": "x"}], {"tools": [len]}, r"template variables\.tools\[0\]"),
    ],
)
def test_malformed_messages_are_a_prompt_error(
    tmp_path: Path, messages: Any, variables: dict[str, Any], message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        compiled(tmp_path, "x").render(messages, **variables)


def test_kimis_template_sees_what_its_own_tokenizer_passes(tmp_path: Path, kimi_directory: Path) -> None:
    """K2.6 asks `preserve_thinking is false`, which is not true of a variable that nobody passed."""
    shutil.copytree(kimi_directory, tmp_path, dirs_exist_ok=True)
    template = compiled(tmp_path, "{{ thinking }} {{ preserve_thinking is false }} {{ bos_token }}{{ eos_token }}")
    messages = [{"role": "user", "content": "x"}]
    assert template.render(messages) == "True True [BOS][EOS]"
    assert template.render(messages, thinking=False, preserve_thinking=True) == "False False [BOS][EOS]"


def test_rendering_does_not_change_the_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x", "name": None, "parts": [{"a": 1}]}]
    compiled(tmp_path, "{{ messages }}").render(messages)
    assert messages == [{"role": "user", "content": "x", "name": None, "parts": [{"a": 1}]}]
