"""Sequences stay resident: a prompt that shares a beginning with one before it runs only what is new.

Here a file is completed, edited near its end, and completed again, streamed token by token.

python examples/sessions.py 40
"""

import sys

from ddtree_compile import Engine, SamplingParams, StreamDecoder, embedded_spec, load_tokenizer, read_spec

FILE = '''import json


def load(path):
    """Read a JSON file."""
    with open(path) as f:
        return json.load(f)


def save(path, value):
'''
EDITS = ["    with open(path, 'w') as f:", '    """Write a JSON file."""', '    """Write a JSON file, indented."""']


def main(max_new_tokens: int) -> None:
    """Complete FILE with each of EDITS as its last line."""
    spec = read_spec(embedded_spec())
    tokenizer = load_tokenizer(spec.target_dir)
    assert tokenizer is not None
    with Engine.from_spec(spec) as engine:
        for edit in EDITS:
            prompt = tokenizer.encode_prompt(FILE + edit)
            text = StreamDecoder(tokenizer)
            print(edit, end="")
            for piece in engine.stream([prompt], SamplingParams(max_new_tokens=max_new_tokens)):
                print(text.push(piece.token_ids), end="", flush=True)
                if piece.generation is not None:
                    print(f"{text.finish()}\n-- {piece.generation.cached_tokens} of {len(prompt)} tokens were cached\n")


if __name__ == "__main__":
    main(int((sys.argv[1:2] or ["40"])[0]))
