"""`run`: what goes to stdout and what to stderr, its JSON, its errors, and what an interrupt leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.checkpoints import KIMI, make_drafter, make_kimi

from ddtree_compile import Engine, SamplingParams, embedded_spec, load_chat_template, load_tokenizer, read_spec
from ddtree_compile.cli import main
from ddtree_compile.commands import show_run
from ddtree_compile.commands.prompts import Sampling, sampling_params
from ddtree_compile.errors import PromptError
from ddtree_compile.text import Defaults

PROMPT = "def add(a, b):"
SEQUENCE_KEYS = ["token_ids", "text", "finish_reason", "stop_reason", "rounds", "accept_lengths", "cached_tokens"]
TARGET = read_spec(embedded_spec()).target_dir


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(TARGET)


@pytest.fixture(scope="session")
def engine():
    with Engine.from_spec(embedded_spec()) as made:
        yield made


@pytest.fixture(scope="session")
def expected(engine, tokenizer):
    """The embedded model's greedy continuation of PROMPT."""
    return engine.generate([tokenizer.encode_prompt(PROMPT)], SamplingParams(max_new_tokens=12))[0]


@pytest.fixture(scope="session")
def wordless(tmp_path_factory):
    """The spec of a small random model that has no tokenizer."""
    root = tmp_path_factory.mktemp("wordless")
    make_kimi(root / "target", eos_token_id=None)
    make_drafter(root / "drafter", KIMI)
    spec = root / "spec.toml"
    spec.write_text(
        '[model]\ntarget = "target"\ndrafter = "drafter"\n[tree]\nbuckets = [7]\n[cache]\nmax_seq_len = 64\n'
    )
    return spec


def retold(directory: Path, **changes: object) -> Path:
    """The embedded target under another roof, with other JSON files: `name=` an object, None for none."""
    directory.mkdir()
    for path in TARGET.iterdir():
        if path.stem not in changes:
            (directory / path.name).symlink_to(path.resolve())
    for stem, value in changes.items():
        if value is not None:
            (directory / f"{stem}.json").write_text(json.dumps(value))
    return directory


def run(capsys, *args):
    """(exit code, stdout, stderr) of `run ARGS`."""
    code = main(["run", *map(str, args)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys, *args):
    code, out, err = run(capsys, *args, "--json")
    assert code == 0, err
    return json.loads(out)


def test_text_goes_to_stdout_and_statistics_to_stderr(capsys, tokenizer, expected):
    code, out, err = run(capsys, "--prompt", PROMPT, "--max-new-tokens", 12)
    assert code == 0
    text = tokenizer.decode(expected.token_ids)
    assert out == (text if text.endswith("\n") else f"{text}\n")
    assert f"{expected.rounds}, {sum(expected.accept_lengths) / expected.rounds:.2f} tokens a round" in err
    assert "12, ended by the limit of new tokens" in err
    assert "tokens a second" in err
    assert "\x1b" not in out + err


def test_no_argument_needs_nothing(capsys):
    code, out, _ = run(capsys, "--max-new-tokens", 5)
    assert code == 0
    assert out.strip()


def test_json_is_exactly_what_is_documented(capsys, tokenizer, expected):
    found = run_json(capsys, "--prompt", PROMPT, "--max-new-tokens", 12)
    assert list(found) == ["device", "model", "sequences", "seconds"]
    assert (found["device"], found["model"]) == ("cpu", "embedded")
    [sequence] = found["sequences"]
    assert list(sequence) == SEQUENCE_KEYS
    assert sequence["token_ids"] == list(expected.token_ids)
    assert sequence["text"] == tokenizer.decode(expected.token_ids)
    assert (sequence["finish_reason"], sequence["stop_reason"]) == ("length", "max_new_tokens")
    assert 1 + sum(sequence["accept_lengths"]) == 12
    assert sequence["rounds"] == len(sequence["accept_lengths"])
    assert sequence["cached_tokens"] == 0
    assert list(found["seconds"]) == ["load", "prefill", "decode"]
    assert all(value > 0 for value in found["seconds"].values())


@pytest.mark.parametrize("flags", [("--no-speculation",), ("--bucket", 31), ("--temperature", 0)])
def test_how_a_round_is_made_changes_no_token(capsys, expected, flags):
    found = run_json(capsys, "--prompt", PROMPT, "--max-new-tokens", 12, *flags)
    assert found["sequences"][0]["token_ids"] == list(expected.token_ids)


def test_compare_runs_plain_chain_and_tree(capsys, expected):
    found = run_json(capsys, "--prompt", PROMPT, "--max-new-tokens", 12, "--compare")
    assert list(found) == ["device", "model", "compare", "seconds"]
    assert [row["mode"] for row in found["compare"]] == ["plain", "chain", "tree"]
    for row in found["compare"]:
        assert row["token_ids"] == list(expected.token_ids)
        assert row["same_tokens"] is True
        assert row["tokens_per_round"] == pytest.approx(11 / row["rounds"])
        assert row["tokens_per_second"] == pytest.approx(11 / row["seconds"]["decode"])
    assert found["compare"][0]["rounds"] == 11
    assert found["compare"][0]["speed_up"] == 1.0


def test_compare_prints_the_three(capsys):
    code, out, _ = run(
        capsys, "--prompt", PROMPT, "--max-new-tokens", 6, "--compare", "--temperature", 0.8, "--seed", 3
    )
    assert code == 0
    rows = [line for line in out.splitlines() if line.startswith("│")]
    assert [row.split()[1] for row in rows] == ["plain", "chain", "tree"]
    assert all(row.split()[-2] == "yes" for row in rows)


def test_prompts_from_a_file_and_from_stdin(capsys, monkeypatch, tmp_path, expected):
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT)
    found = run_json(capsys, "--prompt-file", path, "--max-new-tokens", 12)
    assert found["sequences"][0]["token_ids"] == list(expected.token_ids)
    with path.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        found = run_json(capsys, "--prompt-file", "-", "--max-new-tokens", 12)
    assert found["sequences"][0]["token_ids"] == list(expected.token_ids)


