"""Where results go by default: into a folder of the machine's own, which git ignores."""

import subprocess
from pathlib import Path

from lib.__main__ import COMMANDS, config_of, load, main
from lib.core import hardware
from lib.core.files import ROOT
from lib.core.records import read_records
from lib.tools.benchmarks import attention

SMALL = (
    "--device cpu --kernels sdpa vectorized_torch --custom_tiers 16:16 --batch_size 1 --samples 3"
)


def test_by_default_results_lie_where_git_ignores_them():
    names = [name for name in COMMANDS if name.split()[0] in ("benchmark", "profile", "roofline")]
    # which fills README.md
    for name in set(names) - {"benchmark headline"}:
        path = config_of(load(COMMANDS[name].function))().output / "results.md"
        subprocess.run(["git", "-C", ROOT, "check-ignore", "-q", path], check=True)


def test_the_folder_is_named_after_the_device(monkeypatch):
    names = {
        "NVIDIA H200": "nvidia-h200",
        "Intel(R) Xeon(R) CPU @ 2.20GHz": "intel-xeon-cpu-2-20ghz",
    }
    for name, folder in names.items():
        monkeypatch.setattr(hardware, "device_name", lambda name=name: name)
        assert hardware.local_results() == Path("artifacts/local", folder)


def test_a_benchmark_writes_there_and_shows_what_is_on_record(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["benchmark", "attention", *SMALL.split()]) == 0
    report = hardware.local_results() / "attention_sweep_report.md"
    assert "16 × 16" in report.read_text(encoding="utf-8")
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(str(report))
    assert lines[at + 1] == "on record: artifacts/attention_sweep_report.md"
    assert lines[at + 2].startswith("  attention forward, causal, 4,096 tokens, heads of 64: 4")


def test_an_interrupted_benchmark_keeps_its_records_and_says_how_to_go_on(
    tmp_path, monkeypatch, capsys
):
    whole, calls = attention._prepare, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(attention, "_prepare", interrupted)
    assert main(["benchmark", "attention", *SMALL.split()]) == 130
    assert "the same command continues from there" in capsys.readouterr().err
    assert len(read_records(hardware.local_results() / "attention_sweep.jsonl")) == 1
