"""Choose the held-out prompts: regions of held-out files, cut at a line's end.

Enters: the held-out files of corpus.py. Leaves: heldout.json, a list of {"package", "licence", "file", "prompt"}.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

from corpus import SEED
from tokenizers import Tokenizer

COUNT = 24
STDLIB_COUNT = 12
PROMPT_TOKENS = (96, 160)


def region(text: str, tokenizer: Tokenizer, rng: random.Random) -> str | None:
    """A piece of a file that starts at a class or function and holds PROMPT_TOKENS tokens, or None."""
    lines = text.split("\n")
    starts = [i for i, line in enumerate(lines) if line.startswith(("def ", "class ", "    def "))]
    rng.shuffle(starts)
    for start in starts:
        piece = ""
        for line in lines[start:]:
            piece = f"{piece}\n{line}" if piece else line
            size = len(tokenizer.encode(piece, add_special_tokens=False).ids)
            if size >= PROMPT_TOKENS[0] and line.strip():
                break
        if PROMPT_TOKENS[0] <= size <= PROMPT_TOKENS[1]:
            return piece
    return None


def main() -> None:
    """Write heldout.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "heldout.json")
    args = parser.parse_args()
    rng = random.Random(SEED)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    licences = {m["package"]: m["licence"] for m in json.loads((args.corpus / "manifest.json").read_text())}
    files = json.loads((args.corpus / "heldout.json").read_text())
    rng.shuffle(files)
    files = [f for f in files if not re.search("test|encodings|lib2to3", f["file"])]
    chosen: list[dict[str, str]] = []
    used: set[str] = set()
    for stdlib, limit in ((True, STDLIB_COUNT), (False, COUNT)):
        for entry in files:
            package = entry["package"]
            if (
                len(chosen) >= limit
                or (package.startswith("python standard") != stdlib)
                or (not stdlib and package in used)
            ):
                continue
            prompt = region(entry["text"], tokenizer, rng)
            if prompt is not None:
                used.add(package)
                chosen.append(
                    {"package": package, "licence": licences[package], "file": entry["file"], "prompt": prompt}
                )
    args.out.write_text(json.dumps(chosen, indent=1) + "\n")


if __name__ == "__main__":
    main()
