"""What a GPU can do, as data: the planner prices a graph with these rows, the kernels check their tiles against them.

A name enters `gpu`, a `Gpu` leaves. Rates are dense (no sparsity) and in base units: bytes, bytes/s, FLOP/s; times are
in microseconds. Figures are datasheet peaks unless `measured` names them: predictions from such rows are optimistic.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from ddtree_compile.errors import SpecError

GIB = 1 << 30
MIB = 1 << 20
SM_90_SMEM = 232_448  # bytes of shared memory a block may ask for; also of sm_100 and sm_103
SM_120_SMEM = 101_376

_WIKI = "rtx6kpro wiki (github local-inference-lab/rtx6kpro e2c2b95), 4 and 8 RTX PRO 6000 behind PCIe switches"


@dataclass(frozen=True, slots=True)
class Link:
    """How ranks reach each other, and two all-reduces over it.

    One-shot (each rank gets every other's vector): once_us + n * rank_us + (n-1) * bytes / once_rate. Ring (NCCL):
    ring_us + n * ring_rank_us + 2 (n-1)/n * bytes / ring_rate. `peak` is the datasheet rate in one direction.
    """

    kind: str  # "pcie5", "nvlink4", "nvlink5", "memory"
    peak: float
    once_us: float
    rank_us: float
    once_rate: float
    ring_us: float
    ring_rank_us: float
    ring_rate: float
    source: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of device. `memory_bytes` is what a process can have, a little less than what the box says."""

    name: str
    arch: str  # as ptxas names it, without the "a"; "cpu" has none
    sms: int
    memory_bytes: int
    read_bandwidth: float
    matmul: Mapping[str, float]  # FLOP/s by the dtype of the operands (keys of ir.graph.DTYPE_BYTES), fp32 accumulation
    smem_per_block: int
    l2_bytes: int
    link: Link
    source: str
    measured: tuple[str, ...] = ()  # fields that we measured


PCIE5 = Link(
    kind="pcie5",
    peak=63e9,
    once_us=4.9,
    rank_us=0.3,
    once_rate=28e9,
    ring_us=2.0,
    ring_rank_us=2.8,
    ring_rate=38e9,
    source=f"fit to {_WIKI}: one-shot 6.1 us (1 KB) to 95.6 (1 MB) at 4, 7.5 (256 B) to 73.6 (256 KB) at 8; "
    "NCCL at 8 24.5 us up to 32 KB, 80 us at 1 MB; the fit is within 20 % of these",
)
NVLINK4 = Link(
    kind="nvlink4",
    peak=450e9,
    once_us=5.7,
    rank_us=0.1,
    once_rate=400e9,
    ring_us=15.0,
    ring_rank_us=0.5,
    ring_rate=350e9,
    source="fit to H100 TP6 one-shot 0.5 MB 13 us (vllm#24111), symmetric memory 2 KiB 9 us (sglang#10571), NCCL in a "
    "graph 19 to 23 us up to 128 KB",
)
NVLINK5 = Link(
    kind="nvlink5",
    peak=900e9,
    once_us=6.1,
    rank_us=0.1,
    once_rate=900e9,
    ring_us=15.0,
    ring_rank_us=0.5,
    ring_rate=700e9,
    source="fit to B300 TP8 one-stage 16 KiB 7, 256 KiB 9, 1 MiB 17 us (vllm#37756); ring: nvlink4's at twice the "
    "rate, not measured",
)
MEMORY = Link(
    kind="memory",
    peak=10e9,
    once_us=0.0,
    rank_us=1750.0,
    once_rate=1e9,
    ring_us=0.0,
    ring_rank_us=1750.0,
    ring_rate=1e9,
    source="gloo on two cores: 2, 7 and 28 ms at 2, 4 and 8 ranks; a rough middle",
)


def _rates(f32: float, bf16: float, fp8: float) -> Mapping[str, float]:
    """Matmul rates from TFLOP/s."""
    return MappingProxyType({"f32": f32 * 1e12, "bf16": bf16 * 1e12, "fp8_e4m3": fp8 * 1e12})


_GB202 = "RTX PRO 6000 Blackwell datasheet (GB202, 96 GB GDDR7, 503.8 bf16 TFLOP/s at 2,617 MHz)"
_GEFORCE = (
    "RTX Blackwell GPU Architecture whitepaper; GeForce halves the rate with fp32 accumulation; link as RTX PRO 6000, "
    "though GeForce drivers lack peer-to-peer access"
)
_BRIEF = "Blackwell Architecture Technical Brief, table of systems"

# Columns: name, arch, SMs, memory, read bandwidth, matmul rates, shared memory a block, L2, link, source
_ROWS = (
    Gpu("h100", "sm_90", 132, 79 * GIB, 3.35e12, _rates(67, 989, 1979), SM_90_SMEM, 50 * MIB, NVLINK4,
        "H100 SXM5 80 GB datasheet"),
    Gpu("h200", "sm_90", 132, 139 * GIB, 4.55e12, _rates(67, 989, 1979), SM_90_SMEM, 60 * MIB, NVLINK4,
        "H200 SXM datasheet (there 4.8 TB/s); reading 8 GiB through a plain Triton kernel gave 4,550 GB/s",
        measured=("sms", "read_bandwidth", "l2_bytes")),
    Gpu("b200", "sm_100", 148, 178 * GIB, 7.7e12, _rates(75, 2250, 4500), SM_90_SMEM, 126 * MIB, NVLINK5,
        f"{_BRIEF}: HGX B200, 180 GB"),
    Gpu("b300", "sm_103", 148, 267 * GIB, 8.0e12, _rates(75, 2250, 4500), SM_90_SMEM, 126 * MIB, NVLINK5,
        f"{_BRIEF}: HGX B300, 288 GB; SMs and L2 taken from B200"),
    Gpu("rtx-pro-6000", "sm_120", 188, 94 * GIB, 1.597e12, _rates(120, 480, 960), SM_120_SMEM, 128 * MIB, PCIE5,
        f"{_GB202}; Server Edition: memory at 12,481 MHz is 1,597 GB/s, matmul scaled by its 120 fp32 TFLOP/s"),
    Gpu("rtx-pro-6000-workstation", "sm_120", 188, 94 * GIB, 1.792e12, _rates(126, 503.8, 1007.6), SM_120_SMEM,
        128 * MIB, PCIE5, f"{_GB202}; seen under load: 1,711 GB/s, 386 bf16 TFLOP/s"),
    Gpu("rtx-pro-6000-max-q", "sm_120", 188, 94 * GIB, 1.792e12, _rates(110, 440, 880), SM_120_SMEM, 128 * MIB, PCIE5,
        f"{_GB202}; 300 W: matmul scaled by its 110 fp32 TFLOP/s; seen under load: 243 bf16 TFLOP/s"),
    Gpu("rtx-5090", "sm_120", 170, 31 * GIB, 1.792e12, _rates(104.8, 209.5, 419), SM_120_SMEM, 96 * MIB, PCIE5,
        _GEFORCE),
    Gpu("rtx-5070-ti", "sm_120", 70, 15 * GIB, 0.896e12, _rates(43.9, 87.9, 175.8), SM_120_SMEM, 48 * MIB, PCIE5,
        _GEFORCE),
    Gpu("cpu", "cpu", 1, 16 * GIB, 20e9, _rates(0.1, 0.1, 0.1), 0, 32 * MIB, MEMORY,
        "nominal: some small machine; a plan for cpu is run, its predicted times mean little"),
)  # fmt: skip

GPUS: Mapping[str, Gpu] = MappingProxyType({row.name: row for row in _ROWS})

# Microseconds from one dependent node of a CUDA graph to the next, by programs in the grid: plain, and with
# programmatic dependent launch. Measured on H200 (1,000 tiny Triton kernels in a graph); other GPUs are assumed alike
# (0.58 us a node was seen on sm_120, ahrefs/ocannl#488).
NODE_OVERHEAD_US = ((1, 0.81, 0.61), (64, 0.98, 0.70), (132, 1.21, 0.91), (512, 1.60, 1.27))


def gpu(name: str) -> Gpu:
    """The row of `name`. SpecError lists the names."""
    if name not in GPUS:
        raise SpecError(f"unknown GPU {name!r}{close_match(name, GPUS)}: known are {', '.join(GPUS)}")
    return GPUS[name]


def node_overhead_us(programs: int, programmatic: bool) -> float:
    """What a graph node costs besides its work: straight lines between the rows of NODE_OVERHEAD_US, level beyond."""
    column = 2 if programmatic else 1
    rows = NODE_OVERHEAD_US
    if programs <= rows[0][0]:
        return rows[0][column]
    for low, high in pairwise(rows):
        if programs <= high[0]:
            share = (programs - low[0]) / (high[0] - low[0])
            return low[column] + share * (high[column] - low[column])
    return rows[-1][column]


def allreduce_us(device: Gpu, ranks: int, nbytes: int) -> float:
    """Microseconds to all-reduce `nbytes` over `ranks` devices, by the better of the link's two ways."""
    if ranks == 1:
        return 0.0
    link = device.link
    once = link.once_us + ranks * link.rank_us + (ranks - 1) * nbytes / link.once_rate * 1e6
    ring = link.ring_us + ranks * link.ring_rank_us + 2 * (ranks - 1) / ranks * nbytes / link.ring_rate * 1e6
    return min(once, ring)


def close_match(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the end of an error's first clause, or nothing if no known name is near."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


CGROUP_FILE = Path("/sys/fs/cgroup/memory.max")


def host_memory() -> int:
    """Bytes of this host's RAM, or the container's limit where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = CGROUP_FILE.read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
