"""`plan` on the command line: what it prints, what it writes, and how it fails."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.models import CONFIGS, small_qwen, write_toml

from ddtree_compile import __version__
from ddtree_compile.cli import main
from ddtree_compile.plan_json import from_json

QWEN3_8B = {"target": "qwen3-8b", "drafter": "qwen3-8b-dflash-b16"}
HIT = [[0.8, 0.1], [0.7, 0.2], [0.6], [0.5]]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plan")
    return write_toml(directory / "spec.toml", small_qwen(directory, acceptance={"hit": HIT}, machine={"gpu": "h200"}))


def failed(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """The exit code and the one line of an error."""
    code = main(args)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    return code, err


def test_it_prints_memory_times_and_the_best_bucket(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(spec)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for said in (
        "weights",
        "total",
        "of 139.000 GiB",
        "fits, ",
        "met by every segment",
        "tree 9",
        "chain 4",
        "a second",
    ):
        assert said in out
    assert "*" in out


def test_json_is_the_report_and_nothing_else(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(spec), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"spec", "gpu", "tensor_parallel", "memory", "arena_lower_bound", "buckets", "best"} <= set(report)
    assert set(report["buckets"][0]) >= {
        "nodes", "shape", "context", "ops", "kernels", "bytes", "flops", "experts_touched", "floor_us", "predicted_us",
        "expected_tokens", "tokens_per_second",
    }  # fmt: skip
    assert set(report["memory"]) == {"weights", "cache", "arena", "round", "peer", "total", "capacity", "fits"}
    assert set(report["best"]) == {"64", "128", "256"}


def test_out_writes_the_plan_and_only_that(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", str(spec), "-o", str(out)]) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    assert from_json(out.read_text(), "plan.json").buckets == (3, 4, 9)
    assert list(tmp_path.iterdir()) == [out]
    before = out.read_bytes()
    assert main(["plan", str(spec), "-o", str(out), "--json"]) == 0
    assert out.read_bytes() == before


def test_out_may_be_a_link_or_a_pipe(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Renaming a file onto /dev/null put a plain file in its place, on a machine where root ran it."""
    (tmp_path / "link.json").symlink_to("real.json")
    assert main(["plan", str(spec), "-o", str(tmp_path / "link.json"), "--json"]) == 0
    assert (tmp_path / "link.json").is_symlink()
    text = (tmp_path / "real.json").read_text()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    assert main(["plan", str(spec), "-o", str(pipe), "--json"]) == 0
    reader.join()
    assert found == [text]
    assert pipe.is_fifo()


def test_other_model_directories(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = spec.parent / "target"
    assert main(["plan", str(spec), "--target", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spec"]["model"]["target"] == str(target)
    code, err = failed(capsys, "plan", str(spec), "--drafter", str(tmp_path / "none"))
    assert code in (2, 3) and str(tmp_path / "none") in err


def test_what_does_not_fit_says_what_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = {name: str(CONFIGS / directory) for name, directory in QWEN3_8B.items()}
    tables = small_qwen(tmp_path, model=models, cache={"max_seq_len": 40_960, "max_sequences": 4})
    path = write_toml(tmp_path / "spec.toml", tables | {"tree": {"buckets": [1]}, "machine": {"gpu": "rtx-5090"}})
    assert main(["plan", str(path)]) == 0
    out = capsys.readouterr().out
    assert "does not fit: " in out and "cache.max_seq_len = " in out and "would fit" in out


def test_an_fp8_checkpoint_is_planned_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_toml(tmp_path / "spec.toml", small_qwen(tmp_path))
    config = tmp_path / "target" / "config.json"
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantised}))
    assert main(["plan", str(path)]) == 0
    assert "warning: this is an fp8 checkpoint" in capsys.readouterr().out


def test_errors_are_one_line_and_exit_2_or_3(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    unknown = write_toml(tmp_path / "gpu.toml", small_qwen(tmp_path, machine={"gpu": "h2000"}))
    assert failed(capsys, "plan", str(tmp_path / "no.toml"))[0] == 2
    assert failed(capsys, "plan", str(tmp_path))[0] == 2
    assert failed(capsys, "plan", str(broken))[0] == 2
    assert "did you mean h200?" in failed(capsys, "plan", str(unknown))[1]
    assert failed(capsys, "plan")[0] == 2
    assert failed(capsys, "plan", str(spec), "--loud")[0] == 2
    assert failed(capsys, "plan", str(spec), "--log-level", "loud")[0] == 2
    assert failed(capsys, "plant", str(spec))[0] == 2
    assert failed(capsys, "plan", str(spec), "-o", str(tmp_path))[0] == 2
    assert failed(capsys, "plan", str(spec), "-o", str(tmp_path / "no" / "plan.json"))[0] == 2
    assert not list(tmp_path.glob("**/plan.json*"))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    assert failed(capsys, "plan", str(spec), "-o", str(tmp_path / "plan.json"))[0] == 3


def test_logging_goes_to_stderr(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(spec), "--json", "--log-level", "info"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) and "INFO verify[9]: fuse, " in err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--version"], ["plan", "--version"], ["inspect", "--version"], ["doctor", "--version"]):
        assert main(args) == 0
        assert capsys.readouterr().out == f"ddtree-compile {__version__}\n"
    for args in (["--help"], ["plan", "-h"], ["inspect", "--help"], ["doctor", "--help"]):
        assert main(args) == 0
        assert "Usage" in capsys.readouterr().out
    assert main([]) == 2
    assert "plan" in "".join(capsys.readouterr())


def test_an_interrupt_is_130(spec: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ddtree_compile.compiler.compile_spec", stop)
    assert main(["plan", str(spec)]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_a_closed_pipe_is_quiet(spec: Path) -> None:
    """`ddtree-compile inspect SPEC --segment S | head -1` must not end in a traceback."""
    command = f"{sys.executable} -m ddtree_compile.cli inspect {spec} --segment 'prefill[8]' --diff | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("== absorb")


def test_help_needs_no_torch() -> None:
    code = "import sys; from ddtree_compile.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
