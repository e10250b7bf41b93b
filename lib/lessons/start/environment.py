"""The facts about this machine that a bug report needs, and which parts of the workbook run on it.

The report holds nothing private: no user name, host name or folder.
"""

from __future__ import annotations

import html
import os
import platform
import re
import shutil
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from lib.core.files import ROOT
from lib.core.hardware import output_of
from lib.core.records import provenance

if TYPE_CHECKING:
    from IPython.display import HTML


@dataclass(frozen=True)
class Machine:
    """The properties that decide which parts of the workbook run here."""

    system: str
    """`Linux`, `Darwin` or `Windows`."""

    gpus: tuple[str, ...] = ()
    """The names of the CUDA GPUs that torch sees."""

    has_mps: bool = False
    """Whether torch can use an Apple GPU."""

    has_numba: bool = True
    has_triton: bool = True
    has_compiler: bool = True
    """Whether there is a C++ compiler, which torch.compile calls."""


def this_machine() -> Machine:
    """Describe the machine that this process runs on. Imports torch."""
    import torch

    compilers = filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++"))
    return Machine(
        platform.system(),
        gpus=tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))),
        has_mps=torch.backends.mps.is_available(),
        has_numba=_version("numba") is not None,
        has_triton=_version("triton") is not None,
        has_compiler=any(map(shutil.which, compilers)),
    )


def environment_report() -> str:
    """The machine and the installed packages as plain text to paste, one fact per line.

    Imports torch. A package that is not installed is listed as missing.
    """
    import torch

    machine, made = this_machine(), provenance()
    driver = output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    lines = {
        "workbook": (made["commit"] or "not in a git checkout")
        + (", with changes in lib/" if made["dirty"] else ""),
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        # not the kernel's name, which may hold that of its builder
        "system": f"{platform.system()}, {platform.machine()}",
        "processor": f"{made['cpu']}, {made['cores']} of {os.cpu_count()} cores for this process",
        "compiler": "found" if machine.has_compiler else "no C++ compiler found",
        "CUDA": f"{torch.version.cuda or 'not in this PyTorch'}, driver {driver or 'not found'}",
        "GPU": ", ".join(machine.gpus) or ("Apple's, through MPS" if machine.has_mps else "none"),
        "threads": f"{torch.get_num_threads()} of PyTorch",
    }
    path = ROOT / "requirements.txt"
    # which is not part of a Kaggle bundle
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for name in sorted(re.findall(r"^[A-Za-z][\w.-]*", text, re.MULTILINE)):
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
        models = f"here, on {machine.gpus[0]}"
        profiles, speedrun = "here", "here, 20 minutes"
        compiled = triton = "here" if machine.has_triton else "not here: Triton is not installed"
    else:
        device = "Apple's GPU" if machine.has_mps else "the processor"
        models = f"here, on {device}; a model of a size that suits it"
        compiled = "not here: it needs a C++ compiler"
        if machine.has_compiler:
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
        ("torch.compile", "12", compiled),
        ("profiles of a GPU", "04", profiles),
        ("kernels in Triton", "05, 06, 07", triton),
        ("data parallelism, sharding", "08, 09, 10", parallel),
        ("speedrun", "12", speedrun),
    ]
    return [dict(zip(("part", "notebook", "runs"), row)) for row in rows]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
