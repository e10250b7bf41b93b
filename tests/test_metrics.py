"""Metrics of a run: no line lost or repeated, short output anywhere, W&B that never hurts."""

import builtins
import errno
import io
import json
import logging
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import numpy as np
import pytest

import lib.metrics
from lib.metrics import MetricsLog, read_metrics

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "run/metrics.jsonl"


def write_steps(path: Path, *steps: int, **options) -> int:
    """Write a line for each of `steps`; the position after them."""
    with MetricsLog(path, total_steps=100, **options) as metrics:
        for step in steps:
            metrics.write({"step": step, "loss": 1 / step})
        return metrics.position


def steps_in(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


def test_records_come_back(path):
    records = [{"step": 1, "loss": 2.5, "note": "größer"}, {"step": 2, "validation": {"loss": 2.0}}]
    with MetricsLog(path, total_steps=2) as metrics:
        for record in records:
            metrics.write(record)
    assert read_metrics(path) == records


def test_position_is_the_end_of_the_file_at_once(path):
    with MetricsLog(path, total_steps=2) as metrics:
        assert metrics.position == path.stat().st_size == 0
        for step in (1, 2):
            metrics.write({"step": step, "note": "ü"})
            assert metrics.position == path.stat().st_size
            assert steps_in(path)[-1] == step


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


def test_scalars_of_numpy_and_torch_are_numbers(path):
    import torch

    with MetricsLog(path, total_steps=2) as metrics:
        metrics.write({"a": np.int64(3), "b": np.float32(0.5), "c": torch.tensor(0.25)})
    assert read_metrics(path) == [{"a": 3, "b": 0.5, "c": 0.25}]


def test_what_json_cannot_hold_leaves_the_file_as_it_was(path):
    with MetricsLog(path, total_steps=2) as metrics:
        metrics.write({"step": 1})
        with pytest.raises(TypeError, match="set"):
            metrics.write({"step": {2}})
        metrics.write({"step": 3})
    assert steps_in(path) == [1, 3]


def test_a_resumed_run_repeats_no_line_and_misses_none(path):
    position = write_steps(path, 1, 2, 3)
    write_steps(path, 4, 5, resume_at=position)
    write_steps(path, 4, 5, 6, resume_at=position, start_step=3)
    assert steps_in(path) == [1, 2, 3, 4, 5, 6]


def test_a_resumed_run_drops_a_torn_line(path):
    position = write_steps(path, 1, 2)
    with open(path, "ab") as file:
        file.write(b'{"step": 3, "lo')
    write_steps(path, 3, resume_at=position)
    assert steps_in(path) == [1, 2, 3]


@pytest.mark.parametrize("resume_at", [None, 0])
def test_a_run_without_a_checkpoint_starts_the_file_anew(path, resume_at):
    write_steps(path, 1, 2, 3)
    write_steps(path, 1, resume_at=resume_at)
    assert steps_in(path) == [1]


def test_a_file_shorter_than_the_checkpoint_knows_is_refused(path):
    position = write_steps(path, 1, 2)
    content = path.read_bytes()
    with pytest.raises(ValueError, match=f"resume_at is {position + 1}, but .*only {position} by"):
        write_steps(path, 3, resume_at=position + 1)
    assert path.read_bytes() == content


def test_a_missing_file_is_refused_when_the_checkpoint_knows_lines(path):
    with pytest.raises(ValueError, match=r"resume_at is 30, but .*has only 0 bytes"):
        write_steps(path, 3, resume_at=30)


def test_a_position_inside_a_line_is_refused(path):
    position = write_steps(path, 1, 2)
    content = path.read_bytes()
    with pytest.raises(ValueError, match=r"which is inside a line of .*metrics\.jsonl"):
        write_steps(path, 3, resume_at=position - 1)
    assert path.read_bytes() == content


def test_a_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(OSError, match="run"):
        write_steps(tmp_path / "run/metrics.jsonl", 1)


class FullDisk:
    """A file on a disk that takes no more than some bytes of the next write."""

    def __init__(self, file, room: int, error: OSError | None) -> None:
        self.file, self.room, self.error = file, room, error

    def write(self, data: bytes) -> int:
        written = self.file.write(data[: self.room])
        if self.error:
            raise self.error
        return written

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("error", [None, OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "bad")])
def test_a_line_that_does_not_fit_leaves_none(path, error):
    with MetricsLog(path, total_steps=2) as metrics:
        metrics.write({"step": 1})
        file, metrics._file = metrics._file, FullDisk(metrics._file, 5, error)
        message = "bad" if error and error.errno == errno.EIO else r"no space .*metrics\.jsonl"
        with pytest.raises(OSError, match=message):
            metrics.write({"step": 2})
        metrics._file = file
        metrics.write({"step": 3})
        assert metrics.position == path.stat().st_size
    assert steps_in(path) == [1, 3]


