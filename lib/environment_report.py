"""What a bug report needs to know of this machine, and what of the workbook runs on it.

Nothing private is in it: no name of a user or a host, no folder.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from lib.hardware import ROOT, cpu_name, provenance
from lib.parallel import available_cpus

GIGA = 2**30
# Packages that change what runs here, or how fast; the rest follows from requirements.txt.
EXTRAS = ("ipykernel", "jupyterlab")


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch sees it."""

    name: str
    memory_gib: float
    capability: str


@dataclass(frozen=True)
class Machine:
    """What decides which parts of the workbook run here."""

    system: str
    """`Linux`, `Darwin` or `Windows`."""

    gpus: tuple[Gpu, ...] = ()
    """Those of CUDA."""

    has_mps: bool = False
    """Whether there is a GPU of Apple that torch uses."""

    has_numba: bool = True
    has_triton: bool = True
    compiler: str | None = None
    """The C++ compiler's first line."""


def this_machine() -> Machine:
    """The machine that this process runs on. Imports torch."""
    import torch

    return Machine(
        platform.system(),
        gpus=_gpus(torch),
        has_mps=torch.backends.mps.is_available(),
        has_numba=_version("numba") is not None,
        has_triton=_version("triton") is not None,
        compiler=compiler(),
    )


def environment_report() -> str:
    """The machine and what is installed, one fact a line, as plain text to paste.

    Imports torch. A package that is missing is named as such.
    """
    import torch

    machine, made = this_machine(), provenance()
    lines = {
        "workbook": _commit(made),
        "Python": f"{platform.python_version()} ({platform.python_implementation()}), {_place()}",
        "system": f"{platform.system()} {_release()}, {platform.machine()}",
        "processor": f"{cpu_name()}, {available_cpus()} of {os.cpu_count()} cores for this process",
        "memory": _memory(),
        "compiler": machine.compiler or "no C++ compiler found",
        "CUDA": f"{torch.version.cuda or 'not in this PyTorch'}, driver {_driver() or 'not found'}",
    }
    for number, gpu in enumerate(machine.gpus):
        lines[f"GPU {number}"] = f"{gpu.name}, {gpu.memory_gib:.1f} GiB, sm_{gpu.capability}"
    if not machine.gpus:
        lines["GPU"] = "Apple's, through MPS" if machine.has_mps else "none that PyTorch can use"
    lines["device"] = "cuda" if machine.gpus else "mps" if machine.has_mps else "cpu"
    lines["threads"] = f"{torch.get_num_threads()} of PyTorch"
    versions = {name: _version(name) or "missing" for name in (*requirements(), *EXTRAS)}
    lines |= dict(sorted(versions.items()))
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def what_runs_here(machine: Machine) -> list[dict[str, str]]:
    """For each part of the workbook how it runs on `machine`: rows of a table."""
    several, one = len(machine.gpus) > 1, bool(machine.gpus)
    device = machine.gpus[0].name if one else "Apple's GPU" if machine.has_mps else "the processor"
    rows = {
        ("tokenizer", "01"): "here, compiled by Numba"
        if machine.has_numba
        else "here, in plain Python: slowly, since Numba is missing",
        ("model and training", "02, 03"): f"here, on {device}"
        + ("" if one else "; a model of a size that suits it"),
        ("torch.compile", "04, 08"): _compile(machine),
        ("profiles of a GPU", "04"): "here" if one else "shown from recorded results",
        ("attention kernels in Triton", "05"): _triton(machine),
        ("data parallelism, ZeRO-1", "06, 07"): f"here, on {len(machine.gpus)} GPUs with NCCL"
        if several
        else "here, in processes that share the "
        + ("GPU's host" if one else "processor")
        + "; several GPUs are shown from recorded results",
        ("speedrun", "08"): "here, 20 minutes" if one else "here, in a minute",
    }
    return [{"part": part, "notebook": nb, "runs": how} for (part, nb), how in rows.items()]


def _compile(machine: Machine) -> str:
    if machine.gpus:
        return "here"
    if machine.compiler:
        return "here, where a parameter asks for it"
    return "not here: it needs a C++ compiler"


def _triton(machine: Machine) -> str:
    if machine.gpus:
        return "here"
    if machine.has_triton:
        return "here, in Triton's slow interpreter; speed is shown from recorded results"
    return f"shown from recorded results: there is no Triton for {machine.system}"


def requirements(path: Path = ROOT / "requirements.txt") -> list[str]:
    """The names of the packages that the workbook asks for."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [found[0] for line in lines if (found := re.match(r"[A-Za-z][\w.-]*", line))]


def compiler() -> str | None:
    """Name and version of the C++ compiler that torch.compile would call; None without."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")):
        program = shutil.which(name)
        if program and (text := _first_line([program, "--version"])):
            # some put the path that they were called by in front
            return Path(text.split()[0]).name + text[len(text.split()[0]) :]
    return None


def _gpus(torch: Any) -> tuple[Gpu, ...]:
    found = []
    for index in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(index)
        found.append(Gpu(of.name, of.total_memory / GIGA, f"{of.major}{of.minor}"))
    return tuple(found)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit(made: Mapping[str, Any]) -> str:
    if made["commit"] is None:
        return "not in a git checkout"
    return made["commit"] + (", with changes in lib/" if made["dirty"] else "")


def _place() -> str:
    """The kind of place that this Python's packages are in, without its path."""
    if os.environ.get("KAGGLE_KERNEL_RUN_TYPE"):
        return "Kaggle's image"
    if os.environ.get("COLAB_RELEASE_TAG"):
        return "Colab's image"
    if sys.prefix != sys.base_prefix:
        return "virtual environment"
    return "conda environment" if os.environ.get("CONDA_PREFIX") else "no virtual environment"


def _release() -> str:
    """The system's version; numbers only, since a kernel may carry the name of who built it."""
    if platform.system() == "Darwin":
        return platform.mac_ver()[0]
    number = re.match(r"[\d.]*\d", platform.release())
    library = " ".join(platform.libc_ver()).strip()
    return (number[0] if number else "") + (f" with {library}" if library else "")


def _memory() -> str:
    """What the machine has, and what this process may take of it where that is less."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return "not known"
    limit = memory_limit()
    text = f"{total / GIGA:.1f} GiB"
    return f"{text}, at most {limit / GIGA:.1f} GiB for this container" if limit < total else text


def memory_limit(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes that Linux lets this container use; infinity where it has no limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = root / name
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            return int(text)
    return float("inf")


def _driver() -> str | None:
    return _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])


def _first_line(command: list[str]) -> str | None:
    """The first line that `command` prints; None when it fails or is not installed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None
