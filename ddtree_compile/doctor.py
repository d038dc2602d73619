"""What this machine has and what will therefore work. `probe` looks, `judge` concludes, `examine` does both.

Nothing here needs an optional package: what is absent is a row with its remedy. A row is never an error.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from ddtree_compile import __version__, machine

Status = Literal["ok", "warn", "no"]

# Releases that the suite has run with: from the first, below the second (pyproject.toml says the same; a test compares)
TESTED = {"torch": ((2, 11), (2, 14)), "triton": ((3, 6), (3, 8)), "cuda-bindings": ((13, 0, 3), (14,))}
MIN_DRIVER = (580,)  # the first of CUDA 13, which cuda-bindings and torch's builds are for
GPU_ARCHES = tuple(dict.fromkeys(row.arch for row in machine.GPUS.values() if row.name != "cpu"))
PACKAGES = ("torch", "triton", "cuda-bindings", "tokenizers", "tiktoken")
ROOMY_MEMORY = 4 * machine.GIB  # torch and the embedded model fit

DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Device:
    """A CUDA device as torch reports it."""

    name: str
    arch: str
    memory_bytes: int
    sms: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What `probe` found. `packages` maps a distribution to its version; `driver` is the NVIDIA kernel module's."""

    python: str
    system: str
    cores: int
    memory_bytes: int
    packages: Mapping[str, str]
    torch_error: str | None = None
    torch_cuda: str | None = None  # the CUDA release torch was built for
    devices: tuple[Device, ...] = ()
    backends: tuple[str, ...] = ()  # of torch.distributed
    driver: str | None = None
    ptxas: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One line: what, how it stands, what was found, and why or what to do about it."""

    name: str
    status: Status
    found: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """`has`: what the machine has. `works`: what will work, in the order a user meets it."""

    has: tuple[Row, ...]
    works: tuple[Row, ...]
    version: str = __version__

    def to_dict(self) -> dict[str, Any]:
        """JSON types: {"version", "has": [{"name", "status", "found", "reason"}], "works": [the same]}."""
        return {
            "version": self.version,
            "has": [asdict(row) for row in self.has],
            "works": [asdict(row) for row in self.works],
        }


def examine() -> Report:
    """Look at this machine and say what will work on it."""
    return judge(probe())


def probe() -> Facts:
    """Ask Python, the kernel and torch; imports torch where there is one."""
    packages = {name: version for name in PACKAGES if (version := _version(name))}
    facts: dict[str, Any] = {}
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that torch needs is missing
        facts["torch_error"] = " ".join(str(error).split())
    else:
        facts["torch_cuda"] = torch.version.cuda
        facts["devices"] = _devices(torch)
        facts["backends"] = _backends(torch)
    return Facts(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=_cores(),
        memory_bytes=machine.host_memory(),
        packages=packages,
        driver=_driver(),
        ptxas=_has_ptxas(),
        **facts,
    )


def judge(facts: Facts) -> Report:
    """The rows that follow from `facts`, and nothing else: no look at the machine."""
    torch = _package(facts, "torch", "pip install -e . installs it")
    if facts.torch_error and "torch" in facts.packages:
        torch = Row("torch", "no", facts.packages["torch"], f"does not import: {facts.torch_error}")
    elif torch.status != "no":
        build = f"CUDA {facts.torch_cuda}" if facts.torch_cuda else "CPU build"
        torch = Row("torch", torch.status, f"{torch.found}, {build}", torch.reason)
    triton = _package(facts, "triton", "needed to build bundles: pip install 'triton>=3.6,<3.8' (Linux)")
    bindings = _package(facts, "cuda-bindings", "needed to run on a GPU: pip install -e '.[cuda]'")
    gpu, driver = _gpu(facts), _driver_row(facts)
    text = tuple(
        _package(facts, name, "needed to read text, token ids work without: pip install -e . installs it")
        for name in ("tokenizers", "tiktoken")
    )
    has = (_python(facts), _host(facts), torch, triton, gpu, driver, bindings, *text)
    works = (
        _plan(torch),
        _run_cpu(torch, text),
        _later(_build(facts, torch, triton)),
        _later(_run_gpu(torch, gpu, driver, bindings)),
        _later(_group(facts, torch)),
    )
    return Report(has, works)


def _python(facts: Facts) -> Row:
    supported = facts.python.startswith(("3.11.", "3.12."))
    reason = "" if supported else "tested on 3.11 and 3.12"
    return Row("Python", "ok" if supported else "warn", f"{facts.python}, {facts.system}", reason)


def _host(facts: Facts) -> Row:
    roomy = facts.memory_bytes >= ROOMY_MEMORY
    found = f"{facts.cores} cores, {_gib(facts.memory_bytes)}"
    return Row("host", "ok" if roomy else "warn", found, "" if roomy else f"less than {_gib(ROOMY_MEMORY)} is tight")


def _package(facts: Facts, name: str, remedy: str) -> Row:
    version = facts.packages.get(name)
    if version is None:
        return Row(name, "no", "not installed", remedy)
    if name in TESTED:
        first, beyond = TESTED[name]
        if not first <= _numbers(version) < beyond:
            return Row(name, "warn", version, f"tested from {_dotted(first)}, below {_dotted(beyond)}")
    return Row(name, "ok", version)


def _gpu(facts: Facts) -> Row:
    if not facts.devices:
        reason = "no CUDA device"
        if facts.torch_cuda is None and facts.driver:
            reason = "an NVIDIA driver is here, but this torch is a CPU build: install PyPI's torch"
        return Row("GPU", "no", "none", reason)
    kinds = dict.fromkeys(f"{device.name}, {_gib(device.memory_bytes)}, {device.arch}" for device in facts.devices)
    found = f"{len(facts.devices)} x {' and '.join(kinds)}"
    strangers = sorted({device.arch for device in facts.devices} - set(GPU_ARCHES))
    if strangers:
        return Row(
            "GPU", "no", found, f"no kernels for {', '.join(strangers)}: they are built for {', '.join(GPU_ARCHES)}"
        )
    return Row("GPU", "ok", found)


def _driver_row(facts: Facts) -> Row:
    if facts.driver is None:
        return Row("NVIDIA driver", "no", "none", "needed to run on a GPU")
    if _numbers(facts.driver) < MIN_DRIVER:
        return Row("NVIDIA driver", "no", facts.driver, f"update to {_dotted(MIN_DRIVER)} or later (CUDA 13)")
    return Row("NVIDIA driver", "ok", facts.driver)


def _plan(torch: Row) -> Row:
    return _needs("plan", "any model, for any GPU of the table", torch)


def _run_cpu(torch: Row, text: tuple[Row, ...]) -> Row:
    row = _needs("run on CPU", "in full, on small models", torch)
    lacking = [reader.name for reader in text if reader.status == "no"]
    if row.status != "no" and lacking:
        return Row(row.name, "warn", "token ids only for some models", f"{' and '.join(lacking)} missing")
    return row


def _build(facts: Facts, torch: Row, triton: Row) -> Row:
    row = _needs("build", f"bundles for {', '.join(GPU_ARCHES)}, no GPU needed", torch, triton)
    if row.status != "no" and not facts.ptxas:
        return Row("build", "no", "", "triton lacks its ptxas: reinstall it from its wheel")
    return row


def _run_gpu(torch: Row, gpu: Row, driver: Row, bindings: Row) -> Row:
    return _needs("run on GPU", gpu.found, torch, gpu, driver, bindings)


def _group(facts: Facts, torch: Row) -> Row:
    row = _needs("group", "", torch)
    if row.status == "no":
        return row
    if len(facts.devices) > 1 and "nccl" in facts.backends:
        return Row("group", "ok", f"{len(facts.devices)} GPUs over NCCL; processes on the CPU over gloo")
    if "gloo" not in facts.backends:
        return Row("group", "no", "", "this torch has no torch.distributed with gloo")
    return Row("group", "ok", "processes on the CPU over gloo", "NCCL needs two GPUs")


def _later(row: Row) -> Row:
    """A capability that this version does not have yet: whether the machine is ready for it."""
    if row.status == "no":
        return Row(row.name, "no", "", f"not in version {__version__}, and this machine is not ready: {row.reason}")
    ready = f"this machine is ready{f' ({row.reason})' if row.reason else ''}: {row.found}"
    return Row(row.name, "no", "", f"not in version {__version__}; {ready}")


def _needs(name: str, found: str, *rows: Row) -> Row:
    """`name` works if every one of `rows` does; the first that does not is the reason."""
    for row in rows:
        if row.status == "no":
            return Row(name, "no", "", f"{row.name}: {row.reason}")
    doubtful = [row.name for row in rows if row.status == "warn"]
    return Row(name, "warn" if doubtful else "ok", found, f"untested: {', '.join(doubtful)}" if doubtful else "")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _devices(torch: Any) -> tuple[Device, ...]:
    if not torch.cuda.is_available():
        return ()
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(
        Device(each.name, f"sm_{each.major}{each.minor}", each.total_memory, each.multi_processor_count)
        for each in found
    )


def _backends(torch: Any) -> tuple[str, ...]:
    if not torch.distributed.is_available():
        return ()
    present = {"gloo": torch.distributed.is_gloo_available, "nccl": torch.distributed.is_nccl_available}
    return tuple(name for name, is_present in present.items() if is_present())


def _driver() -> str | None:
    try:
        text = DRIVER_FILE.read_text()
    except OSError:
        return None
    match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return match.group() if match else None


def _has_ptxas() -> bool:
    package = util.find_spec("triton")
    if package is None or package.origin is None:
        return False
    return (Path(package.origin).parent / "backends" / "nvidia" / "bin" / "ptxas").is_file()


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu gives (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _gib(nbytes: int) -> str:
    return f"{nbytes / machine.GIB:.1f} GiB"
