"""The table of GPUs: its rows are plausible and sourced, and the two cost models meet what was measured."""

import re
from pathlib import Path

import pytest

from ddtree_compile import machine
from ddtree_compile.errors import SpecError
from ddtree_compile.ir.graph import DTYPE_BYTES
from ddtree_compile.machine import GPUS, NODE_OVERHEAD_US, Gpu, allreduce_us, gpu, node_overhead_us

CUDA_GPUS = [row for row in GPUS.values() if row.name != "cpu"]
NAMES = [  # as documented
    *("h100", "h200", "b200", "b300"),
    *("rtx-pro-6000", "rtx-pro-6000-workstation", "rtx-pro-6000-max-q", "rtx-5090", "rtx-5070-ti"),
    "cpu",
]


def test_the_names_are_those_documented() -> None:
    assert list(GPUS) == NAMES
    assert all(gpu(name).name == name for name in GPUS)


def test_an_unknown_gpu_is_one_line_with_a_close_match() -> None:
    with pytest.raises(
        SpecError, match=r"^unknown GPU 'rtx-pro-600' \(did you mean rtx-pro-6000\?\): known are h100, h200"
    ):
        gpu("rtx-pro-600")
    with pytest.raises(SpecError, match=r"^unknown GPU 'tpu-v9': known are h100"):
        gpu("tpu-v9")


@pytest.mark.parametrize("row", GPUS.values(), ids=GPUS)
def test_a_row_is_sourced_and_its_fields_have_the_right_units(row: Gpu) -> None:
    assert row.source
    assert row.link.source
    assert set(row.measured) <= set(Gpu.__dataclass_fields__)
    assert set(row.matmul) <= set(DTYPE_BYTES)
    assert {"f32", "bf16"} <= set(row.matmul)
    assert 1e9 < row.read_bandwidth < 2e13
    assert all(1e10 < rate < 1e16 for rate in row.matmul.values())
    assert row.memory_bytes > 2**33
    assert row.link.once_rate <= row.link.peak


@pytest.mark.parametrize("row", CUDA_GPUS, ids=lambda row: row.name)
def test_a_cuda_row_is_an_architecture_that_kernels_are_built_for(row: Gpu) -> None:
    assert re.fullmatch(r"sm_(90|100|103|120)", row.arch)
    assert row.smem_per_block == (101_376 if row.arch == "sm_120" else 232_448)
    assert row.matmul["fp8_e4m3"] == pytest.approx(2 * row.matmul["bf16"], rel=0.01)
    assert row.link.kind == {"sm_90": "nvlink4", "sm_120": "pcie5"}.get(row.arch, "nvlink5")


def test_h200_has_the_measured_bandwidth() -> None:
    assert gpu("h200").read_bandwidth == 4.55e12
    assert "read_bandwidth" in gpu("h200").measured


def test_a_node_costs_what_was_measured_and_something_between() -> None:
    for programs, plain, programmatic in NODE_OVERHEAD_US:
        assert node_overhead_us(programs, programmatic=False) == pytest.approx(plain)
        assert node_overhead_us(programs, programmatic=True) == pytest.approx(programmatic)
    for kind in (False, True):
        costs = [node_overhead_us(programs, kind) for programs in (1, 2, 64, 100, 132, 300, 512, 9999)]
        assert costs == sorted(costs)
        assert costs[-1] == costs[-2]


# Microseconds: ranks, bytes, measured by others (sources in machine.py)
PCIE = [
    (8, 256, 7.5),
    (8, 8192, 9.2),
    (8, 32768, 16.5),
    (8, 65536, 25.9),
    (8, 2**20, 80),
    (4, 1024, 6.1),
    (4, 65536, 11.8),
]
NVLINK4 = [(6, 2**19, 13), (8, 2048, 8.95)]
NVLINK5 = [(8, 2**14, 7), (8, 2**18, 9), (8, 2**20, 17)]


@pytest.mark.parametrize(
    ("name", "table"),
    [("rtx-pro-6000", PCIE), ("h100", NVLINK4), ("b300", NVLINK5)],
    ids=["pcie5", "nvlink4", "nvlink5"],
)
def test_an_all_reduce_costs_about_what_was_measured(name: str, table: list[tuple[int, int, float]]) -> None:
    for ranks, nbytes, measured in table:
        assert allreduce_us(gpu(name), ranks, nbytes) == pytest.approx(measured, rel=0.3), (ranks, nbytes)


def test_an_all_reduce_is_free_alone_and_grows_with_ranks_and_bytes() -> None:
    for row in GPUS.values():
        assert allreduce_us(row, 1, 2**20) == 0
        assert allreduce_us(row, 2, 14_336) < allreduce_us(row, 4, 14_336) < allreduce_us(row, 8, 14_336)
        assert allreduce_us(row, 8, 0) < allreduce_us(row, 8, 14_336) < allreduce_us(row, 8, 2**24)


def test_a_container_limit_is_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "CGROUP_FILE", path)
    whole = machine.host_memory()
    path.write_text("max\n")
    assert machine.host_memory() == whole
    path.write_text("1048576\n")
    assert machine.host_memory() == 1048576