def test_sync_waits_for_the_disk(path, monkeypatch):
    synced = []
    with MetricsLog(path, total_steps=2) as metrics:
        metrics.write({"step": 1})
        monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
        metrics.sync()
    assert synced[0] == path.stat().st_ino


def test_a_killed_process_leaves_every_line_it_wrote(path):
    code = (
        "import sys, time; from lib.metrics import MetricsLog\n"
        "with MetricsLog(sys.argv[1], total_steps=9) as metrics:\n"
        "    metrics.write({'step': 1}); metrics.write({'step': 2})\n"
        "    print('written', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "written\n"
    process.kill()
    process.communicate()
    assert steps_in(path) == [1, 2]


@pytest.mark.parametrize("cut", range(1, 25))
def test_reading_leaves_out_a_torn_last_line(path, cut):
    write_steps(path, 1)
    whole = path.read_bytes()
    torn = '{"step": 2, "note": "größer"}'.encode()[:cut]
    path.write_bytes(whole + torn)
    assert steps_in(path) == [1]


def test_reading_takes_a_whole_last_line_without_its_end(path):
    write_steps(path, 1, 2)
    path.write_bytes(path.read_bytes()[:-1])
    assert steps_in(path) == [1, 2]


@pytest.mark.parametrize("line", [b"{torn", b"3", b"\xff", b""])
def test_reading_names_a_damaged_line_in_the_middle(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is no record"):
        read_metrics(path)


def test_reading_an_empty_file_and_none(tmp_path):
    (tmp_path / "empty").touch()
    assert read_metrics(tmp_path / "empty") == []
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path / "missing")


# Progress


def run_progress(path: Path, total: int, every: int = 1, start: int = 0) -> None:
    with MetricsLog(path, total_steps=total, start_step=start) as metrics:
        for step in range(start + every, total + 1, every):
            metrics.advance(step, loss=2.34567, tokens_per_s=12345.6)
            if step == total // 2:
                metrics.advance(step, validation_loss=2.5)


@pytest.mark.parametrize("total", [1, 3, 10, 1234])
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


def test_a_line_says_how_long_the_rest_takes(path, capsys):
    with MetricsLog(path, total_steps=2) as metrics:
        metrics._progress.bar.start_t = time.time() - 100
        metrics._progress.bar.last_print_t = metrics._progress.bar.start_t
        metrics.advance(1, loss=1.0)
    assert capsys.readouterr().err == "step 1/2, 01:40, 01:40 left, loss 1.000\n"


def test_the_validation_loss_stays_until_the_next(path, capsys):
    run_progress(path, 10)
    lines = capsys.readouterr().err.splitlines()
    assert ["validation loss 2.500" in line for line in lines] == [False] * 5 + [True] * 5


def test_a_resumed_run_goes_on_counting(path, capsys):
    run_progress(path, 100, every=10, start=50)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"step {n}/100" for n in range(60, 101, 10)]


def test_a_loss_that_is_nan_is_shown(path, capsys):
    with MetricsLog(path, total_steps=1) as metrics:
        metrics.advance(1, loss=math.nan)
    assert "loss nan" in capsys.readouterr().err


def test_a_terminal_gets_one_line_without_colour(path, monkeypatch):
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
    from lib.notebook_kernel import execute

    # a folder of its own for the kernel's files
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    cell = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import time\n"
        "from lib.metrics import MetricsLog\n"
        "with MetricsLog('metrics.jsonl', total_steps=300) as metrics:\n"
        "    for step in range(1, 301):\n"
        "        time.sleep(0.005)\n"
        "        metrics.advance(step, loss=1 / step, tokens_per_s=1000)\n"
    )
    source = make_notebook(tmp_path / "01_topic.ipynb", "steps = 3", cell, first="1")
    notebook = execute(source, tmp_path / "done.ipynb")
    (output,) = notebook.cells[-1].outputs
    assert output.output_type == "display_data"
    assert list(output.data) == ["text/plain"]
    text = output.data["text/plain"]
    assert text.startswith("step 300/300 |████████████████████| 00:0")
    assert text.endswith("00:00 left, loss 0.003, 1,000 tokens/s")
    assert "widgets" not in nbformat.read(tmp_path / "done.ipynb", 4).metadata


