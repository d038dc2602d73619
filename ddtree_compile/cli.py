"""The command line: a table of commands, and the one place where an error becomes a line and an exit code.

Exit codes: 0; 2 for what the user asked (a spec, a flag, a prompt); 3 for what a file or the machine lacks; 130 when
interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import typer

from ddtree_compile.commands.doctor import doctor
from ddtree_compile.commands.inspect import inspect
from ddtree_compile.commands.options import Version
from ddtree_compile.commands.plan import plan
from ddtree_compile.commands.run import run
from ddtree_compile.errors import DdtreeError

# A command is a function of its own file; it imports torch and the compiler inside, so that help comes at once.
COMMANDS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("plan", plan),
    ("run", run),
    ("inspect", inspect),
    ("doctor", doctor),
)

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
# What typer raises for any wrong command line; it exports no name for it
USAGE = cast("type[Exception]", typer.BadParameter.__mro__[2])

app = typer.Typer(
    name="ddtree-compile",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(version: Version = False) -> None:
    """Compile the whole draft-verify-commit round of DDTree speculative decoding into a static plan, and run it.

    Start with `ddtree-compile run`: a small model comes with the package. Then `plan` a spec of your own.
    """


for _name, _command in COMMANDS:
    app.command(_name)(_command)


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's) and give its exit code."""
    _open_closed()
    try:
        return _run(args)
    except DdtreeError as error:
        return _failed(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _failed("interrupted", INTERRUPTED)
    except (BrokenPipeError, SystemExit):  # rich and typer make SystemExit of a closed pipe
        _drop_output()
        return 0
    except OSError as error:  # a full disk behind stdout, say: files that a user named have errors of their own
        _drop_output()
        where = "output" if error.filename is None else error.filename
        return _failed(f"{where}: cannot be read or written: {error.strerror}", DdtreeError.exit_code)


def _run(args: Sequence[str] | None) -> int:
    try:
        code = app(args=args, standalone_mode=False)
        sys.stdout.flush()
    except USAGE as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # no command at all: typer has printed the help
            return 2
        message = " ".join(getattr(error, "format_message", str)().split())  # names the flag, which `message` does not
        return _failed(f"{message.removesuffix('.')}; try `ddtree-compile --help`", 2)
    if code == INTERRUPTED:  # typer makes this of a KeyboardInterrupt itself
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _open_closed() -> None:
    """Python has None for a stream that the shell closed (`>&-`); what reads or writes it finds an empty file."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - for as long as we run


def _drop_output() -> None:
    """Let what is still to be written vanish, or Python complains while it leaves."""
    with suppress(OSError):  # a stdout that is no file has nothing to complain about
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
