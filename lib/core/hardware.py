"""The machine: its device, a fast dtype, its peak rates, and its processors.

torch is imported only inside the functions that need it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch

# Freed bytes that a process keeps with `keep_freed_memory`, and the largest size above which glibc
# takes memory from the system for one tensor alone.
MOST_KEPT = 1 << 30
LARGEST_OFF_HEAP = 32 << 20
# Kernels in Triton can be compiled; PyTorch for Windows and for CPUs comes without it.
HAS_TRITON = importlib.util.find_spec("triton") is not None
# C++ compilers, one of which `torch.compile` calls for a CPU.
COMPILERS = ("c++", "g++", "clang++")
# Names that `pick_dtype` takes.
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Job = TypeVar("Job")
Result = TypeVar("Result")


def pick_device(name: str = "auto") -> torch.device:
    """Return the device called `name`; "auto" prefers CUDA, then Apple's MPS, then the CPU.

    Raises:
        ValueError: `name` is not a device, or this machine does not have it.
    """
    import torch

    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        known = "auto, cpu, cuda, cuda:N or mps"
        raise ValueError(f"device must be {known}, got {name!r}") from error
    counts = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    if (device.index or 0) >= counts.get(device.type, 0):
        gpus = [f"cuda:{index}" for index in range(counts["cuda"])]
        found = ", ".join(["auto", "cpu", *gpus, *["mps"] * counts["mps"]])
        raise ValueError(
            f"device must be one of {found} on this machine, got {name!r}; torch "
            f"{torch.__version__} sees no other"
        )
    return device


def pick_dtype(device: torch.device | str, name: str = "auto") -> torch.dtype:
    """Return the floating-point type called `name`; "auto" takes the shortest fast one on `device`.

    That is bfloat16 on NVIDIA GPUs from Ampere on (compute capability 8.0), float16 on older ones
    such as a T4, and float32 elsewhere.

    Raises:
        ValueError: `name` is unknown, or `device` would only emulate it.
    """
    import torch

    device = torch.device(device)
    supported = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    best = "float32"
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
        best = "bfloat16" if has_bfloat16 else "float16"
        if not has_bfloat16:
            del supported["bfloat16"]
    if name == "auto":
        return supported[best]
    if name not in supported:
        chip = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        known = ", ".join(supported)
        raise ValueError(f"dtype must be one of auto, {known} on {chip}, got {name!r}")
    return supported[name]


def runs_triton(device: torch.device) -> bool:
    """Whether Triton is installed, and runs on `device`: a GPU, or a CPU in its interpreter."""
    return HAS_TRITON and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def check_compiler(asked: str, device: torch.device) -> None:
    """Raise ValueError where `torch.compile`, which `asked` needs, has no compiler for `device`."""
    if device.type == "cuda" and not HAS_TRITON:
        raise ValueError(f"{asked} needs Triton on a CUDA GPU, and it is not installed")
    if device.type == "cpu" and not any(map(shutil.which, COMPILERS)):
        known = ", ".join(COMPILERS)
        raise ValueError(f"{asked} needs a C++ compiler on a CPU, and none of {known} is installed")


@dataclass(frozen=True)
class Peak:
    """The peak rates of a chip by its datasheet; None for a dtype that it does not quote.

    FLOP/s count a multiply-add as two, dense (no structured sparsity), half precision with float32
    accumulation on tensor cores where the chip has them. Bandwidth is bytes/s of device memory.
    """

    bfloat16: float | None
    float16: float | None
    tf32: float | None
    float32: float | None
    bandwidth: float


def _peak(bfloat16, float16, tf32, float32, bandwidth) -> Peak:
    """Convert from the datasheets' units, TFLOP/s and GB/s."""
    tflops = (bfloat16, float16, tf32, float32)
    return Peak(*(rate and rate * 1e12 for rate in tflops), bandwidth * 1e9)  # type: ignore[call-arg]