# Weights & Biases


@pytest.fixture
def wandb_environment(tmp_path, monkeypatch) -> Path:
    """No settings, key or address of anybody; nothing can be asked or reached."""
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home/config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "home/cache"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", str(tmp_path / "home/netrc"))

    def refuse(*args):
        raise AssertionError("something was asked")

    monkeypatch.setattr(builtins, "input", refuse)
    return tmp_path


def in_fresh_process(path: Path, **environment: str) -> subprocess.CompletedProcess:
    """A run with W&B in a process of its own, since wandb keeps its settings for a process."""
    code = (
        "import sys, lib.metrics; from lib.metrics import MetricsLog\n"
        "lib.metrics.WANDB_INIT_TIMEOUT_S = 3\n"
        "with MetricsLog(sys.argv[1], total_steps=3, wandb=True, run_name='small',"
        " config={'d_model': 8}) as metrics:\n"
        "    for step in (1, 2, 3):\n"
        "        metrics.write({'step': step, 'loss': float('nan') if step == 2 else 0.5})\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, path],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=100,
    )


def offline_runs(path: Path) -> list[Path]:
    return list(path.parent.glob("wandb/offline-run-*/run-*.wandb"))


def test_wandb_records_offline_beside_the_metrics(path, wandb_environment):
    done = in_fresh_process(path)
    assert (done.returncode, done.stderr) == (0, "")
    assert steps_in(path) == [1, 2, 3]
    (stored,) = offline_runs(path)
    content = stored.read_bytes()
    assert b"small" in content
    assert b"d_model" in content
    assert content.count(b"loss") >= 3


def test_wandb_online_without_a_key_warns_and_records_offline(path, wandb_environment):
    done = in_fresh_process(path, WANDB_MODE="online")
    assert done.returncode == 0
    assert done.stderr.startswith("W&B is not online (no API key is stored)")
    assert done.stderr.count("\n") == 1
    assert steps_in(path) == [1, 2, 3]
    assert offline_runs(path)


def test_wandb_without_a_network_gives_up_soon(path, wandb_environment):
    started = time.monotonic()
    done = in_fresh_process(path, WANDB_MODE="online", WANDB_API_KEY="0" * 40)
    assert time.monotonic() - started < 30
    assert done.returncode == 0
    assert "W&B is not online" in done.stderr
    assert steps_in(path) == [1, 2, 3]
    assert offline_runs(path)