@pytest.mark.parametrize("ids", ["{}", "[{}]", " {} "])
def test_token_ids_are_a_prompt(capsys, tokenizer, expected, ids):
    given = ids.format(", ".join(map(str, tokenizer.encode_prompt(PROMPT))))
    found = run_json(capsys, "--token-ids", given, "--max-new-tokens", 12)
    assert found["sequences"][0]["token_ids"] == list(expected.token_ids)


def test_chat_uses_the_template_and_the_recommended_sampling(capsys, tmp_path, engine, tokenizer):
    target = retold(tmp_path / "target", generation_config={"do_sample": True, "temperature": 0.7, "top_k": 5})
    found = run_json(capsys, "--target", target, "--chat", "--prompt", "hi", "--max-new-tokens", 6, "--seed", 9)
    text = load_chat_template(TARGET).render([{"role": "user", "content": "hi"}])
    params = SamplingParams(temperature=0.7, top_k=5, seed=9, max_new_tokens=6)
    [by_hand] = engine.generate([tokenizer.encode(text, special=True)], params)
    assert found["model"] == "target"
    assert found["sequences"][0]["token_ids"] == list(by_hand.token_ids)


def test_a_model_without_tokenizer_speaks_in_ids(capsys, wordless):
    found = run_json(capsys, wordless, "--token-ids", "1 2 3", "--max-new-tokens", 7)
    [sequence] = found["sequences"]
    assert sequence["text"] is None
    code, out, _ = run(capsys, wordless, "--token-ids", "1,2,3", "--max-new-tokens", 7)
    assert code == 0
    assert [int(word) for word in out.split()] == sequence["token_ids"]


def test_a_full_cache_is_a_reason(capsys, wordless):
    found = run_json(capsys, wordless, "--token-ids", "1,2,3", "--max-new-tokens", 500)
    assert found["sequences"][0]["stop_reason"] == "context_full"


BAD = [
    (["--prompt", "a", "--prompt-file", "b"], 2, "--prompt and --prompt-file"),
    (["--prompt", "a", "--token-ids", "1"], 2, "--prompt and --token-ids"),
    (["--prompt", ""], 2, "the prompt is empty"),
    (["--token-ids", "1,x"], 2, "holds 'x'"),
    (["--token-ids", "1,-2"], 2, "holds '-2'"),
    (["--token-ids", ","], 2, "--token-ids is empty"),
    (["--token-ids", "999999"], 2, "ids go from 0 to"),
    (["--token-ids", "1", "--chat"], 2, "--chat needs text"),
    (["--prompt-file", "/nowhere/at/all"], 2, "No such file"),
    (["--prompt-file", "/"], 2, "Is a directory"),
    (["--prompt-file", "a\0b"], 2, "null"),
    (["--top-p", "0.9"], 2, "--temperature"),
    (["--temperature", "-1"], 2, "temperature"),
    (["--temperature", "nan"], 2, "temperature"),
    (["--temperature", "1", "--top-p", "0"], 2, "top_p"),
    (["--temperature", "1", "--min-p", "2"], 2, "min_p"),
    (["--temperature", "1", "--top-k", "-1"], 2, "top_k"),
    (["--temperature", "hot"], 2, "--temperature"),
    (["--seed", "-1"], 2, "seed"),
    (["--max-new-tokens", "0"], 2, "max_new_tokens"),
    (["--bucket", "9"], 2, "buckets 7, 15, 31, 63"),
    (["--bucket", "7", "--no-speculation"], 2, "--no-speculation and --bucket 7"),
    (["--compare", "--no-speculation"], 2, "--no-speculation and --compare"),
    (["--device", "tpu"], 2, "tpu"),
    (["--device", "cuda"], 3, "CPU only"),
    (["--log-level", "loud"], 2, "loud"),
    (["--fast"], 2, "--fast"),
    (["a", "b"], 2, "b"),
    (["/nowhere/spec.toml"], 2, "no such file"),
    (["/"], 2, "bundles come with a later version"),
    (["--target", "/nowhere"], 2, "config.json"),
    (["--drafter", "/nowhere"], 2, "config.json"),
]


