"""Weights that are not there, cut short, or not those of their config."""

import torch
from case import DROP, Case, config, cut, raw_weights, remove, shards, tensors, write

RUN = "run {root}/spec.toml --token-ids 1,2 --max-new-tokens 2"
KIMI = "run {root}/kimi.toml --token-ids 1,2 --max-new-tokens 2"
FILE, INDEX = "target/model.safetensors", "target/model.safetensors.index.json"
UP = "model__layers__1__mlp__experts__3__up_proj__weight_"
SHARD = "target/model-00002-of-00002.safetensors"


def _tall(tensor: torch.Tensor) -> torch.Tensor:
    """One row more."""
    return torch.cat([tensor, tensor[:1]])


CHECKPOINTS = [
    # Files
    Case("no weights", RUN, 3, "target: holds no safetensors", remove(FILE)),
    Case("no drafter weights", RUN, 3, "drafter: holds no safetensors", remove("drafter/model.safetensors")),
    Case("a missing shard", RUN, 3, "names model-00002-of-00002.safetensors, which is missing", (shards("target"),
         remove(SHARD))),
    Case("a missing shard, no index", RUN, 3, "model-00002-of-00002.safetensors: this shard is missing",
         (shards("target", index=False), remove(SHARD))),
    Case("a broken index", RUN, 3, "index.json: is not an index with a weight_map", (shards("target"), write(INDEX,
         "{"))),
    Case("an index without end", RUN, 3, "index.json: is not an index with a weight_map", (shards("target"),
         write(INDEX, "[" * 100_000))),
    Case("an index that leads out", RUN, 3, "file names of its own directory", (shards("target"), config(INDEX,
         weight_map={"a": "../a"}))),
    Case("an index of too much", RUN, 3, "tensor lm_head.bias is not there, but .* says it is", (shards("target"),
         config(INDEX, weight_map={"lm_head.bias": SHARD.split("/")[1]}))),
    Case("an empty file", RUN, 3, "model.safetensors: its header does not fit; the file is truncated", cut(FILE, 0)),
    Case("cut in the header", RUN, 3, "model.safetensors: its header does not fit", cut(FILE, 100)),
    Case("cut in the data", RUN, 3, r"ends before tensor \S+ does; the file is truncated", cut(FILE, -10)),
    Case("a drafter cut short", RUN, 3, "drafter/model.safetensors: ends before tensor",
         cut("drafter/model.safetensors", -10)),
    Case("a pointer of Git LFS", RUN, 3, "truncated or not safetensors", write(FILE,
         "version https://git-lfs.github.com/spec/v1\n")),
    Case("a header of no JSON", RUN, 3, "its header is broken", raw_weights("target", b"{not json}")),
    Case("a header without end", RUN, 3, "its header is broken", raw_weights("target", b"[" * 100_000)),
    Case("a header of text", RUN, 3, "entry of tensor a is broken", raw_weights("target", {"a": "b"})),
    Case("a shape of text", RUN, 3, "entry of tensor a is broken", raw_weights("target", {"a": {"dtype": "F32",
         "shape": ["2"], "data_offsets": [0, 8]}}, bytes(8))),
    Case("a shape too large", RUN, 3, "tensor a has 8 bytes, not those of", raw_weights("target",
         {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8))),
    Case("a directory for a file", RUN, 3, "model.safetensors: cannot be read", (remove(FILE), write(f"{FILE}/x",
         b""))),
    # Tensors
    Case("a missing tensor", RUN, 3, r"target.*missing: \S*model.norm.weight", tensors("target",
         model__norm__weight=DROP)),
    Case("a missing layer of the drafter", RUN, 3, r"drafter.*missing: \S*fc.weight", tensors("drafter",
         fc__weight=DROP)),
    Case("one tensor too many", RUN, 3, r"target.*not used: \S*lm_head.bias", tensors("target",
         lm_head__bias=torch.zeros(97))),
    Case("one too many in the drafter", RUN, 3, r"drafter.*not used: \S*embed_tokens.weight", tensors("drafter",
         embed_tokens__weight=torch.zeros(97, 64))),
    Case("a layer too many", RUN, 3, r"not used: .*layers.1.* and 2 more", tensors("drafter",
         **{f"layers__1__{i}": torch.zeros(2) for i in range(7)})),
    Case("a tall norm", RUN, 3, r"target.*model.norm.weight \S*.*\[65\]", tensors("target", model__norm__weight=_tall)),
    Case("a tall embedding", RUN, 3, r"embed_tokens.weight .*\[98, 64\]", tensors("target",
         model__embed_tokens__weight=_tall)),
    Case("a turned projection", RUN, 3, r"self_attn.\w_proj.weight .*\[64, 32\]", tensors("target",
         model__layers__0__self_attn__k_proj__weight=lambda t: t.T)),
    Case("a tall projection of the drafter", RUN, 3, r"drafter.*proj.weight", tensors("drafter",
         layers__0__self_attn__q_proj__weight=_tall)),
    Case("a narrow fc", RUN, 3, r"drafter.*fc.weight .*\[64, 64\]", tensors("drafter", fc__weight=lambda t: t[:, :64])),
    Case("whole numbers", RUN, 3, "model.norm.weight has dtype torch.int64, expected bf16", tensors("target",
         model__norm__weight=lambda t: t.long())),
    Case("fp8 weights", RUN, 3, "has dtype torch.float8_e4m3fn, expected bf16", tensors("target",
         lm_head__weight=lambda t: t.to(torch.float8_e4m3fn))),
    Case("a router without bias", KIMI, 3, "missing: .*e_score_correction_bias", tensors("kimi-target",
         model__layers__1__mlp__gate__e_score_correction_bias=DROP)),
    # int4
    Case("no codes", KIMI, 3, r"missing: .*experts.3.up_proj.weight_packed", tensors("kimi-target",
         **{f"{UP}packed": DROP})),
    Case("no scales", KIMI, 3, r"missing: .*experts.3.up_proj.weight_scale", tensors("kimi-target",
         **{f"{UP}scale": DROP})),
    Case("another weight_shape", KIMI, 3, r"experts.3.up_proj.weight_shape holds \[32, 65\], expected \[32, 64\]",
         tensors("kimi-target", **{f"{UP}shape": torch.tensor([32, 65])})),
    Case("a scale too few", KIMI, 3, r"experts.3.up_proj.weight_scale is .*\[32, 1\], expected .*\[32, 2\]",
         tensors("kimi-target", **{f"{UP}scale": lambda t: t[:, :1]})),
    Case("scales of whole numbers", KIMI, 3, r"weight_scale is torch.int32", tensors("kimi-target",
         **{f"{UP}scale": lambda t: t.int()})),
    Case("codes in bytes", KIMI, 3, r"weight_packed is torch.uint8", tensors("kimi-target",
         **{f"{UP}packed": lambda t: t.view(torch.uint8)})),
    Case("codes of one expert too short", KIMI, 3, r"experts.3.up_proj", tensors("kimi-target",
         **{f"{UP}packed": lambda t: t[:8], f"{UP}scale": lambda t: t[:8]})),
    Case("a shape that is no pair", KIMI, 3, r"weight_shape holds", tensors("kimi-target",
         **{f"{UP}shape": torch.tensor(32)})),
    Case("dense where int4 is said", KIMI, 3, r"missing: .*weight_packed.*not used: .*up_proj.weight",
         tensors("kimi-target", **{f"{UP}packed": DROP, f"{UP}scale": DROP, f"{UP}shape": DROP,
         UP.removesuffix("_"): torch.zeros(32, 64)})),
]  # fmt: skip