# From NVIDIA's datasheets and architecture white papers; sparse figures are halved. Keys are the
# names that CUDA reports, without "NVIDIA", "Tesla" and "GeForce". The whole name must match: a
# laptop chip, a MIG slice or a D variant is a different chip.
PEAKS = {
    # a B200 of an HGX board, 1,000 W, in NVIDIA's Blackwell datasheet
    "B200": _peak(2250, 2250, 1100, 75, 7700),
    "H200": _peak(989.4, 989.4, 494.7, 66.9, 4800),
    "H200 NVL": _peak(835, 835, 417.5, 60, 4800),
    "H100 80GB HBM3": _peak(989.4, 989.4, 494.7, 66.9, 3350),
    "H100 NVL": _peak(835, 835, 417.5, 60, 3900),
    "H100 PCIe": _peak(756, 756, 378, 51, 2000),
    "A100-SXM4-80GB": _peak(312, 312, 156, 19.5, 2039),
    "A100-SXM4-40GB": _peak(312, 312, 156, 19.5, 1555),
    "A100 80GB PCIe": _peak(312, 312, 156, 19.5, 1935),
    "A100-PCIE-40GB": _peak(312, 312, 156, 19.5, 1555),
    "L40S": _peak(362, 362, 183, 91.6, 864),
    "L4": _peak(121, 121, 60, 30.3, 300),
    "A10": _peak(125, 125, 62.5, 31.2, 600),
    "T4": _peak(None, 65, None, 8.1, 320),
    "V100-SXM2-16GB": _peak(None, 125, None, 15.7, 900),
    "V100-SXM2-32GB": _peak(None, 125, None, 15.7, 900),
    "V100-PCIE-16GB": _peak(None, 112, None, 14, 900),
    "P100-PCIE-16GB": _peak(None, 18.7, None, 9.3, 732),
    "RTX 5090": _peak(209.5, 209.5, 104.8, 104.8, 1792),
    "RTX 4090": _peak(165.2, 165.2, 82.6, 82.6, 1008),
    "RTX 3090": _peak(71, 71, 35.6, 35.6, 936),
}


class Gpu(NamedTuple):
    """A GPU by its datasheet; its rates are in `PEAKS`."""

    name: str
    """As CUDA reports it."""

    memory_gb: float
    link_gbs: float
    """GB/s in one direction to the other GPUs of its host."""

    @property
    def dtype(self) -> str:
        """The 16-bit dtype of its tensor cores."""
        return "bfloat16" if PEAKS[self.name].bfloat16 else "float16"

    @property
    def flops_per_s(self) -> float:
        return getattr(PEAKS[self.name], self.dtype)


# PCIe 3.0 and 4.0 with 16 lanes, and NVLink 3 to 5.
GPUS = {
    "T4": Gpu("T4", 16, 15.75),
    "L4": Gpu("L4", 24, 31.5),
    "4090": Gpu("RTX 4090", 24, 31.5),
    "A100": Gpu("A100-SXM4-80GB", 80, 300),
    "H100": Gpu("H100 80GB HBM3", 80, 450),
    "H200": Gpu("H200", 141, 450),
    "B200": Gpu("B200", 180, 900),
}


def peak(name: str) -> Peak | None:
    """Look up the datasheet rates of the chip that CUDA calls `name`; None if unknown."""
    return PEAKS.get(re.sub(r"^(NVIDIA |Tesla |GeForce )+", "", name))


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Look up the datasheet FLOP/s of the GPU `device` in `dtype`; None if unknown."""
    rates = peak(device_name(device)) if device.type == "cuda" else None
    return getattr(rates, str(dtype).removeprefix("torch.")) if rates else None


def available_cpus() -> int:
    """Count the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(
    executor: Executor, function: Callable[[Job], Result], jobs: Iterable[Job], ahead: int
) -> Iterator[Result]:
    """Like `executor.map`, but with at most `ahead` jobs and results in memory at a time."""
    pending = deque()
    for job in jobs:
        pending.append(executor.submit(function, job))
        if len(pending) >= ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def keep_freed_memory() -> None:
    """Keep the memory of freed large tensors in this process, for the next ones.

    By default glibc returns it to the system, and every page of the next large tensor costs a page
    fault: a tenth of a training step on a CPU. Does nothing with another C library.
    """
    import ctypes

    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, LARGEST_OFF_HEAP)
        mallopt(trim_threshold, MOST_KEPT)


def device_name(device: torch.device | str | None = None) -> str:
    """Name the chip of `device`; by default the GPU if torch is loaded and sees one, or the CPU."""
    torch = sys.modules.get("torch")
    if torch is None or (device is not None and torch.device(device).type != "cuda"):
        return cpu_name()
    if not torch.cuda.is_available():
        return cpu_name()
    return torch.cuda.get_device_name(device)


@functools.cache
def cpu_name() -> str:
    """Name the CPU's model, or its architecture where the system does not report one."""
    if platform.system() == "Darwin":
        name = output_of(["sysctl", "-n", "machdep.cpu.brand_string"])
    else:
        found = re.search(r"^Model name:\s*(.+)$", output_of(["lscpu"]) or "", re.MULTILINE)
        name = found and found[1]
    return name or platform.machine()


def local_results() -> Path:
    """The folder for results of this machine, which git ignores: `artifacts/local/nvidia-h200`."""
    name = re.sub(r"\((r|tm)\)", "", device_name().lower())
    return Path("artifacts/local", re.sub(r"[^a-z0-9]+", "-", name).strip("-"))


def output_of(command: list[str]) -> str | None:
    """Return what `command` prints, in English; None if it fails or is not installed."""
    # without GIT_DIR and the like, which a git hook sets for its own repository
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(command, env=env | {"LC_ALL": "C"}, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # names of files may have bytes that are no text
    return os.fsdecode(done.stdout).strip() if done.returncode == 0 else None
