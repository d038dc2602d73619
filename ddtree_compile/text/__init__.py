"""Text in and out: tokenizers, incremental decoding, chat templates and a checkpoint's own generation defaults.

A model directory enters; token ids and strings leave. Nothing here needs torch, and no code of a checkpoint runs.
"""

from ddtree_compile.text.chat import ChatTemplate, load_chat_template
from ddtree_compile.text.defaults import Defaults, load_defaults
from ddtree_compile.text.stream import StreamDecoder
from ddtree_compile.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "ChatTemplate",
    "Defaults",
    "StreamDecoder",
    "Tokenizer",
    "load_chat_template",
    "load_defaults",
    "load_tokenizer",
]
