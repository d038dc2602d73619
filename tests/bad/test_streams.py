"""Streams that a shell closed, and a disk that is full: one line or none, never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_compile import __version__

MAIN = f"{sys.executable} -m ddtree_compile.cli"
FULL = "error: output: cannot be read or written: No space left on device\n"


def shell(command: str) -> tuple[int, str, str]:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk() -> None:
    assert shell(f"{MAIN} --version > /dev/full") == (3, "", FULL)


def test_closed_streams() -> None:
    """`>&-` makes sys.stdout None, and what was said on a stderr that is None went to stdout."""
    assert shell(f"{MAIN} --version >&- <&-") == (0, "", "")
    assert shell(f"{MAIN} plan none.toml 2>&-") == (2, "", "")
    assert shell(f"{MAIN} --version 2>&-") == (0, f"ddtree-compile {__version__}\n", "")
