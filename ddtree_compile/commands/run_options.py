"""The flags of `run` that no other command takes."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

INPUT, PICKING, ROUND = "Prompt", "Sampling", "Round"


class Device(StrEnum):
    """What runs the plan."""

    CPU = "cpu"
    CUDA = "cuda"


SpecArgument = Annotated[
    Path | None,
    typer.Argument(metavar="SPEC", help="A spec (TOML). Without one: the embedded model.", show_default=False),
]
PromptText = Annotated[
    str | None,
    typer.Option("--prompt", metavar="TEXT", help="What to continue.", rich_help_panel=INPUT, show_default=False),
]
PromptFile = Annotated[
    str | None,
    typer.Option(
        "--prompt-file", metavar="F", help="A file with the prompt (`-`: stdin).", rich_help_panel=INPUT,
        show_default=False,
    ),
]  # fmt: skip
TokenIds = Annotated[
    str | None,
    typer.Option(
        "--token-ids", metavar="IDS", help="The prompt as token ids, `1,2,3`; needs no tokenizer.",
        rich_help_panel=INPUT, show_default=False,
    ),
]  # fmt: skip
Chat = Annotated[
    bool,
    typer.Option(
        "--chat", help="Put the prompt through the model's chat template, and sample as its makers recommend.",
        rich_help_panel=INPUT,
    ),
]  # fmt: skip
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", metavar="N", help="Stop after this many tokens.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", metavar="T", help="0 is greedy, which is the default.", rich_help_panel=PICKING,
        show_default=False,
    ),
]  # fmt: skip
TopK = Annotated[
    int | None,
    typer.Option("--top-k", metavar="K", help="Only the K likeliest.", rich_help_panel=PICKING, show_default=False),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", metavar="P", help="Only the likeliest that make up P.", rich_help_panel=PICKING, show_default=False
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p", metavar="P", help="Only those at least P times as likely as the likeliest.",
        rich_help_panel=PICKING, show_default=False,
    ),
]  # fmt: skip
Seed = Annotated[int, typer.Option("--seed", help="The same seed gives the same text.", rich_help_panel=PICKING)]
Bucket = Annotated[
    int | None,
    typer.Option(
        "--bucket", metavar="N", help="Nodes of a tree, one of the spec's buckets (default: the plan's choice).",
        rich_help_panel=ROUND, show_default=False,
    ),
]  # fmt: skip
Plain = Annotated[
    bool, typer.Option("--no-speculation", help="One token a round, without the drafter.", rich_help_panel=ROUND)
]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare",
        help="Run plain, chain and tree, and print the three (with --json: a list `compare`).",
        rich_help_panel=ROUND,
    ),
]
OnDevice = Annotated[Device, typer.Option("--device", help="Where to run.")]
