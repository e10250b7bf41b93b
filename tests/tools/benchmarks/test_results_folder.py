"""Where results go by default: into a folder of the machine's own, which git ignores."""

import shutil
import subprocess
from pathlib import Path

import pytest

from lib.__main__ import COMMANDS, config_of, load, main
from lib.core import hardware
from lib.core.files import ROOT
from lib.tools.benchmarks import attention

# They fill README.md, and the cache of tuned tiles outside of the repository.
WITHOUT_RESULTS = {"benchmark headline", "benchmark tune-attention"}
SMALL = "--kernels sdpa vectorized_torch --custom_tiers 16:16 --tokens 16 --samples 3"


def git(folder, *arguments):
    done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True)
    return done.stdout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with the committed results, as working folder."""
    shutil.copy(ROOT / ".gitignore", tmp_path)
    shutil.copytree(ROOT / "artifacts", tmp_path / "artifacts", ignore=_all_but_attention)
    git(tmp_path, "init")
    git(tmp_path, "add", "--all")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _all_but_attention(folder, names):
    return [n for n in names if not n.startswith("attention_sweep") or Path(folder, n).is_dir()]


def test_by_default_results_lie_where_git_ignores_them(repository):
    names = [name for name in COMMANDS if name.split()[0] in ("benchmark", "profile", "roofline")]
    for name in set(names) - WITHOUT_RESULTS:
        output = config_of(load(COMMANDS[name].function))().output
        assert git(repository, "check-ignore", str(output / "results.md")), (name, output)


def test_the_folder_is_named_after_the_device(monkeypatch):
    names = {
        "NVIDIA H200": "nvidia-h200",
        "Intel(R) Xeon(R) CPU @ 2.20GHz": "intel-xeon-cpu-2-20ghz",
    }
    for name, folder in names.items():
        monkeypatch.setattr(hardware, "device_name", lambda name=name: name)
        assert hardware.local_results() == Path("artifacts/local", folder)


def changes(repository):
    """What `git status` says beyond what was added at first."""
    lines = git(repository, "status", "--porcelain").splitlines()
    return [line for line in lines if line[:2] != "A "]


def test_a_benchmark_changes_no_committed_file_and_shows_what_is_on_record(repository, capsys):
    assert main(["benchmark", "attention", "--device", "cpu", *SMALL.split()]) == 0
    assert changes(repository) == []
    report = hardware.local_results() / "attention_sweep_report.md"
    assert "16 × 16" in report.read_text(encoding="utf-8")
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(str(report))
    assert lines[at + 1] == "on record: artifacts/attention_sweep_report.md"
    assert lines[at + 2].startswith("  attention forward, causal, 4,096 tokens, heads of 64: 4")


def test_an_interrupted_benchmark_keeps_its_records_and_says_how_to_go_on(
    repository, monkeypatch, capsys
):
    whole, calls = attention._prepare, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(attention, "_prepare", interrupted)
    assert main(["benchmark", "attention", "--device", "cpu", *SMALL.split()]) == 130
    assert "the same command continues from there" in capsys.readouterr().err
    assert changes(repository) == []
    records = hardware.local_results() / "attention_sweep.jsonl"
    assert len(records.read_text(encoding="utf-8").splitlines()) == 1
