"""Check the exported target against transformers' DeepseekV3ForCausalLM, on the CPU.

transformers loads the checkpoint dequantised by export.py, in fp32: its logits must equal those of model.py. Then it
loads the packed checkpoint as it is (through compressed-tensors), in bf16: the logits must be those of the dequantised
one in bf16, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from export import dequantised, load_target
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, DeepseekV3ForCausalLM

TOLERANCE = 1e-3  # of the largest logit; fp32 noise is far below
TEXT = "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\nclass Reader:\n"


@torch.no_grad()
def official(folder: Path, ids: Tensor, dtype: torch.dtype, *, packed: bool) -> Tensor:
    """Logits of transformers' model of a checkpoint, whose config it knows as deepseek_v3."""
    config = {**json.loads((folder / "config.json").read_text()), "model_type": "deepseek_v3"}
    with tempfile.TemporaryDirectory() as scratch:
        weights = Path(scratch) / "model.safetensors"
        if packed:
            shutil.copyfile(folder / "model.safetensors", weights)
        else:
            config.pop("quantization_config")
            save_file(dequantised(folder), weights, metadata={"format": "pt"})
        (Path(scratch) / "config.json").write_text(json.dumps(config))
        model, info = DeepseekV3ForCausalLM.from_pretrained(scratch, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"], info["missing_keys"]
    assert not info["unexpected_keys"], info["unexpected_keys"]
    model.set_experts_implementation("eager")
    return model.eval()(ids).logits


def main() -> None:
    """Print what was compared and fail on a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    args = parser.parse_args()
    folder = args.assets / "target"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer.encode(TEXT, add_special_tokens=False)])
    assert tokenizer.decode(ids[0]) == TEXT
    ours = load_target(folder, "cpu", torch.float32)
    expected = official(folder, ids, torch.float32, packed=False)
    error = float((expected - ours.lm_head(ours(ids)[0])).abs().max() / expected.abs().max())
    print(f"dequantised: relative error of logits {error:.2e} over {ids.shape[1]} positions")
    assert error < TOLERANCE
    dense, packed = (official(folder, ids, torch.bfloat16, packed=packed) for packed in (False, True))
    print(f"packed: logits differ by {float((dense - packed).abs().max()):g} in bf16")
    assert torch.equal(dense, packed)


if __name__ == "__main__":
    main()
