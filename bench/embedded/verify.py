"""Check the exported target against transformers' DeepseekV3ForCausalLM, in fp32 on the CPU.

The checkpoint is dequantised into a temporary folder that transformers loads; its logits must equal those of
model.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from export import dequantised, load_target
from safetensors.torch import save_file
from transformers import AutoTokenizer, DeepseekV3ForCausalLM

TOLERANCE = 1e-3  # of the largest logit; fp32 noise is far below


def main() -> None:
    """Print the largest difference and fail above the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, required=True)
    args = parser.parse_args()
    folder = args.assets / "target"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\nclass Reader:\n"
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    assert tokenizer.decode(ids[0]) == text
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v3"}))
        save_file(dequantised(folder), Path(scratch) / "model.safetensors", metadata={"format": "pt"})
        official, info = DeepseekV3ForCausalLM.from_pretrained(scratch, dtype=torch.float32, output_loading_info=True)
    ours = load_target(folder, "cpu", torch.float32)
    with torch.no_grad():
        expected = official(ids).logits
        actual = ours.lm_head(ours(ids)[0])
    error = float((expected - actual).abs().max() / expected.abs().max())
    print(f"missing {info['missing_keys']}, unexpected {info['unexpected_keys']}")
    print(f"relative error of logits {error:.2e} over {ids.shape[1]} positions")
    assert not info["missing_keys"]
    assert error < TOLERANCE


if __name__ == "__main__":
    main()
