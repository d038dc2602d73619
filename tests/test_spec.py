"""The spec's file: what is accepted, and one clear line for everything that is not."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ddtree_compile.errors import SpecError
from ddtree_compile.spec import TABLES, CompileSpec, read_spec, tree_capacity

MODEL = '[model]\ntarget = "target"\ndrafter = "drafter"\n'
TREE = "[tree]\nbuckets = [15, 7]\n"
GOOD = MODEL + TREE

# What a user wrote, and what the one line must say
BAD = {
    "empty file": ("", r"model\.target is missing: give a directory"),
    "no drafter": (MODEL.replace("drafter =", "seed = 1 #") + TREE, r"model\.drafter is missing: give a directory"),
    "no tree": (MODEL, r"tree\.buckets is missing: give a list of 1 to 32 different node counts"),
    "no hit": (GOOD + "[acceptance]", r"acceptance\.hit is missing: give a row a depth"),
    "broken toml": (MODEL + "[tree\n", r"not valid TOML: .*line 4"),
    "deep toml": ("a = " + "[" * 5000, r"not valid TOML: maximum recursion"),
    "duplicate table": (GOOD + "[tree]", r"not valid TOML: .*line 6"),
    "unknown key": (MODEL + "[tree]\nbucket = [7]", r"unknown key tree\.bucket \(did you mean tree\.buckets\?\)"),
    "unknown table": (GOOD + "[machin]", r"unknown key machin \(did you mean machine\?\)"),
    "key of another table": (GOOD + "max_seq_len = 9", r"tree\.max_seq_len \(did you mean cache\.max_seq_len\?\)"),
    "key above tables": ("buckets = [7]\n" + GOOD, r"unknown key buckets \(did you mean tree\.buckets\?\)"),
    "table in a table": (MODEL + "tree = 3", r"unknown key model\.tree: tree is a table of its own, \[tree\]"),
    "far key": (GOOD + "zzz = 1", r"unknown key tree\.zzz: the keys here are tree\.buckets, tree\.top_k_per_depth"),
    "key with a newline": (GOOD + '"a\\nb" = 1', r'unknown key tree\."a\\nb": the keys here are'),
    "not a table": ("tree = 3\n" + MODEL, r"tree = 3 must be a table: write \[tree\]"),
    "array of tables": ('[[model]]\ntarget = "a"\n' + TREE, r"model = \[.*\] must be a table"),
    "no buckets": (
        MODEL + "[tree]\nbuckets = []",
        r"tree\.buckets = \[\] is not allowed: it must be a list of 1 to 32",
    ),
    "bucket twice": (
        MODEL + "[tree]\nbuckets = [7, 7]",
        r"tree\.buckets = \[7, 7\] is not allowed \(holds a size twice\)",
    ),
    "bucket 0": (MODEL + "[tree]\nbuckets = [7, 0]", r"tree\.buckets = \[7, 0\] is not allowed \(\[1\] is 0\)"),
    "bucket negative": (MODEL + "[tree]\nbuckets = [-7]", r"\(\[0\] is -7\): it must be .* each from 1 to 256"),
    "bucket too large": (MODEL + "[tree]\nbuckets = [257]", r"\(\[0\] is 257\): it must be .* each from 1 to 256"),
    "bucket not in a list": (MODEL + "[tree]\nbuckets = 7", r"tree\.buckets = 7 is not allowed"),
    "bucket a string": (MODEL + '[tree]\nbuckets = ["7"]', r'\(\[0\] is "7"\)'),
    "bucket a bool": (MODEL + "[tree]\nbuckets = [true]", r"\(\[0\] is true\)"),
    "bucket a float": (MODEL + "[tree]\nbuckets = [7.5]", r"\(\[0\] is 7\.5\)"),
    "33 buckets": (MODEL + f"[tree]\nbuckets = {list(range(1, 34))}", r"a list of 1 to 32 different node counts"),
    "shape": (GOOD + 'shape = "star"', r'tree\.shape = "star" is not allowed: it must be "tree" or "chain"'),
    "top k": (GOOD + "top_k_per_depth = 0", r"tree\.top_k_per_depth = 0 is not allowed: it must be a number"),
    "chain not a bool": (GOOD + "keep_top1_chain = 1", r"keep_top1_chain = 1 is not allowed: it must be true or false"),
    "empty directory": (MODEL.replace('"target"', '""') + TREE, r'model\.target = "" is not allowed: it must be a dir'),
    "directory a number": (MODEL.replace('"target"', "3") + TREE, r"model\.target = 3 is not allowed"),
    "weights": (MODEL + 'weights = "randon"\n' + TREE, r'weights = "randon" .* must be "checkpoint" or "random"'),
    "seed": (MODEL + "seed = -1\n" + TREE, r"model\.seed = -1 is not allowed: it must be an integer from 0 to 2\^63"),
    "seed too large": (MODEL + f"seed = {2**63}\n" + TREE, r"model\.seed = 9223372036854775808 is not allowed"),
    "window": (GOOD + "[drafter]\nwindow = 0", r"drafter\.window = 0 is not allowed: it must be a number of context"),
    "factor": (GOOD + "[drafter]\nrope_attention_factor = 0", r"rope_attention_factor = 0 .* a factor above 0"),
    "infinite factor": (GOOD + "[drafter]\nrope_attention_factor = inf", r"rope_attention_factor = inf is not allowed"),
    "length": (GOOD + "[cache]\nmax_seq_len = 1", r"cache\.max_seq_len = 1 is not allowed: it must be a number of tok"),
    "length a date": (
        GOOD + "[cache]\nmax_seq_len = 1979-05-27",
        r"max_seq_len = datetime\.date\(1979, 5, 27\) is not",
    ),
    "long value": (GOOD + f'[cache]\nmax_seq_len = "{"x" * 999}"', r'max_seq_len = "x{59}\.\.\. is not allowed'),
    "line separator": (GOOD + '[cache]\ndtype = "a\u2028b"', r'cache\.dtype = "a\\u2028b" is not allowed'),
    "sequences": (GOOD + "[cache]\nmax_sequences = 257", r"max_sequences = 257 is not .*, from 1 to 256"),
    "cache dtype": (GOOD + '[cache]\ndtype = "fp16"', r'cache\.dtype = "fp16" is not .* "bf16" or "fp8_e4m3"'),
    "shards": (GOOD + "[cache]\ncontext_shards = 3", r"context_shards = 3 must divide machine\.tensor_parallel = 1"),
    "chunk twice": (GOOD + "[prefill]\nchunks = [16, 16]", r"prefill\.chunks = \[16, 16\] .*\(holds a size twice\)"),
    "chunk 0": (GOOD + "[prefill]\nchunks = [0]", r"prefill\.chunks = \[0\] .*\(\[0\] is 0\)"),
    "gpu": (
        GOOD + '[machine]\ngpu = "H20"',
        r'gpu = "H20" is not allowed \(did you mean h200\?\): it must be one of h100',
    ),
    "gpu a number": (GOOD + "[machine]\ngpu = 3", r"machine\.gpu = 3 is not allowed: it must be one of h100"),
    "ranks": (GOOD + "[machine]\ntensor_parallel = 0", r"tensor_parallel = 0 is not .* from 1 to 64"),
    "experts": (GOOD + "[machine]\nexpert_parallel = 2", r"expert_parallel = 2 is not .* true or false"),
    "hit empty": (GOOD + "[acceptance]\nhit = []", r"acceptance\.hit = \[\] is not allowed: it must be a row a depth"),
    "hit flat": (GOOD + "[acceptance]\nhit = [0.5]", r"acceptance\.hit = \[0\.5\] is not allowed \(\[0\] is 0\.5\)"),
    "hit above 1": (GOOD + "[acceptance]\nhit = [[0.5], [1.5]]", r"\(\[1\]\[0\] is 1\.5\)"),
    "hit not a number": (GOOD + "[acceptance]\nhit = [[nan]]", r"\(\[0\]\[0\] is nan\)"),
    "hit adds up": (GOOD + "[acceptance]\nhit = [[0.5], [0.9, 0.2]]", r"\(depth 2 adds up to 1\.1\)"),
}


def write(folder: Path, text: str) -> Path:
    path = folder / "spec.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", BAD)
def test_a_bad_spec_is_one_clear_line(name: str, tmp_path: Path) -> None:
    text, says = BAD[name]
    path = write(tmp_path, text)
    with pytest.raises(SpecError) as caught:
        read_spec(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: ")
    assert len(line.splitlines()) == 1
    assert len(line) < len(str(path)) + 320
    assert re.search(says, line), line
    assert caught.value.exit_code == 2


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none\.toml: no such file"):
        read_spec(tmp_path / "none.toml")
    with pytest.raises(SpecError, match=r"is a directory; name the spec's file, such as .*spec\.toml"):
        read_spec(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9\n")
    with pytest.raises(SpecError, match=r"latin\.toml: not UTF-8 text \(byte 5\)"):
        read_spec(tmp_path / "latin.toml")


def test_defaults(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, GOOD))
    assert spec.tree.buckets == (7, 15)
    assert (spec.tree.top_k_per_depth, spec.tree.keep_top1_chain, spec.tree.shape) == (None, False, "tree")
    assert (spec.model.weights, spec.model.seed) == ("checkpoint", 0)
    assert (spec.cache.max_seq_len, spec.cache.max_sequences, spec.cache.dtype) == (4096, 1, "auto")
    assert spec.prefill.chunks == (16, 128)
    assert (spec.machine.gpu, spec.machine.tensor_parallel, spec.machine.expert_parallel) == ("cpu", 1, False)
    assert spec.acceptance is None


def test_every_key_can_be_set(tmp_path: Path) -> None:
    text = (
        '[model]\ntarget = "/abs/target"\ndrafter = "d"\nweights = "random"\nseed = 7\n'
        "[drafter]\nwindow = 4096\nrope_attention_factor = 1.416\n"
        '[tree]\nbuckets = [31]\ntop_k_per_depth = 8\nkeep_top1_chain = true\nshape = "chain"\n'
        '[cache]\nmax_seq_len = 200_000\nmax_sequences = 4\ndtype = "fp8_e4m3"\ncontext_shards = 4\n'
        "[prefill]\nchunks = [512, 16]\n"
        '[machine]\ngpu = "rtx-pro-6000"\ntensor_parallel = 8\nexpert_parallel = true\n'
        "[acceptance]\nhit = [[0.7, 0.1, 0.05], [0.6, 0.4], [1]]\n"
    )
    spec = read_spec(write(tmp_path, text))
    tables = spec.to_dict()
    for name in CompileSpec.model_fields:
        assert set(tables[name]) == set(type(getattr(spec, name)).model_fields), name
    assert spec.prefill.chunks == (16, 512)
    assert spec.acceptance is not None
    assert spec.acceptance.hit == ((0.7, 0.1, 0.05), (0.6, 0.4), (1.0,))
    assert CompileSpec.parse(tables, base=tmp_path) == spec


def test_every_key_says_what_it_allows() -> None:
    assert list(TABLES) == list(CompileSpec.model_fields)
    for name, table in TABLES.items():
        for key, info in table.model_fields.items():
            assert info.description, f"{name}.{key}"


def minimal() -> dict[str, dict[str, object]]:
    return {"model": {"target": "target", "drafter": "drafter"}, "tree": {"buckets": [7]}}


def test_directories_start_at_the_file_unless_absolute(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, GOOD.replace('"drafter"', '"/abs/drafter"')))
    assert spec.target_dir == tmp_path / "target"
    assert spec.drafter_dir == Path("/abs/drafter")
    assert spec.to_dict()["model"]["target"] == "target"


def test_override_starts_at_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(write(tmp_path, GOOD))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    other = spec.override(target="mine")
    assert other.target_dir == tmp_path / "elsewhere" / "mine"
    assert other.drafter_dir == spec.drafter_dir
    assert other.tree == spec.tree
    assert spec.target_dir == tmp_path / "target"
    assert spec.override() == spec


def test_a_spec_is_frozen() -> None:
    spec = CompileSpec.parse(minimal())
    with pytest.raises(ValidationError):
        spec.tree.shape = "chain"


@given(st.integers(1, 8), st.integers(1, 6))
def test_tree_capacity_counts_the_full_tree(top_k: int, horizon: int) -> None:
    level, nodes = 1, 0
    for _ in range(horizon):
        level *= top_k
        nodes += level
    assert tree_capacity(top_k, horizon) == nodes


def test_top_k_defaults_to_what_the_largest_bucket_can_use() -> None:
    spec = CompileSpec.parse(minimal())
    assert (spec.top_k(vocabulary=1000), spec.top_k(vocabulary=5)) == (7, 5)


def test_a_bucket_larger_than_its_tree_is_refused() -> None:
    spec = CompileSpec.parse({**minimal(), "tree": {"buckets": [7, 15], "top_k_per_depth": 2}})
    spec.check_tree(horizon=4, vocabulary=512)
    with pytest.raises(
        SpecError, match=r"^tree\.buckets holds 15, but a tree of depth 3 .* has at most 14 nodes: choose"
    ):
        spec.check_tree(horizon=3, vocabulary=512)


def test_a_bucket_longer_than_its_chain_is_refused() -> None:
    spec = CompileSpec.parse({**minimal(), "tree": {"buckets": [7], "shape": "chain"}})
    spec.check_tree(horizon=7, vocabulary=512)
    with pytest.raises(SpecError, match=r"^tree\.buckets holds 7, but a chain of this drafter has 6 nodes: choose"):
        spec.check_tree(horizon=6, vocabulary=512)


def test_more_candidates_than_tokens_are_refused() -> None:
    spec = CompileSpec.parse({**minimal(), "tree": {"buckets": [7], "top_k_per_depth": 9}})
    with pytest.raises(SpecError, match=r"^tree\.top_k_per_depth = 9 is more than the vocabulary of 8"):
        spec.check_tree(horizon=7, vocabulary=8)


KEYS = st.sampled_from([*TABLES, *(key for table in TABLES.values() for key in table.model_fields), "x", "", "a\nb"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just("tree") | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4), st.booleans())
def test_whatever_a_file_holds_is_a_spec_or_one_line(tables: dict[str, object], filled: bool) -> None:
    data = {**minimal(), **tables} if filled else tables
    try:
        spec = CompileSpec.parse(data, where="spec.toml")
    except SpecError as error:
        line = str(error)
    else:
        assert CompileSpec.parse(spec.to_dict()) == spec
        return
    assert line.startswith("spec.toml: ")
    assert len(line.splitlines()) == 1
