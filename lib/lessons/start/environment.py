"""The facts about this machine that a bug report needs, and which parts of the workbook run on it.

The report holds nothing private: no user name, host name or folder.
"""

from __future__ import annotations

import html
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from lib.core.files import ROOT
from lib.core.hardware import available_cpus, cpu_name
from lib.core.records import provenance

if TYPE_CHECKING:
    from IPython.display import HTML

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One CUDA GPU as torch sees it."""

    name: str
    memory_gib: float
    capability: str


@dataclass(frozen=True)
class Machine:
    """The properties that decide which parts of the workbook run here."""

    system: str
    """`Linux`, `Darwin` or `Windows`."""

    gpus: tuple[Gpu, ...] = ()
    has_mps: bool = False
    """Whether torch can use an Apple GPU."""

    has_numba: bool = True
    has_triton: bool = True
    compiler: str | None = None
    """The first line of what the C++ compiler's --version prints."""


def this_machine() -> Machine:
    """Describe the machine that this process runs on. Imports torch."""
    import torch

    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    gpus = (Gpu(gpu.name, gpu.total_memory / GIB, f"{gpu.major}{gpu.minor}") for gpu in found)
    return Machine(
        platform.system(),
        gpus=tuple(gpus),
        has_mps=torch.backends.mps.is_available(),
        has_numba=_version("numba") is not None,
        has_triton=_version("triton") is not None,
        compiler=compiler(),
    )


def environment_report() -> str:
    """The machine and the installed packages as plain text to paste, one fact per line.

    Imports torch. A package that is not installed is listed as missing.
    """
    import torch

    machine, made = this_machine(), provenance()
    driver = _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    lines = {
        "workbook": (made["commit"] or "not in a git checkout")
        + (", with changes in lib/" if made["dirty"] else ""),
        "Python": f"{platform.python_version()} ({platform.python_implementation()}), "
        + _environment_kind(),
        "system": f"{platform.system()} {_release()}, {platform.machine()}",
        "processor": f"{cpu_name()}, {available_cpus()} of {os.cpu_count()} cores for this process",
        "memory": _memory(),
        "compiler": machine.compiler or "no C++ compiler found",
        "CUDA": f"{torch.version.cuda or 'not in this PyTorch'}, driver {driver or 'not found'}",
    }
    for number, gpu in enumerate(machine.gpus):
        lines[f"GPU {number}"] = f"{gpu.name}, {gpu.memory_gib:.1f} GiB, sm_{gpu.capability}"
    if not machine.gpus:
        lines["GPU"] = "Apple's, through MPS" if machine.has_mps else "none that PyTorch can use"
    lines["device"] = "cuda" if machine.gpus else "mps" if machine.has_mps else "cpu"
    lines["threads"] = f"{torch.get_num_threads()} of PyTorch"
    for name in sorted(requirements()):
        lines[name] = _version(name) or "missing"
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def show_report() -> HTML:
    """`environment_report` to unfold and to copy."""
    from IPython.display import HTML

    report = html.escape(environment_report())
    return HTML(f"<details><summary>Versions and sizes</summary><pre>{report}</pre></details>")


def what_runs_here(machine: Machine) -> list[dict[str, str]]:
    """Return the rows of a table: how each part of the workbook runs on `machine`."""
    if machine.gpus:
        models = f"here, on {machine.gpus[0].name}"
        profiles, speedrun = "here", "here, 20 minutes"
        compiled = triton = "here" if machine.has_triton else "not here: Triton is not installed"
    else:
        device = "Apple's GPU" if machine.has_mps else "the processor"
        models = f"here, on {device}; a model of a size that suits it"
        compiled = "not here: it needs a C++ compiler"
        if machine.compiler:
            compiled = "here, where a parameter asks for it"
        profiles = "shown from recorded results"
        triton = f"shown from recorded results: there is no Triton for {machine.system}"
        if machine.has_triton:
            triton = "here, in Triton's slow interpreter; speed is shown from recorded results"
        speedrun = "here, in a minute"

    tokenizer = "here, compiled by Numba"
    if not machine.has_numba:
        tokenizer = "here, in plain Python: slowly, since Numba is missing"
    parallel = f"here, on {len(machine.gpus)} GPUs with NCCL"
    if len(machine.gpus) < 2:
        host = "GPU's host" if machine.gpus else "processor"
        parallel = f"here, in processes that share the {host}; "
        parallel += "several GPUs are shown from recorded results"

    rows = [
        ("tokenizer", "01", tokenizer),
        ("model and training", "02, 03", models),
        ("torch.compile", "10", compiled),
        ("profiles of a GPU", "04", profiles),
        ("kernels in Triton", "05, 06", triton),
        ("data parallelism, sharding", "07, 08, 09", parallel),
        ("speedrun", "10", speedrun),
    ]
    return [dict(zip(("part", "notebook", "runs"), row)) for row in rows]


def requirements() -> list[str]:
    """The names of the packages in requirements.txt, which is not part of a Kaggle bundle."""
    path = ROOT / "requirements.txt"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return re.findall(r"^[A-Za-z][\w.-]*", text, re.MULTILINE)


def compiler() -> str | None:
    """Name and version of the C++ compiler that torch.compile would call; None without one."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")):
        program = shutil.which(name)
        if program and (text := _first_line([program, "--version"])):
            # some print the path that they were called by, which may hold a user's name
            path, _, rest = text.partition(" ")
            return f"{Path(path).name} {rest}"
    return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _environment_kind() -> str:
    """The kind of environment that holds this Python's packages, without its path."""
    if os.environ.get("KAGGLE_KERNEL_RUN_TYPE"):
        return "Kaggle's image"
    if os.environ.get("COLAB_RELEASE_TAG"):
        return "Colab's image"
    if sys.prefix != sys.base_prefix:
        return "virtual environment"
    return "conda environment" if os.environ.get("CONDA_PREFIX") else "no virtual environment"


def _release() -> str:
    """The system's version: numbers only, since a kernel's name may hold that of its builder."""
    if platform.system() == "Darwin":
        return platform.mac_ver()[0]
    number = re.match(r"[\d.]*\d", platform.release())
    library = " ".join(platform.libc_ver()).strip()
    return (number[0] if number else "") + (f" with {library}" if library else "")


def _memory() -> str:
    """The machine's memory, and the container's limit where that is lower."""
    if not hasattr(os, "sysconf"):
        return "not known"
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = memory_limit()
    text = f"{total / GIB:.1f} GiB"
    return f"{text}, at most {limit / GIB:.1f} GiB for this container" if limit < total else text


def memory_limit(root: Path = Path("/sys/fs/cgroup")) -> float:
    """The bytes that Linux lets this container use; infinity without a limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = root / name
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            return int(text)
    return float("inf")


def _first_line(command: list[str]) -> str | None:
    """The first line that `command` prints; None if it fails or is not installed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else None
