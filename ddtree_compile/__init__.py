"""ddtree-compile: a static-pipeline compiler for DDTree speculative decoding.

    from ddtree_compile import Engine, SamplingParams, embedded_spec

    with Engine.from_spec(embedded_spec()) as engine:
        [generation] = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=40))

The public names are those of `__all__`. They are imported when first asked for, so that `import ddtree_compile` itself
costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddtree_compile.compiler import compile_spec
    from ddtree_compile.embedded import embedded_spec
    from ddtree_compile.errors import (
        BundleError,
        CheckpointError,
        DdtreeError,
        DeviceError,
        PromptError,
        SpecError,
    )
    from ddtree_compile.plan import Plan
    from ddtree_compile.runtime.engine import Engine, Stream
    from ddtree_compile.runtime.sampling import Generation, Piece, SamplingParams
    from ddtree_compile.spec import CompileSpec, read_spec
    from ddtree_compile.text import ChatTemplate, StreamDecoder, Tokenizer, load_chat_template, load_tokenizer

__version__ = "0.1.0"

__all__ = [
    "BundleError",
    "ChatTemplate",
    "CheckpointError",
    "CompileSpec",
    "DdtreeError",
    "DeviceError",
    "Engine",
    "Generation",
    "Piece",
    "Plan",
    "PromptError",
    "SamplingParams",
    "SpecError",
    "Stream",
    "StreamDecoder",
    "Tokenizer",
    "__version__",
    "compile_spec",
    "embedded_spec",
    "load_chat_template",
    "load_tokenizer",
    "read_spec",
]

_HOMES = {
    "compiler": ("compile_spec",),
    "embedded": ("embedded_spec",),
    "errors": ("BundleError", "CheckpointError", "DdtreeError", "DeviceError", "PromptError", "SpecError"),
    "plan": ("Plan",),
    "runtime.engine": ("Engine", "Stream"),
    "runtime.sampling": ("Generation", "Piece", "SamplingParams"),
    "spec": ("CompileSpec", "read_spec"),
    "text": ("ChatTemplate", "StreamDecoder", "Tokenizer", "load_chat_template", "load_tokenizer"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """A public name, imported from its home the first time."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """What there is, whether imported yet or not."""
    return sorted({*globals(), *__all__})