def test_wandb_disabled_is_not_even_imported(path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setitem(sys.modules, "wandb", None)
    write_steps(path, 1, wandb=True)
    assert steps_in(path) == [1]
    assert not (path.parent / "wandb").exists()


class FakeRun:
    def __init__(self, fault: str = "") -> None:
        self.fault, self.calls = fault, []

    def log(self, record, step):
        if self.fault == "log":
            raise BrokenPipeError("the service\nis gone")
        self.calls.append((record, step))

    def finish(self, exit_code):
        if self.fault == "finish":
            raise RuntimeError("cannot finish")
        self.calls.append(exit_code)


class FakeWandb:
    """As much of wandb as the log uses; `fault` names what fails."""

    class Settings:
        def __init__(self, **settings) -> None:
            vars(self).update(settings)

    def __init__(self, fault: str = "") -> None:
        self.fault, self.run, self.arguments = fault, FakeRun(fault), []

    def init(self, **arguments):
        self.arguments.append(arguments)
        if self.fault == "init" or self.fault == arguments["mode"]:
            raise PermissionError(errno.EACCES, "read-only")
        return self.run


@pytest.fixture
def fake_wandb(monkeypatch):
    """Put a `FakeWandb` with a fault in the place of wandb."""

    def make(fault: str = "", mode: str | None = None) -> FakeWandb:
        fake = FakeWandb(fault)
        monkeypatch.setitem(sys.modules, "wandb", fake)
        if mode is None:
            monkeypatch.delenv("WANDB_MODE", raising=False)
        else:
            monkeypatch.setenv("WANDB_MODE", mode)
        return fake

    return make


def test_wandb_is_told_nothing_unless_asked(path, fake_wandb):
    fake = fake_wandb()
    write_steps(path, 1)
    assert fake.arguments == []


@pytest.mark.parametrize("mode", [None, "", "offline", "dryrun"])
def test_wandb_is_offline_unless_told_otherwise(path, fake_wandb, mode):
    fake = fake_wandb(mode=mode)
    write_steps(path, 1, 2, wandb=True, run_name="small", config={"d_model": 8})
    (arguments,) = fake.arguments
    assert (arguments["mode"], arguments["dir"]) == ("offline", str(path.parent))
    assert (arguments["name"], arguments["config"]) == ("small", {"d_model": 8})
    assert fake.run.calls == [
        ({"step": 1, "loss": 1.0}, 1),
        ({"step": 2, "loss": 0.5}, 2),
        0,
    ]


def test_wandb_gets_numbers_where_the_file_gets_texts(path, fake_wandb):
    fake = fake_wandb()
    with MetricsLog(path, total_steps=1, wandb=True) as metrics:
        metrics.write({"step": 1, "loss": math.nan})
    assert math.isnan(fake.run.calls[0][0]["loss"])


@pytest.mark.parametrize("has_prompt", [True, False])
@pytest.mark.parametrize("has_key", [True, False])
def test_wandb_goes_online_only_with_a_key(path, fake_wandb, has_prompt, has_key):
    fake = fake_wandb(mode="online")
    if has_prompt:

        def login(prompt=True, verify=True):
            assert not prompt
            assert not verify
            return has_key

        fake.login = login
    else:
        # as older releases do it
        fake.login = lambda key=None: pytest.fail("it would ask")
        fake.api = type("Api", (), {"api_key": "0" * 40 if has_key else None})
    write_steps(path, 1, wandb=True)
    assert [arguments["mode"] for arguments in fake.arguments] == [
        "online" if has_key else "offline"
    ]


def test_wandb_that_cannot_go_online_goes_offline(path, fake_wandb, caplog):
    fake = fake_wandb("online", mode="online")
    fake.login = lambda prompt=True, verify=True: True
    write_steps(path, 1, wandb=True)
    assert [arguments["mode"] for arguments in fake.arguments] == ["online", "offline"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert len(fake.run.calls) == 2


@pytest.mark.parametrize("fault", ["init", "log", "finish"])
def test_a_fault_of_wandb_is_one_warning(path, fake_wandb, caplog, fault):
    fake_wandb(fault)
    write_steps(path, 1, 2, 3, wandb=True)
    assert steps_in(path) == [1, 2, 3]
    (warning,) = caplog.messages
    assert warning.startswith("W&B")
    assert warning.endswith("the run goes on without")
    assert "\n" not in warning


def test_wandb_not_installed_is_one_warning(path, monkeypatch, caplog):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    write_steps(path, 1, wandb=True)
    assert steps_in(path) == [1]
    assert len(caplog.messages) == 1


def test_wandb_learns_that_a_run_failed(path, fake_wandb):
    fake = fake_wandb()
    with pytest.raises(KeyboardInterrupt), MetricsLog(path, total_steps=1, wandb=True):
        raise KeyboardInterrupt
    assert fake.run.calls == [1]


def test_an_interruption_inside_wandb_is_not_swallowed(path, fake_wandb, monkeypatch):
    def interrupt(**arguments):
        raise KeyboardInterrupt

    fake_wandb().init = interrupt
    with pytest.raises(KeyboardInterrupt):
        write_steps(path, 1, wandb=True)


def test_limits_on_waiting_are_set_where_wandb_has_them(path, fake_wandb, monkeypatch):
    fake = fake_wandb()
    monkeypatch.setattr(fake.Settings, "finish_timeout", 0.0, raising=False)
    write_steps(path, 1, wandb=True)
    settings = fake.arguments[0]["settings"]
    assert settings.init_timeout == lib.metrics.WANDB_INIT_TIMEOUT_S
    assert settings.finish_timeout == lib.metrics.WANDB_FINISH_TIMEOUT_S
