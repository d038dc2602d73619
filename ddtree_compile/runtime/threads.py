"""How many threads torch gets: one where tensors are small.

An operation on a small tensor takes microseconds. Handing half of it to a second thread takes about as long, and far
longer on a machine that is busy with something else: a round of the embedded model took eight times as long so.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import torch

SMALL: Final = 1 << 20  # elements


@contextmanager
def threads_for(elements: int) -> Generator[None]:
    """One thread inside, if tensors have at most `SMALL` elements; as many as torch is set to otherwise."""
    before = torch.get_num_threads()
    if elements > SMALL or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
