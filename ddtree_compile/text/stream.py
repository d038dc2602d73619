"""Text as it is generated: token ids enter in any portions, finished text leaves.

No character is given out before its last byte has come, and nothing that was given out is taken back: the pushed texts
and `finish` joined are exactly what `Tokenizer.decode` makes of all the ids, in whatever portions they came.
"""

import codecs
from collections.abc import Iterable

from ddtree_compile.text.tokenizer import Tokenizer


class StreamDecoder:
    """Decodes one sequence as it grows. Special tokens are left out unless `skip_special=False`.

    A tokenizer that is not byte-level may change earlier text as tokens come (it cleans up spaces, joins byte runs), so
    that its text is held back until `finish`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._hidden = tokenizer.special_ids if skip_special else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; it may be empty."""
        if not self._tokenizer.is_byte_level:
            self._held.extend(ids)
            return ""
        shown = (self._tokenizer.token_bytes(token_id) for token_id in ids if token_id not in self._hidden)
        return self._utf8.decode(b"".join(shown))

    def finish(self) -> str:
        """What is left at the end, an unfinished character as U+FFFD. The decoder is then as new."""
        held, self._held = self._held, []
        if not self._tokenizer.is_byte_level:
            return self._tokenizer.decode(held, skip_special=self._skip_special)
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text
