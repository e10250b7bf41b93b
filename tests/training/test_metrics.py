"""Metrics of a run: no line lost or repeated, short output anywhere, W&B that never hurts."""

import errno
import io
import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from lib.training.metrics import (
    WANDB_FINISH_TIMEOUT_S,
    WANDB_INIT_TIMEOUT_S,
    MetricsLog,
    read_metrics,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    return tmp_path / "run/metrics.jsonl"


def write_steps(path: Path, *steps: int, **options) -> None:
    """Write a line for each of `steps`."""
    with MetricsLog(path, total_steps=100, **options) as metrics:
        for step in steps:
            metrics.write({"step": step, "loss": 1 / step})


def steps_in(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


def test_numbers_that_are_not_finite_stay_valid_json(path):
    values = [math.nan, math.inf, -math.inf, np.float64("nan"), np.float32("inf")]
    with MetricsLog(path, total_steps=2) as metrics:
        metrics.write({"values": values, "of": {"loss": math.nan}})

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    line = json.loads(path.read_text(), parse_constant=refuse)
    assert line == {"values": ["nan", "inf", "-inf", "nan", "inf"], "of": {"loss": "nan"}}
    (record,) = read_metrics(path)
    assert np.array_equal(record["values"], values, equal_nan=True)
    assert math.isnan(record["of"]["loss"])


def test_records_come_back_and_are_in_the_file_at_once(path):
    import torch

    records = [
        {"step": 1, "loss": 2.5, "note": "größer", "validation": {"loss": 2.0}},
        {"step": np.int64(2), "loss": np.float32(0.5), "norm": torch.tensor(0.25)},
    ]
    with MetricsLog(path, total_steps=2) as metrics:
        for step, record in enumerate(records, start=1):
            metrics.write(record)
            assert steps_in(path)[-1] == step
        # what JSON cannot hold leaves the file as it was
        with pytest.raises(TypeError, match="set"):
            metrics.write({"step": {2}})
    assert read_metrics(path) == [records[0], {"step": 2, "loss": 0.5, "norm": 0.25}]


def test_a_resumed_run_repeats_no_line_and_misses_none(path):
    # step 3 was evaluated after it was saved
    write_steps(path, 1, 2, 3, 3, 4, 5)
    # and a line cut short by a crash
    with open(path, "ab") as file:
        file.write(b'{"step": 6, "lo')
    write_steps(path, 4, 5, 6, start_step=3)
    assert steps_in(path) == [1, 2, 3, 3, 4, 5, 6]
    write_steps(path, 7, start_step=6)
    assert steps_in(path) == [1, 2, 3, 3, 4, 5, 6, 7]
    # a new run starts the file anew
    write_steps(path, 1)
    assert steps_in(path) == [1]
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl is missing, which has .* 3 steps"):
        write_steps(path, 4, start_step=3)


class FullDisk:
    """A file on a disk that takes five more bytes."""

    def __init__(self, file, error: OSError | None) -> None:
        self.file, self.error = file, error

    def write(self, data: bytes) -> int:
        written = self.file.write(data[:5])
        if self.error:
            raise self.error
        return written

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("error", [None, OSError(errno.EIO, "bad")])
def test_a_line_that_does_not_fit_leaves_none(path, error):
    with MetricsLog(path, total_steps=2) as metrics:
        metrics.write({"step": 1})
        file, metrics._file = metrics._file, FullDisk(metrics._file, error)
        message = r"bad: .*metrics\.jsonl" if error else r"no space .*metrics\.jsonl"
        with pytest.raises(OSError, match=message):
            metrics.write({"step": 2})
        metrics._file = file
        metrics.write({"step": 3})
    assert steps_in(path) == [1, 3]


def test_sync_waits_for_the_disk(path, monkeypatch):
    synced = []
    with MetricsLog(path, total_steps=2) as metrics:
        metrics.write({"step": 1})
        monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
        metrics.sync()
    assert synced[0] == path.stat().st_ino


# Progress


def run_progress(path: Path, total: int, every: int = 1, start: int = 0) -> None:
    with MetricsLog(path, total_steps=total, start_step=start) as metrics:
        for step in range(start + every, total + 1, every):
            metrics.advance(step, loss=2.34567, tokens_per_s=12345.6)
            if step == total // 2:
                metrics.advance(step, validation_loss=2.5)


@pytest.mark.parametrize("total", [3, 1234])
def test_a_log_file_gets_few_plain_lines(path, capsys, total):
    run_progress(path, total)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert "\r" not in captured.err
    assert "\x1b" not in captured.err
    assert len(lines) == min(total, 10)
    assert lines[-1].startswith(f"step {total}/{total}, 00:0")
    assert "loss 2.346" in lines[-1]
    assert "12,346 tokens/s" in lines[-1]


def test_the_validation_loss_stays_until_the_next_and_a_resumed_run_counts_on(path, capsys):
    run_progress(path, 100, every=10, start=40)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"step {n}/100" for n in range(50, 101, 10)]
    # found right after the line of step 50 was shown
    assert ["validation loss 2.500" in line for line in lines] == [False] + [True] * 5


def test_a_terminal_gets_one_line_without_color(path, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    run_progress(path, 20)
    text = terminal.getvalue()
    assert text.count("\n") == 1
    assert "\x1b[3" not in text
    last = text.rstrip().split("\r")[-1]
    assert last.startswith("step 20/20 |")
    assert "loss 2.346, validation loss 2.500, 12,346 tokens/s" in last


def test_a_notebook_stores_one_text(tmp_path, make_notebook, monkeypatch):
    from lib.tools.publish.cells import read_notebook
    from lib.tools.publish.execute import execute

    # a folder of its own for the kernel's files
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    cell = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import time\n"
        "from lib.training.metrics import MetricsLog\n"
        "with MetricsLog('metrics.jsonl', total_steps=60) as metrics:\n"
        "    for step in range(1, 61):\n"
        "        time.sleep(0.005)\n"
        "        metrics.advance(step, loss=1 / step, tokens_per_s=1000)\n"
    )
    source = make_notebook(tmp_path / "01_topic.ipynb", "steps = 3", cell, first="1")
    notebook = execute(read_notebook(source), tmp_path)
    (output,) = notebook.cells[-1].outputs
    assert output.output_type == "display_data"
    assert list(output.data) == ["text/plain"]
    text = output.data["text/plain"]
    assert text.startswith("step 60/60 |████████████████████| 00:0")
    assert text.endswith("00:00 left, loss 0.017, 1,000 tokens/s")
    assert "widgets" not in notebook.metadata


# Weights & Biases


def test_wandb_records_offline_beside_the_metrics(path, tmp_path, monkeypatch):
    # no settings, key or address of anybody
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    # in a process of its own, since wandb keeps its settings for a process
    code = (
        "import sys; from lib.training.metrics import MetricsLog\n"
        "with MetricsLog(sys.argv[1], total_steps=3, wandb=True, run_name='small',"
        " config={'d_model': 8}) as metrics:\n"
        "    for step in (1, 2, 3):\n"
        "        metrics.write({'step': step, 'loss': float('nan') if step == 2 else 0.5})\n"
    )
    command = [sys.executable, "-c", code, path]
    options = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": 100}
    done = subprocess.run(command, cwd=ROOT, **options)
    assert (done.returncode, done.stderr) == (0, "")
    assert steps_in(path) == [1, 2, 3]
    (stored,) = path.parent.glob("wandb/offline-run-*/run-*.wandb")
    content = stored.read_bytes()
    assert b"small" in content
    assert b"d_model" in content
    assert content.count(b"loss") >= 3


def test_tensorboard_gets_each_number_and_forgets_steps_that_are_repeated(path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append((folder, purge_step))

        def add_scalar(self, *arguments):
            calls.append(arguments)

        def close(self):
            calls.append("close")

    fake = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    with MetricsLog(path, total_steps=9, start_step=4, tensorboard=True) as metrics:
        metrics.write({"step": 5, "loss": 0.5, "note": "text"})
    assert calls == [(path.parent / "tensorboard", 5), ("loss", 0.5, 5), "close"]


def test_wandb_disabled_is_not_even_imported(path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setitem(sys.modules, "wandb", None)
    write_steps(path, 1, wandb=True)
    assert not (path.parent / "wandb").exists()


class FakeWandb:
    """As much of wandb and of its run as the log uses; `fault` names the call that fails."""

    class Settings(types.SimpleNamespace):
        finish_timeout = 0.0

    def __init__(self, fault: str = "") -> None:
        self.fault, self.arguments, self.calls = fault, [], []

    def fail_at(self, *calls: str) -> None:
        if self.fault in calls:
            raise BrokenPipeError("the service\nis gone")

    def init(self, **arguments):
        self.arguments.append(arguments)
        self.fail_at("init", arguments["mode"])
        return self

    def log(self, record, step):
        self.fail_at("log")
        self.calls.append((record, step))

    def finish(self, exit_code):
        self.fail_at("finish")
        self.calls.append(exit_code)


@pytest.fixture
def fake_wandb(monkeypatch):
    """Put a `FakeWandb` with a fault in the place of wandb."""

    def make(fault: str = "", mode: str = "") -> FakeWandb:
        fake = FakeWandb(fault)
        monkeypatch.setitem(sys.modules, "wandb", fake)
        monkeypatch.setenv("WANDB_MODE", mode)
        return fake

    return make


@pytest.mark.parametrize("mode", ["", "dryrun"])
def test_wandb_is_offline_unless_told_otherwise(path, fake_wandb, mode):
    fake = fake_wandb(mode=mode)
    write_steps(path, 1, 2, wandb=True, run_name="small", config={"d_model": 8})
    (arguments,) = fake.arguments
    assert (arguments["mode"], arguments["dir"]) == ("offline", str(path.parent))
    assert (arguments["name"], arguments["config"]) == ("small", {"d_model": 8})
    # it waits no longer than this for a network
    settings = arguments["settings"]
    assert settings.init_timeout == WANDB_INIT_TIMEOUT_S
    assert settings.finish_timeout == WANDB_FINISH_TIMEOUT_S
    assert fake.calls == [({"step": 1, "loss": 1.0}, 1), ({"step": 2, "loss": 0.5}, 2), 0]
    # it learns that a run failed
    with pytest.raises(KeyboardInterrupt), MetricsLog(path, total_steps=1, wandb=True):
        raise KeyboardInterrupt
    assert fake.calls[3:] == [1]


@pytest.mark.parametrize("fault", ["", "online"])
def test_wandb_goes_online_when_told_and_offline_if_it_cannot(path, fake_wandb, fault, caplog):
    fake = fake_wandb(fault, mode="online")
    write_steps(path, 1, wandb=True)
    modes = [arguments["mode"] for arguments in fake.arguments]
    assert modes == ["online"] + ["offline"] * (fault == "online")
    assert len(caplog.messages) == modes.count("offline")
    assert len(fake.calls) == 2


@pytest.mark.parametrize("fault", ["not installed", "init", "log", "finish"])
def test_a_fault_of_wandb_is_one_warning(path, fake_wandb, caplog, monkeypatch, fault):
    fake_wandb(fault)
    if fault == "not installed":
        monkeypatch.setitem(sys.modules, "wandb", None)
    write_steps(path, 1, 2, 3, wandb=True)
    assert steps_in(path) == [1, 2, 3]
    (warning,) = caplog.messages
    assert warning.startswith("W&B")
    assert warning.endswith("the run continues without it")
    assert "\n" not in warning
