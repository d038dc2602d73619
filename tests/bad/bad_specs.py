"""Specs that are wrong: the file itself, its keys, and what does not fit the models or this version."""

from case import Case, Change, config, remove, replace, write

PLAN = "plan {root}/spec.toml -o {root}/new.json"
RUN = "run {root}/spec.toml --token-ids 1,2 --max-new-tokens 2"


def _key(table: str, line: str) -> Change:
    """A line put below a table's heading."""
    return replace("spec.toml", f"[{table}]\n", f"[{table}]\n{line}\n")


def _table(text: str) -> Change:
    return replace("spec.toml", "[tree]", f"{text}\n[tree]")


def _buckets(value: str) -> Change:
    return replace("spec.toml", "buckets = [3, 5]", f"buckets = {value}")


def _length(value: str) -> Change:
    return replace("spec.toml", "max_seq_len = 64", f"max_seq_len = {value}")


SPECS = [
    # The file
    Case("no file", "plan {root}/none.toml -o {root}/new.json", 2, r"none\.toml: no such file; name a spec"),
    Case("a directory", "plan {root} -o {root}/new.json", 2, r"is a directory; name the spec's file"),
    Case("a directory to run", "run {root} --token-ids 1", 2, "is a directory; .* name a spec's TOML file",
         library=False),
    Case("a name too long", "plan {root}/" + "a" * 300 + ".toml", 2, "cannot be read: File name too long"),
    Case("a name too long to run", "run {root}/" + "a" * 300 + ".toml", 2, "cannot be read: File name too long"),
    Case("a file as a directory", "plan {root}/spec.toml/spec.toml", 2, "cannot be read: Not a directory"),
    Case("not TOML", PLAN, 2, r"spec\.toml: not valid TOML: .*line 1", write("spec.toml", "[model\n")),
    Case("JSON instead of TOML", PLAN, 2, "not valid TOML", write("spec.toml", '{"model": 1}')),
    Case("not UTF-8", PLAN, 2, r"not UTF-8 text \(byte 2\)", write("spec.toml", b"# \xff\n")),
    Case("UTF-16", PLAN, 2, "not UTF-8 text", write("spec.toml", "[model]\n".encode("utf-16"))),
    Case("a key twice", PLAN, 2, "not valid TOML: Cannot overwrite", _key("tree", "buckets = [3]")),
    Case("nested without end", PLAN, 2, "not valid TOML", write("spec.toml", "a = " + "[" * 5000)),
    Case("an empty file", PLAN, 2, r"model\.target is missing: give a directory", write("spec.toml", "")),
    # Keys
    Case("an unknown table", PLAN, 2, r"unknown key cahce \(did you mean cache\?\)", _table("[cahce]\ndtype = 'bf16'")),
    Case("an unknown key", PLAN, 2, r"unknown key tree\.bucket \(did you mean", _key("tree", "bucket = [7]")),
    Case("a key of another table", PLAN, 2, r"did you mean cache\.dtype\?", _key("model", "dtype = 'bf16'")),
    Case("a key without table", PLAN, 2, "unknown key", replace("spec.toml", "[model]", "gpu = 'cpu'\n[model]")),
    Case("no target", PLAN, 2, r"model\.target is missing", replace("spec.toml", 'target = "target"', "")),
    Case("no drafter", PLAN, 2, r"model\.drafter is missing", replace("spec.toml", 'drafter = "drafter"', "")),
    Case("no buckets", PLAN, 2, r"tree\.buckets is missing", replace("spec.toml", "buckets = [3, 5]", "")),
    Case("a table that is none", PLAN, 2, "machine = 3 must be a table", replace("spec.toml", "[model]",
         "machine=3\n[model]")),
    Case("a bucket of text", PLAN, 2, r'tree\.buckets .*\(\[0\] is "7"\).*must be a list', _buckets('["7"]')),
    Case("a bucket of 0", PLAN, 2, r"tree\.buckets .* is not allowed .*from 1 to 256", _buckets("[0, 3]")),
    Case("a bucket of 257", PLAN, 2, r"tree\.buckets .* is not allowed .*from 1 to 256", _buckets("[257]")),
    Case("a bucket twice", PLAN, 2, "holds a size twice", _buckets("[3, 3]")),
    Case("no bucket at all", PLAN, 2, r"tree\.buckets = \[\] is not allowed", _buckets("[]")),
    Case("a bucket of 7.5", PLAN, 2, r"\[0\] is 7\.5", _buckets("[7.5]")),
    Case("one bucket, no list", PLAN, 2, "tree.buckets = 7 is not allowed: it must be a list", _buckets("7")),
    Case("yes for true", PLAN, 2, r'keep_top1_chain = "yes" .*true or false', _key("tree", 'keep_top1_chain = "yes"')),
    Case("another shape", PLAN, 2, r'tree\.shape = "bush" .*"tree" or "chain"', _key("tree", 'shape = "bush"')),
    Case("another dtype", PLAN, 2, r'cache\.dtype = "int8" .*"bf16"', _key("cache", 'dtype = "int8"')),
    Case("another gpu", PLAN, 2, r'machine\.gpu = "h20" .*did you mean h200', _table('[machine]\ngpu = "h20"')),
    Case("no ranks", PLAN, 2, r"tensor_parallel = 0 .*from 1 to 64", _table("[machine]\ntensor_parallel = 0")),
    Case("shards of no rank", PLAN, 2, "context_shards = 3 must divide", _key("cache", "context_shards = 3")),
    Case("no sequence", PLAN, 2, "max_sequences = 0 is not allowed", _key("cache", "max_sequences = 0")),
    Case("a chunk of 0", PLAN, 2, r"prefill\.chunks .* is not allowed", replace("spec.toml", "[4]", "[0]")),
    Case("odds above 1", PLAN, 2, r"acceptance\.hit .*depth 1 adds up to 1\.2",
         _table("[acceptance]\nhit = [[0.7, 0.5]]")),
    Case("a seed below 0", PLAN, 2, r"model\.seed = -1 is not allowed", _key("model", "seed = -1")),
    Case("a long value", PLAN, 2, r'x{40,}\.\.\.', _key("tree", f'shape = "{"x" * 500}"')),
    Case("a value of two lines", PLAN, 2, r'"a\\nb"', _key("tree", 'shape = "a\\nb"')),
    # What does not fit the models
    Case("a bucket larger than its tree", PLAN, 2, "has at most 14 nodes: choose", (_buckets("[3, 15]"), _key("tree",
         "top_k_per_depth = 2"))),
    Case("a chain longer than the horizon", PLAN, 2, "a chain of this drafter has 3 nodes: choose", _key("tree",
         'shape = "chain"')),
    Case("more candidates than tokens", PLAN, 2, "more than the vocabulary of 97", _key("tree",
         "top_k_per_depth = 98")),
    Case("a cache longer than the model", PLAN, 2, r"max_seq_len = 513, but the target is made for 512",
         _length("513")),
    Case("a cache of one token", PLAN, 2, "max_seq_len = 1 is not allowed", _length("1")),
    Case("no target directory", PLAN, 2, "none/config.json: no such file", replace("spec.toml", '"target"', '"none"')),
    Case("an empty target", PLAN, 2, 'model.target = "" is not allowed', replace("spec.toml", '"target"', '""')),
    Case("random weights, no configs", PLAN, 2, "target/config.json: no such file; a model directory needs",
         (_key("model", 'weights = "random"'), remove("target/config.json"))),
    # What this version cannot run
    Case("a group", RUN, 2, r"machine\.tensor_parallel = 2: .*set 1", _table("[machine]\ntensor_parallel = 2")),
    Case("another cache dtype", RUN, 2, r'cache\.dtype = "bf16": .*use "auto"', _key("cache", 'dtype = "bf16"')),
    Case("a model larger than the machine", RUN, 3, "on a CPU needs [0-9.]+ GiB, and this machine has .*choose",
         (_key("model", 'weights = "random"'), config("target/config.json", intermediate_size=(1 << 31) - 1))),
    Case("an fp8 target", RUN, 2, "fp8 checkpoint: .*cannot run it; use bf16", config("target/config.json",
         quantization_config={"quant_method": "fp8"})),
    Case("another spec's plan", "run {root}/plan.json --token-ids 1", 2, "is a plan, not a spec; name the spec's TOML",
         library=False),
]  # fmt: skip
