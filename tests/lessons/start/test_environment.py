"""What a bug report says of a machine: true line by line, and nothing private."""

import getpass
import math
import os
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import torch

from lib.core.files import ROOT
from lib.lessons.start import environment as er

T4 = er.Gpu("Tesla T4", 14.6, "75")
LAPTOP = er.Machine("Linux", compiler="g++ 12")
ONE_GPU = er.Machine("Linux", gpus=(T4,), compiler="g++ 12")
TWO_GPUS = er.Machine("Linux", gpus=(T4, T4), compiler="g++ 12")
MACBOOK = er.Machine("Darwin", has_mps=True, has_triton=False)
WINDOWS = er.Machine("Windows", gpus=(T4,), has_triton=False)


@pytest.fixture(scope="module")
def facts() -> dict[str, str]:
    lines = er.environment_report().splitlines()
    pairs = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in lines)
    assert len(pairs) == len(lines)
    return pairs


def test_python_and_system_are_those_of_this_process(facts):
    assert facts["Python"].startswith(".".join(map(str, sys.version_info[:3])) + " (")
    assert ("virtual environment" in facts["Python"]) == (sys.prefix != sys.base_prefix) or (
        "image" in facts["Python"]
    )
    assert facts["system"].split()[0] == os.uname().sysname
    assert facts["system"].endswith(os.uname().machine)


def test_memory_and_cores_agree_with_another_library(facts):
    total = float(re.match(r"[\d.]+", facts["memory"])[0])
    assert total == pytest.approx(psutil.virtual_memory().total / 2**30, rel=0.02)
    count = len(psutil.Process().cpu_affinity()) if sys.platform == "linux" else os.cpu_count()
    assert f", {count} of {psutil.cpu_count()} cores" in facts["processor"]


def test_every_requirement_is_listed_with_its_version(facts):
    text = (ROOT / "requirements.txt").read_text()
    names = re.findall(r"^([A-Za-z][\w-]*)", text, re.MULTILINE)
    assert "torch" in names
    assert facts["torch"] == metadata.version("torch")
    assert facts.keys() >= {*names}


def test_gpus_are_those_that_torch_sees(facts):
    assert sum(bool(re.fullmatch(r"GPU \d+", name)) for name in facts) == torch.cuda.device_count()


def test_the_commit_is_that_of_this_checkout(facts):
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        assert facts["workbook"] == "not in a git checkout"
    else:
        assert facts["workbook"].split(",")[0] == done.stdout.strip()


def test_nothing_private_is_told(monkeypatch, tmp_path):
    # a compiler in somebody's home folder, called by its path, which some print
    program = tmp_path / "home/ada/bin/mycc"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$0 (Ada) 1.0"\n')
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setenv("USER", "ada-lovelace")
    monkeypatch.setattr("platform.release", lambda: "6.1.0-ada-lovelace+")
    text = er.environment_report()
    assert "mycc (Ada) 1.0" in text
    for word in (str(tmp_path), str(Path.home()), str(ROOT), sys.prefix, "ada-lovelace"):
        assert word not in text or word == "/"
    for name in (getpass.getuser(), socket.gethostname()):
        # a short name, such as root, is also a part of other words
        assert len(name) < 5 or name not in text


def test_a_missing_package_and_compiler_are_named(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr("shutil.which", lambda name: None)
    lines = er.environment_report().splitlines()
    assert any(line.split() == ["numba", "missing"] for line in lines)
    assert any(line.endswith("no C++ compiler found") for line in lines)


def test_the_report_is_folded_and_whole(monkeypatch):
    monkeypatch.setattr(er, "environment_report", lambda: "compiler  a<b>&c")
    assert er.show_report().data.startswith("<details><summary>")
    assert "<pre>compiler  a&lt;b&gt;&amp;c</pre></details>" in er.show_report().data


def test_gpus_have_a_line_each(monkeypatch):
    monkeypatch.setattr(er, "this_machine", lambda: TWO_GPUS)
    text = er.environment_report()
    assert re.search(r"^GPU 1 +Tesla T4, 14.6 GiB, sm_75$", text, re.MULTILINE)
    assert re.search(r"^device +cuda$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "expected"), [("max\n", math.inf), ("1073741824\n", 2**30), (None, math.inf)]
)
def test_the_limit_of_a_container_is_read(tmp_path, text, expected):
    if text is not None:
        (tmp_path / "memory.max").write_text(text)
    assert er.memory_limit(tmp_path) == expected


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