@pytest.mark.parametrize(("args", "code", "says"), BAD, ids=[" ".join(args).replace("\0", "0") for args, *_ in BAD])
def test_bad_input_gets_one_line(capsys, args, code, says):
    found, out, err = run(capsys, *args)
    assert (found, out) == (code, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err


def test_text_needs_a_tokenizer(capsys, wordless):
    code, _, err = run(capsys, wordless)
    assert code == 2
    assert "has no tokenizer: give --token-ids" in err


def test_chat_needs_a_template(capsys, tmp_path):
    target = retold(tmp_path / "target", tokenizer_config=None)
    code, _, err = run(capsys, "--target", target, "--chat")
    assert code == 2
    assert "no chat template" in err


def test_prompts_that_are_no_text(capsys, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"ab\xff")
    code, _, err = run(capsys, "--prompt-file", path)
    assert code == 2
    assert "not UTF-8 text (byte 2)" in err


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupt_ends_the_sequence_and_says_so(capsys, monkeypatch, as_json):
    """The handler from before comes back, whichever it was: under a shell's `&` interrupts are ignored."""
    rounds, before = 0, signal.getsignal(signal.SIGINT)
    step = Engine.step

    def interrupted(self, requests):
        nonlocal rounds
        rounds += 1
        if rounds == 3:
            signal.raise_signal(signal.SIGINT)
        return step(self, requests)

    monkeypatch.setattr(Engine, "step", interrupted)
    flags = ["--json"] if as_json else []
    code, out, err = run(capsys, "--prompt", PROMPT, "--no-speculation", "--max-new-tokens", 100, *flags)
    assert code == 130
    assert signal.getsignal(signal.SIGINT) is before
    if as_json:
        [sequence] = json.loads(out)["sequences"]
        assert (sequence["finish_reason"], sequence["stop_reason"], sequence["rounds"]) == ("cancelled", None, 3)
        assert len(sequence["token_ids"]) == 4
    else:
        assert "4, ended by an interrupt" in err


def test_text_is_never_cut_inside_a_character(tokenizer):
    parts: list[str] = []
    sink = SimpleNamespace(write=parts.append, flush=lambda: None)
    text = "naïve ✓ 漢字 🙂 done"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text.split())
    write = show_run.writer(sink, tokenizer)
    for index, token in enumerate(ids):
        write((token,), index == len(ids) - 1)
    assert "".join(parts) == f"{text}\n"
    assert not any("\ufffd" in part for part in parts)


def test_acceptance_by_depth_counts_rounds_that_got_there():
    # Three rounds: two drafted tokens accepted, then none, then one and the end of the request.
    assert show_run.depths([3, 1, 2], 7, cut=True) == [(2, 3), (1, 1), (0, 1)]
    assert show_run.depths([3, 1, 2], 7, cut=False) == [(2, 3), (1, 2), (0, 1)]
    assert show_run.depths([1, 1], 7, cut=False) == [(0, 2)]
    assert show_run.depths([], 7, cut=True) == []
    assert show_run.depths([3, 3], 2, cut=False) == [(2, 2), (2, 2)]  # there is no depth 3 that nobody accepted


OWN = Defaults((), temperature=0.6, top_p=0.95, top_k=20, min_p=0.0, do_sample=True)


@pytest.mark.parametrize(
    ("flags", "defaults", "chat", "expected"),
    [
        (Sampling(), OWN, False, (0.0, 0, 1.0, 0.0)),
        (Sampling(), OWN, True, (0.6, 20, 0.95, 0.0)),
        (Sampling(temperature=1.0, top_k=3), OWN, True, (1.0, 3, 0.95, 0.0)),
        (Sampling(temperature=0.0), OWN, True, (0.0, 20, 0.95, 0.0)),
        (Sampling(), Defaults((), temperature=0.6, do_sample=False), True, (0.0, 0, 1.0, 0.0)),
        (Sampling(), Defaults((), do_sample=True), True, (1.0, 0, 1.0, 0.0)),
        (Sampling(), Defaults(()), True, (0.0, 0, 1.0, 0.0)),
        (Sampling(top_p=0.5), OWN, True, (0.6, 20, 0.5, 0.0)),
    ],
)
def test_flags_come_before_what_the_checkpoint_recommends(flags, defaults, chat, expected):
    made = sampling_params(
        flags, defaults, chat=chat, seed=1, max_new_tokens=2, bucket=None, speculate=True
    )  # fmt: skip
    assert (made.temperature, made.top_k, made.top_p, made.min_p) == expected


def test_a_filter_without_temperature_is_refused():
    flags = Sampling(min_p=0.1)
    with pytest.raises(PromptError, match=r"--min-p 0\.1 has no effect"):
        sampling_params(flags, Defaults(()), chat=True, seed=0, max_new_tokens=1, bucket=None, speculate=True)


@pytest.mark.full
def test_first_words_within_ten_seconds_and_two_hundred_tokens_within_twenty():
    started = time.monotonic()
    command = [sys.executable, "-m", "ddtree_compile.cli", "run", "--prompt", PROMPT]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        first = time.monotonic() - started
        process.stdout.read()
    assert process.returncode == 0
    assert first < 10
    assert time.monotonic() - started < 20
