"""What a bug report says of a machine: true line by line, and nothing private."""

import getpass
import os
import re
import socket
import sys
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from lib.core.files import ROOT
from lib.lessons.start import environment as er

LAPTOP = er.Machine("Linux")
ONE_GPU = er.Machine("Linux", gpus=("Tesla T4",))
TWO_GPUS = er.Machine("Linux", gpus=("Tesla T4", "Tesla T4"))
MACBOOK = er.Machine("Darwin", has_mps=True, has_triton=False, has_compiler=False)
WINDOWS = er.Machine("Windows", gpus=("Tesla T4",), has_triton=False, has_compiler=False)


def facts(text: str) -> dict[str, str]:
    pairs = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in text.splitlines())
    assert len(pairs) == len(text.splitlines())
    return pairs


def test_a_report_has_this_machine_and_every_requirement_and_nothing_private(monkeypatch):
    monkeypatch.setenv("USER", "ada-lovelace")
    monkeypatch.setattr("platform.release", lambda: "6.1.0-ada-lovelace+")
    text = er.environment_report()
    found = facts(text)
    assert found["Python"].startswith(".".join(map(str, sys.version_info[:3])) + " (")
    assert found["system"].startswith(os.uname().sysname)
    assert f" of {psutil.cpu_count()} cores" in found["processor"]
    names = re.findall(r"^([A-Za-z][\w-]*)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert found["torch"] == metadata.version("torch")
    assert found.keys() >= {*names}
    for word in (str(Path.home()), str(ROOT), sys.prefix, "ada-lovelace"):
        assert word not in text or word == "/"
    for name in (getpass.getuser(), socket.gethostname()):
        # a short name, such as root, is also a part of other words
        assert len(name) < 5 or name not in text


def test_missing_packages_and_gpus_are_named_and_the_report_is_folded(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(er, "this_machine", lambda: MACBOOK)
    found = facts(er.environment_report())
    assert (found["numba"], found["compiler"]) == ("missing", "no C++ compiler found")
    assert found["GPU"] == "Apple's, through MPS"
    monkeypatch.setattr(er, "this_machine", lambda: TWO_GPUS)
    assert facts(er.environment_report())["GPU"] == "Tesla T4, Tesla T4"
    monkeypatch.setattr(er, "environment_report", lambda: "compiler  a<b>&c")
    assert "<pre>compiler  a&lt;b&gt;&amp;c</pre></details>" in er.show_report().data


@pytest.mark.parametrize(
    ("machine", "part", "expected"),
    [
        (LAPTOP, "model", "on the processor"),
        (LAPTOP, "kernels in Triton", "interpreter"),
        (LAPTOP, "data parallelism", "several GPUs are shown from recorded results"),
        (ONE_GPU, "model", "Tesla T4"),
        (ONE_GPU, "kernels in Triton", "here"),
        (ONE_GPU, "data parallelism", "several GPUs are shown"),
        (ONE_GPU, "speedrun", "20 minutes"),
        (TWO_GPUS, "data parallelism", "here, on 2 GPUs with NCCL"),
        (MACBOOK, "model", "Apple's GPU"),
        (MACBOOK, "kernels in Triton", "no Triton for Darwin"),
        (MACBOOK, "torch.compile", "needs a C++ compiler"),
        (WINDOWS, "torch.compile", "not here: Triton is not installed"),
        (WINDOWS, "kernels in Triton", "not here: Triton is not installed"),
        (er.Machine("Linux", has_numba=False), "tokenizer", "Numba is missing"),
    ],
)
def test_what_runs_follows_from_the_machine(machine, part, expected):
    (how,) = [row["runs"] for row in er.what_runs_here(machine) if row["part"].startswith(part)]
    assert expected in how


def test_each_notebook_is_in_the_table():
    numbers = {path.name[:2] for path in (ROOT / "notebooks").glob("0[1-9]_*.ipynb")}
    listed = {n for row in er.what_runs_here(LAPTOP) for n in row["notebook"].split(", ")}
    assert numbers <= listed


def test_the_committed_report_is_of_committed_code():
    notebook = (ROOT / "notebooks/00_start_here.ipynb").read_text(encoding="utf-8")
    assert "<pre>workbook " in notebook
    assert "with changes in lib/" not in notebook
