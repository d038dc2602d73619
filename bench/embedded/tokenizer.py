"""Train the byte-level BPE tokenizer and encode the corpus.

Enters: `train.txt.xz` of corpus.py. Leaves: `tokenizer.json`, `tokenizer_config.json` (with the chat template) in the
model folder; `encode` turns documents into one flat array of uint16 ids, each document as [BOS] ... [EOS].
"""

from __future__ import annotations

import argparse
import ast
import json
import lzma
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from corpus import SEED, SEPARATOR
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 2048
SPECIALS = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|MASK|>",
    "[PAD]",
)
BOS, EOS, IM_END, IM_USER, IM_ASSISTANT, IM_SYSTEM, IM_MIDDLE, MASK, PAD = range(len(SPECIALS))
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[\r\n]+ *|\s+"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_' + message['role'] + '|>' + message['role'] + '<|im_middle|>' + message['content'] + '<|im_end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_assistant|>assistant<|im_middle|>' }}{%- endif -%}"
)
DIALOGUES = 12_000
SAMPLE_BYTES = 24_000_000  # text the merges are learnt from


def read_documents(path: Path) -> list[str]:
    """All training documents."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return file.read().split(SEPARATOR)


def train(documents: Sequence[str]) -> Tokenizer:
    """A byte-level BPE over a sample of the documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", BOS)])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample, size = [], 0
    for document in documents:
        sample.append(document)
        size += len(document)
        if size > SAMPLE_BYTES:
            break
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def dialogues(documents: Iterable[str], limit: int) -> list[tuple[str, str]]:
    """(request, answer) pairs made from functions and the first line of their docstrings."""
    pairs: list[tuple[str, str]] = []
    for document in documents:
        try:
            tree = ast.parse(document)
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef):
                continue
            request = (ast.get_docstring(node) or "").split("\n")[0].strip()
            answer = ast.get_source_segment(document, node) or ""
            if 15 < len(request) < 120 and 80 < len(answer) < 1500:
                pairs.append((request, answer))
        if len(pairs) >= limit:
            break
    return pairs


def encode(tokenizer: Tokenizer, documents: Sequence[str]) -> np.ndarray:
    """Documents as one flat array of ids, each between [BOS] and [EOS]."""
    parts: list[np.ndarray] = []
    for start in range(0, len(documents), 2000):
        rows = tokenizer.encode_batch(list(documents[start : start + 2000]), add_special_tokens=False)
        parts.extend(np.array([BOS, *row.ids, EOS], dtype=np.uint16) for row in rows)
    return np.concatenate(parts)


def encode_dialogues(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    """Pairs as chat turns in the template's form, three independent turns after one [BOS]."""
    role = {name: tokenizer.encode(name, add_special_tokens=False).ids for name in ("user", "assistant")}
    parts: list[int] = []
    for index, (request, answer) in enumerate(pairs):
        if index % 3 == 0:
            parts.append(BOS)
        parts += [IM_USER, *role["user"], IM_MIDDLE, *tokenizer.encode(request, add_special_tokens=False).ids, IM_END]
        answer_ids = tokenizer.encode(answer, add_special_tokens=False).ids
        parts += [IM_ASSISTANT, *role["assistant"], IM_MIDDLE, *answer_ids, IM_END]
    return np.array(parts, dtype=np.uint16)


def write_config(folder: Path, max_length: int) -> None:
    """tokenizer_config.json beside tokenizer.json."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "additional_special_tokens": list(SPECIALS[2:8]),
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Train the tokenizer, then write the encoded training stream."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--encode", type=Path, help="folder for the encoded streams: ids.npy and heldout.npy (uint16)")
    args = parser.parse_args()
    documents = read_documents(args.corpus / "train.txt.xz")
    args.model.mkdir(parents=True, exist_ok=True)
    if not (args.model / "tokenizer.json").exists():
        train(documents).save(str(args.model / "tokenizer.json"))
        write_config(args.model, 4096)
    if not (args.corpus / "dialogues.json").exists():
        (args.corpus / "dialogues.json").write_text(json.dumps(dialogues(documents, DIALOGUES)))
    if args.encode:
        tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
        pairs = json.loads((args.corpus / "dialogues.json").read_text())
        random.Random(SEED).shuffle(pairs)
        ids = np.concatenate([encode(tokenizer, documents), encode_dialogues(tokenizer, pairs)])
        np.save(args.encode / "ids.npy", ids)
        heldout = [entry["text"] for entry in json.loads((args.corpus / "heldout.json").read_text())]
        random.Random(SEED).shuffle(heldout)
        np.save(args.encode / "heldout.npy", encode(tokenizer, heldout))
        print(f"{len(ids) / 1e6:.1f} M tokens, {len(pairs)} dialogues")


if __name__ == "__main__":
    main()
