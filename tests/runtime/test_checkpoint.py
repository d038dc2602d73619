"""Checkpoints in every arrangement of files, and every way in which they are broken."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from ddtree_compile.errors import CheckpointError
from ddtree_compile.runtime.checkpoint import INDEX, Checkpoint

FIRST = {"a": torch.arange(12, dtype=torch.float32).view(3, 4), "b": torch.tensor([1, 2], dtype=torch.int32)}
SECOND = {"c": torch.randn(2, 2).to(torch.bfloat16), "d.e": torch.zeros(0, 4), "f": torch.tensor(3.0)}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def _index(directory, weight_map):
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _sharded(directory, *, index=True):
    for shard, tensors in zip(SHARDS, (FIRST, SECOND), strict=True):
        save_file(tensors, directory / shard, metadata={"format": "pt"})
    if index:
        _index(directory, {name: shard for shard, part in zip(SHARDS, (FIRST, SECOND), strict=True) for name in part})


def _raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _check(directory):
    checkpoint = Checkpoint(directory)
    tensors = FIRST | SECOND
    assert checkpoint.names() == tuple(sorted(tensors))
    for name, tensor in tensors.items():
        assert checkpoint.info(name) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(checkpoint.read(name), tensor)
        assert name in checkpoint
    assert "z" not in checkpoint


def test_with_an_index(tmp_path):
    _sharded(tmp_path)
    save_file({"stray": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    _check(tmp_path)


def test_shards_without_an_index(tmp_path):
    _sharded(tmp_path, index=False)
    _check(tmp_path)


def test_one_file(tmp_path):
    save_file(FIRST | SECOND, tmp_path / "model.safetensors")
    _check(tmp_path)


def test_one_file_of_another_name(tmp_path):
    save_file(FIRST | SECOND, tmp_path / "drafter.safetensors")
    _check(tmp_path)


def test_rows_are_read_alone(tmp_path):
    save_file(FIRST, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.read("a", (1, 3)), FIRST["a"][1:3])
    assert checkpoint.read("a", (2, 2)).shape == (0, 4)
    with pytest.raises(CheckpointError, match=r"tensor a of shape \[3, 4\] has no rows 2 to 4"):
        checkpoint.read("a", (2, 4))


def _broken(tmp_path, message, call=Checkpoint):
    with pytest.raises(CheckpointError) as caught:
        call(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_safetensors(tmp_path):
    _broken(tmp_path, f"{tmp_path}: holds no safetensors")
    _broken(tmp_path / "nowhere", "holds no safetensors")


def test_index_names_a_missing_shard(tmp_path):
    _sharded(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    _broken(tmp_path, f"{tmp_path / INDEX}: names {SHARDS[1]}, which is missing")


def test_shard_missing_without_an_index(tmp_path):
    _sharded(tmp_path, index=False)
    (tmp_path / SHARDS[0]).unlink()
    _broken(tmp_path, f"{tmp_path / SHARDS[0]}: this shard is missing")


def test_tensor_not_in_its_shard(tmp_path):
    _sharded(tmp_path)
    _index(tmp_path, {"a": SHARDS[0], "c": SHARDS[0], "f": SHARDS[1]})
    _broken(tmp_path, f"{tmp_path / SHARDS[0]}: tensor c is not there")


def test_tensor_in_two_shards(tmp_path):
    save_file(FIRST, tmp_path / SHARDS[0])
    save_file(FIRST, tmp_path / SHARDS[1])
    _broken(tmp_path, f"{tmp_path / SHARDS[1]}: tensor a is also in {SHARDS[0]}")


def test_tensor_twice_in_a_header(tmp_path):
    entry = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    _raw(tmp_path / "model.safetensors", f'{{"a":{entry},"a":{entry}}}'.encode(), b"x")
    _broken(tmp_path, "its header is broken (tensor a stands twice)")


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ({"a": "../model.safetensors"}, "weight_map holds something other than file names"),
        ({"a": 3}, "weight_map holds something other than file names"),
        ([], "is not an index with a weight_map"),
    ],
)
def test_bad_index(tmp_path, shards, message):
    _index(tmp_path, shards)
    _broken(tmp_path, message)


def test_index_that_is_not_json(tmp_path):
    (tmp_path / INDEX).write_text("<html>")
    _broken(tmp_path, "is not an index with a weight_map")


@pytest.mark.parametrize("keep", [0, 5, 8, 40])
def test_truncated_in_the_header(tmp_path, keep):
    path = tmp_path / "model.safetensors"
    save_file(FIRST, path)
    path.write_bytes(path.read_bytes()[:keep])
    _broken(tmp_path, f"{path}: its header does not fit; the file is truncated")


def test_truncated_in_the_data(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(FIRST, path)
    path.write_bytes(path.read_bytes()[:-1])
    _broken(tmp_path, "the file is truncated")


def test_git_lfs_pointer_instead_of_weights(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    _broken(tmp_path, "is truncated or not safetensors")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{not json", "its header is broken"),
        (b"[]", "its header is broken (not a JSON object)"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "the header's entry of tensor a is broken"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "the header's entry of tensor a is broken"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, "the header's entry of tensor a is broken"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, "tensor a has 8 bytes, not those of F32[3]"),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, "ends before tensor a does"),
    ],
)
def test_broken_headers(tmp_path, header, message):
    _raw(tmp_path / "model.safetensors", header, bytes(8))
    _broken(tmp_path, message)


def test_a_dtype_we_lack_hurts_only_when_read(tmp_path):
    _raw(tmp_path / "model.safetensors", {"a": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}}, bytes(8))
    assert Checkpoint(tmp_path).names() == ("a",)
    for call in (lambda path: Checkpoint(path).info("a"), lambda path: Checkpoint(path).read("a")):
        _broken(tmp_path, "tensor a has dtype F4 (supported: BF16, BOOL,", call)


def test_a_tensor_that_is_not_there(tmp_path):
    save_file(FIRST, tmp_path / "model.safetensors")
    _broken(tmp_path, "tensor model.norm.weight is missing", lambda path: Checkpoint(path).read("model.norm.weight"))
