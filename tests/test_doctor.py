"""What the doctor concludes from what it found, on machines that we describe and on this one."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_compile import doctor
from ddtree_compile.doctor import Device, Facts, Report, Row, examine, judge

BARE = Facts(python="3.11.7", system="Linux x86_64", cores=2, memory_bytes=16 << 30, packages={})
CPU = replace(
    BARE,
    packages={"torch": "2.13.0+cpu", "triton": "3.6.0", "tokenizers": "0.23.3", "tiktoken": "0.14.0"},
    backends=("gloo",),
    ptxas=True,
)
BLACKWELL = Device("NVIDIA RTX PRO 6000 Blackwell Server Edition", "sm_120", 95 << 30, 188)
GPU = replace(
    CPU,
    packages={**CPU.packages, "torch": "2.13.0", "cuda-bindings": "13.0.3"},
    torch_cuda="13.0",
    devices=(BLACKWELL,) * 8,
    backends=("gloo", "nccl"),
    driver="580.95.05",
)


def rows(report: Report) -> dict[str, Row]:
    return {row.name: row for row in (*report.has, *report.works)}


def without(facts: Facts, package: str) -> Mapping[str, str]:
    return {name: version for name, version in facts.packages.items() if name != package}


def works(facts: Facts) -> dict[str, str]:
    return {row.name: row.status for row in judge(facts).works}


LATER = dict.fromkeys(["build", "run on GPU", "group"], "no")  # not in this version, whatever the machine has


def test_a_gpu_machine_is_ready_for_everything() -> None:
    """It said "ok" of building, of GPUs and of groups before any of them existed."""
    assert works(GPU) == {"plan": "ok", "run on CPU": "ok"} | LATER
    assert all("not in version" in row.reason for row in judge(GPU).works if row.name in LATER)
    assert rows(judge(GPU))["GPU"].found == f"8 x {BLACKWELL.name}, 95.0 GiB, sm_120"
    assert "this machine is ready: 8 GPUs over NCCL" in rows(judge(GPU))["group"].reason


def test_a_cpu_machine_can_do_all_but_the_gpu() -> None:
    assert works(CPU) == {"plan": "ok", "run on CPU": "ok"} | LATER
    assert rows(judge(CPU))["run on GPU"].reason.endswith("this machine is not ready: GPU: no CUDA device")


def test_a_bare_machine_says_what_to_install() -> None:
    assert set(works(BARE).values()) == {"no"}
    assert rows(judge(BARE))["plan"].reason == "torch: pip install -e . installs it"


@pytest.mark.parametrize(
    ("facts", "row", "status", "says"),
    [
        (replace(GPU, packages=without(GPU, "cuda-bindings")), "run on GPU", "no", "pip install -e '.[cuda]'"),
        (replace(GPU, packages=without(GPU, "triton")), "build", "no", "triton>=3.6,<3.8"),
        (replace(GPU, packages=without(GPU, "tiktoken")), "run on CPU", "warn", "tiktoken missing"),
        (replace(GPU, ptxas=False), "build", "no", "ptxas"),
        (replace(GPU, driver="570.86.10"), "run on GPU", "no", "update to 580"),
        (replace(GPU, devices=(replace(BLACKWELL, arch="sm_86"),)), "run on GPU", "no", "no kernels for sm_86"),
        (replace(GPU, devices=(), torch_cuda=None), "GPU", "no", "this torch is a CPU build"),
        (replace(GPU, devices=(BLACKWELL,)), "group", "no", "NCCL needs two GPUs"),
        (replace(GPU, backends=()), "group", "no", "gloo"),
        (replace(GPU, torch_error="libcudart.so.13: cannot open"), "plan", "no", "does not import: libcudart.so.13"),
        (replace(GPU, python="3.13.0"), "Python", "warn", "3.11 and 3.12"),
        (replace(GPU, memory_bytes=2 << 30), "host", "warn", "less than 4.0 GiB"),
        (replace(GPU, packages={**GPU.packages, "torch": "2.15.0"}), "torch", "warn", "tested from 2.11, below 2.14"),
        (replace(GPU, packages={**GPU.packages, "triton": "3.8.0"}), "build", "no", "untested: triton"),
        (replace(GPU, packages={**GPU.packages, "cuda-bindings": "13.0.1"}), "cuda-bindings", "warn", "from 13.0.3"),
    ],
)
def test_what_is_lacking_is_a_row_with_its_remedy(facts: Facts, row: str, status: str, says: str) -> None:
    found = rows(judge(facts))[row]
    assert found.status == status
    assert says in found.reason


def test_every_row_that_is_not_ok_gives_a_reason() -> None:
    for facts in (BARE, CPU, GPU):
        for row in rows(judge(facts)).values():
            assert row.status == "ok" or row.reason, row
            assert "\n" not in row.reason + row.found


def test_this_machine_is_examined_without_a_crash() -> None:
    report = examine()
    assert rows(report)["plan"].status in {"ok", "warn"}
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert set(report.to_dict()) == {"version", "has", "works"}


def test_a_machine_without_packages_is_examined_without_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    monkeypatch.setattr(doctor, "PACKAGES", ())
    monkeypatch.setattr(doctor.util, "find_spec", lambda _: None)
    monkeypatch.setattr(doctor, "DRIVER_FILE", Path("/nonexistent"))
    assert {row.status for row in examine().works} == {"no"}


def test_the_driver_is_read_from_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12.2.0\n"
    )
    monkeypatch.setattr(doctor, "DRIVER_FILE", path)
    assert doctor._driver() == "580.95.05"


def test_tested_releases_are_those_of_pyproject() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["cuda"]]
    for name, (first, beyond) in doctor.TESTED.items():
        pin = f"{name}>={'.'.join(map(str, first))},<{'.'.join(map(str, beyond))}"
        assert any(line.split(";")[0].strip() == pin for line in listed), pin
