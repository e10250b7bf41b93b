"""Training runs: what they leave behind, and that nothing which happens to them is lost."""

import contextlib
import dataclasses
import errno
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_server import LOADED

import lib.checkpoint
import lib.files
import lib.metrics
import lib.train
import lib.train_folder
from lib.__main__ import main
from lib.checkpoint import load_checkpoint
from lib.config import TokenizeConfig
from lib.config_training import ModelConfig, OptimizerConfig, TrainConfig
from lib.data import load_token_array
from lib.evaluate import bytes_of_token, evaluate, unigram_bits_per_byte
from lib.files import lock_folder
from lib.generate import load_model
from lib.metrics import read_metrics
from lib.pipeline import tokenize_corpus
from lib.strict_json import to_dict, to_json
from lib.tokenizer import SEPARATOR, Tokenizer
from lib.train import train
from lib.train_folder import FACTORS
from lib.train_run import prepare
from lib.train_step import TrainStep

ROOT = Path(__file__).resolve().parent.parent
CLOCK = ("seconds", "tokens_per_s", "mfu")
MODEL = ModelConfig(context_length=8, d_model=16, num_layers=1, num_heads=2, d_ff=32)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=4)
# None of the intervals divides another, so that a checkpoint falls between two lines of metrics.
CONFIG = TrainConfig(
    model=MODEL,
    optimizer=OPTIMIZER,
    steps=26,
    batch_size=4,
    device="cpu",
    deterministic=True,
    log_interval=4,
    eval_interval=10,
    eval_tokens=200,
    checkpointing_interval=3,
)


@pytest.fixture(autouse=True)
def one_thread():
    """As many threads as the processes started here, since their number changes rounding."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def silent(name, num_bytes):
    yield lambda count: None


def tokenized(folder: Path, **changes) -> Path:
    settings = {
        "corpus_bytes": 200_000,
        "vocab_size": 300,
        "validation_fraction": 0.1,
        "workers": 1,
        "implementation": "python",
    }
    output = folder / "tokens"
    config = TokenizeConfig(data_dir=folder, output=output, **(settings | changes))
    tokenize_corpus(config, progress_bar=silent)
    return output


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """200 kB of stories as tokens."""
    return tokenized(tmp_path_factory.mktemp("data"))


@pytest.fixture
def config(data, tmp_path):
    return dataclasses.replace(CONFIG, data=data, output=tmp_path / "run")


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    """The folder of the run of CONFIG that nothing happened to."""
    folder = tmp_path_factory.mktemp("straight")
    torch.set_num_threads(1)
    train(dataclasses.replace(CONFIG, data=data, output=folder))
    return folder


@pytest.fixture(scope="module")
def half(data, tmp_path_factory):
    """A folder in which CONFIG was asked to stop at step 10; it has the checkpoints 9 and 10."""
    folder = tmp_path_factory.mktemp("half")
    torch.set_num_threads(1)
    half_way = dataclasses.replace(CONFIG, data=data, output=folder)
    assert train(half_way, on_metrics=signals_at(10, signal.SIGTERM)).status == "stopped"
    return folder


@pytest.fixture
def stopped(half, config):
    """A copy of `half`, and its config."""
    shutil.copytree(half, config.output)
    return config


def signals_at(step, *numbers):
    """A callback that sends this process signals with the first line of metrics of `step`."""
    numbers = list(numbers)

    def on_metrics(record):
        while record["step"] >= step and numbers:
            os.kill(os.getpid(), numbers.pop(0))

    return on_metrics


def lines(folder: Path) -> list[dict]:
    """The lines of metrics, but for what a clock decides."""
    records = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in record.items() if k not in CLOCK} for record in records]


def final_state(folder: Path, step: int) -> list:
    """The bytes of the last checkpoint's weights and optimizer, and what else a step depends on."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    names = "model.safetensors", "optimizer.safetensors"
    tensors = load_checkpoint(path).tensors
    return [
        *((path / name).read_bytes() for name in names),
        *(float(tensors[name]) for name in ("loss_scale", "good_steps")),
    ]


def assert_same_run(folder: Path, expected: Path, step: int = CONFIG.steps) -> None:
    """Weights and optimizer have the same bits, and the metrics the same lines."""
    for one, other in zip(final_state(folder, step), final_state(expected, step)):
        # not compared by pytest, which would show the bytes
        assert (one == other) is True
    assert lines(folder) == lines(expected)


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


# A run by itself


def test_a_run_leaves_what_it_was_and_how_it_went(straight):
    names = {path.name for path in straight.iterdir()} - {".lock"}
    assert names == {"config.json", "tokenizer.json", "run.json", "metrics.jsonl", "checkpoints"}
    assert checkpoint_names(straight) == ["step-00000024", "step-00000026"]
    records = lines(straight)
    kinds = [(r["step"], "loss" if "loss" in r else "validation") for r in records]
    logged = [(step, "loss") for step in (*range(4, 26, 4), 26)]
    assert kinds == sorted([*logged, *((step, "validation") for step in (10, 20, 26))])
    assert all(r["tokens"] == r["step"] * 4 * 8 for r in records)


def test_a_deterministic_run_repeated_has_the_same_bits(straight, config):
    train(config)
    assert_same_run(config.output, straight)


def test_another_seed_gives_another_run(straight, config):
    train(dataclasses.replace(config, seed=1))
    assert lines(config.output) != lines(straight)


def test_a_line_is_the_mean_of_its_steps(straight, config):
    train(dataclasses.replace(config, log_interval=1))
    every = [r for r in lines(config.output) if "loss" in r]
    assert [r["step"] for r in every] == list(range(1, 27))
    for record in lines(straight):
        if "loss" in record:
            step = record["step"]
            mine = [r for r in every if (step - 1) // 4 == (r["step"] - 1) // 4]
            assert record["loss"] == pytest.approx(np.mean([r["loss"] for r in mine]), rel=1e-9)
            assert record["learning_rate"] == mine[-1]["learning_rate"]


def test_the_learning_rate_climbs_to_the_highest_and_ends_at_the_lowest(config):
    train(dataclasses.replace(config, log_interval=1))
    rates = [r["learning_rate"] for r in lines(config.output) if "loss" in r]
    assert rates[:4] == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2])
    assert rates[-1] == pytest.approx(1e-3)
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_the_callback_gets_each_line(config):
    told = []
    train(config, on_metrics=told.append)
    assert told == read_metrics(config.output / "metrics.jsonl")


def test_intervals_of_nothing_evaluate_and_save_at_the_end_only(config):
    train(dataclasses.replace(config, eval_interval=0, checkpointing_interval=0))
    assert [r["step"] for r in lines(config.output) if "validation_loss" in r] == [26]
    assert checkpoint_names(config.output) == ["step-00000026"]


def test_evaluations_are_those_of_the_saved_model(straight, data):
    model, tokenizer, _ = load_model(straight, "cpu")
    tokens = load_token_array(data / "validation.npy")
    found = evaluate(
        model, tokens, bytes_of_token(tokenizer), batch_size=4, device="cpu", max_tokens=200
    )
    last = lines(straight)[-1]
    assert last["validation_loss"] == found.loss
    assert last["validation_perplexity"] == pytest.approx(math.exp(found.loss))
    text = tokenizer.decode(tokens[1:201]).replace(SEPARATOR, "")
    bits = found.loss * 200 / math.log(2)
    assert last["validation_bits_per_byte"] == pytest.approx(bits / len(text.encode()))


def test_the_result_says_what_became_of_the_run(config):
    result = train(config)
    assert (result.status, result.step, result.output) == ("finished", 26, config.output)
    assert result.checkpoint == config.output / "checkpoints" / "step-00000026"
    assert result.evaluation.loss == lines(config.output)[-1]["validation_loss"]


def test_a_model_learns_far_more_than_how_frequent_tokens_are(data, config):
    model = dataclasses.replace(MODEL, context_length=32, d_model=32, d_ff=96, num_layers=2)
    changes = {"steps": 250, "batch_size": 16, "eval_interval": 0, "eval_tokens": 5000}
    result = train(dataclasses.replace(config, model=model, checkpointing_interval=0, **changes))
    tokenizer = Tokenizer.load(data / "tokenizer.json")
    train_tokens, tokens = (load_token_array(data / f"{p}.npy") for p in ("train", "validation"))
    unigram = unigram_bits_per_byte(
        train_tokens, tokens, bytes_of_token(tokenizer), max_tokens=5000
    )
    assert result.evaluation.bits_per_byte < 0.7 * unigram


# Precision and accumulation


@pytest.mark.parametrize(
    ("dtype", "low"),
    [("float32", False), ("bfloat16", False), ("bfloat16", True), ("float16", False)],
)
def test_every_precision_learns_and_resumes_exactly(config, dtype, low, tmp_path):
    config = dataclasses.replace(config, dtype=dtype, low_precision_weights=low)
    train(config)
    losses = [r["loss"] for r in lines(config.output) if "loss" in r]
    assert losses[-1] < 0.9 * losses[0]
    again = dataclasses.replace(config, output=tmp_path / "again")
    train(again, on_metrics=signals_at(10, signal.SIGTERM))
    assert train(again).status == "finished"
    assert_same_run(again.output, config.output)


def test_bfloat16_rounds_matrix_products_and_not_weights(config, straight):
    train(dataclasses.replace(config, dtype="bfloat16"))
    short, long = lines(config.output)[-1], lines(straight)[-1]
    assert short["validation_loss"] != long["validation_loss"]
    assert short["validation_loss"] == pytest.approx(long["validation_loss"], rel=0.02)
    assert all(w.dtype == torch.float32 for w in load_model(config.output)[0].parameters())


def test_accumulated_steps_take_the_windows_of_one_large_batch(config, monkeypatch, tmp_path):
    read, seen = lib.train.read_windows, []
    monkeypatch.setattr(
        lib.train, "read_windows", lambda *a: seen.append(a[1].tolist()) or read(*a)
    )
    config = dataclasses.replace(config, batch_size=8)
    parts = {"batch_size": 2, "gradient_accumulation_steps": 4, "output": tmp_path / "parts"}
    train(config)
    whole, seen[:] = list(seen), []
    train(dataclasses.replace(config, **parts))
    assert seen == whole
    for one, other in zip(lines(config.output), lines(tmp_path / "parts")):
        assert one == pytest.approx(other, rel=1e-3)


# Killed, stopped, torn, full: a run goes on as if nothing had happened


def start(config_path: Path) -> subprocess.Popen:
    arguments = ["train", "--config", str(config_path), "--deterministic"]
    return subprocess.Popen(
        [sys.executable, "-m", "lib", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(is_there, process) -> None:
    limit = time.monotonic() + 120
    while not is_there():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.0005)


@pytest.fixture
def long_config(config, tmp_path):
    """A run of a few seconds, as a file, and what becomes of it without an interruption."""
    config = dataclasses.replace(
        config, steps=400, eval_interval=50, checkpointing_interval=7, deterministic=False
    )
    path = tmp_path / "config.json"
    path.write_text(to_json(config))
    expected = tmp_path / "expected"
    train(dataclasses.replace(config, output=expected, deterministic=True))
    return config, path, expected


def test_a_command_killed_and_stopped_ends_with_the_bits_of_one_left_alone(long_config):
    config, path, expected = long_config
    metrics, checkpoints = config.output / "metrics.jsonl", config.output / "checkpoints"

    def count():
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    # while it writes one of its first checkpoints
    number = random.randrange(1, 20)
    process = start(path)
    wait_for(lambda: count() >= number and list(checkpoints.glob(".*.partial")), process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    # by what a scheduler or Ctrl-C sends
    for name, lines_before in (("SIGTERM", 30), ("SIGINT", 50)):
        process = start(path)
        wait_for(lambda limit=lines_before: count() >= limit, process)
        process.send_signal(getattr(signal, name))
        output = process.communicate()[0]
        assert process.returncode == 130, output
        assert f"{name}: the step will be finished and saved" in output
        assert "stopped at step" in output
        assert "the same command goes on from here" in output
    process = start(path)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert "finished at step 400" in output
    assert_same_run(config.output, expected, 400)


@pytest.fixture(scope="module")
def processes():
    """Starts processes fast, from one that has torch loaded."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        pytest.skip("needs a fork server")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context


def train_and_die(config: TrainConfig, call: int) -> None:
    """Train, and be killed at the `call`th time that something is to reach the disk."""
    calls = 0

    def dying(original):
        def function(*arguments, **keywords):
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **keywords)

        return function

    torch.set_num_threads(1)
    for owner, name in [
        (os, "fsync"),
        (os, "replace"),
        (shutil, "rmtree"),
        (lib.checkpoint, "save_file"),
        (lib.metrics.MetricsLog, "write"),
        (lib.train, "describe_run"),
    ]:
        setattr(owner, name, dying(getattr(owner, name)))
    train(config)


@pytest.mark.parametrize("seed", range(2))
def test_kills_at_any_write_lose_and_repeat_nothing(config, straight, processes, seed):
    draw = random.Random(seed)
    for _ in range(7):
        process = processes.Process(target=train_and_die, args=(config, draw.randrange(1, 50)))
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
        # a kill in the middle of a line is rare; what it would leave
        if draw.random() < 0.5:
            with open(config.output / "metrics.jsonl", "a") as file:
                file.write('{"step": 7, "lo')
    assert train(config).step == config.steps
    assert_same_run(config.output, straight)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [4, 10, 24])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(config, straight, number, step):
    result = train(config, on_metrics=signals_at(step, number))
    assert (result.status, result.step) == ("stopped", step)
    assert load_checkpoint(result.checkpoint).step == step
    assert train(config).status == "finished"
    assert_same_run(config.output, straight)


def test_a_signal_in_the_last_step_changes_nothing(config, straight):
    assert train(config, on_metrics=signals_at(26, signal.SIGTERM)).status == "finished"
    assert_same_run(config.output, straight)


@pytest.mark.parametrize("answers", range(1, 9))
def test_a_stop_at_any_moment_saves_the_step_that_is_reported(config, monkeypatch, answers):
    class Event:
        left = answers

        def is_set(self):
            self.left -= 1
            return self.left < 0

    monkeypatch.setattr(lib.train, "stop_signals", lambda: contextlib.nullcontext(Event()))
    result = train(dataclasses.replace(config, checkpointing_interval=0))
    assert result.status == "stopped"
    assert load_checkpoint(result.checkpoint).step == result.step


def test_a_run_whose_time_is_over_ends_after_the_step_and_goes_on(config, straight):
    timed = dataclasses.replace(config, max_seconds=1e-3)
    result = train(timed)
    assert (result.status, result.step) == ("stopped", 1)
    assert train(dataclasses.replace(timed, max_seconds=3600.0)).status == "finished"
    assert_same_run(config.output, straight)


def test_a_second_interruption_ends_the_run_at_once(config, straight):
    with pytest.raises(KeyboardInterrupt):
        train(config, on_metrics=signals_at(10, signal.SIGINT, signal.SIGINT))
    assert checkpoint_names(config.output) == ["step-00000006", "step-00000009"]
    train(config)
    assert_same_run(config.output, straight)


def test_handlers_of_signals_are_put_back(config):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    seen = []

    def fail(record):
        seen.append(signal.getsignal(signal.SIGINT))
        if record["step"] >= 8:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        train(config, on_metrics=fail)
    train(config)
    assert seen[0] not in before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_run_in_another_thread_leaves_signals_alone(config, straight):
    results, handlers, before = [], set(), signal.getsignal(signal.SIGINT)

    def work():
        told = lambda record: handlers.add(signal.getsignal(signal.SIGINT))  # noqa: E731
        results.append(train(config, on_metrics=told))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == {before}
    assert results[0].status == "finished"
    assert_same_run(config.output, straight)


def test_metrics_are_on_the_disk_before_the_checkpoint_that_counts_on_them(config, monkeypatch):
    calls = []

    def noted(name, original):
        return lambda *a, **k: (calls.append(name), original(*a, **k))[1]

    sync, save = lib.metrics.MetricsLog.sync, lib.train.save_checkpoint
    monkeypatch.setattr(lib.metrics.MetricsLog, "sync", noted("sync", sync))
    monkeypatch.setattr(lib.train, "save_checkpoint", noted("save", save))
    train(config)
    assert calls == ["sync", "save"] * 9


def test_deterministic_runs_set_what_older_releases_need_on_a_gpu(config, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    train(config)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_an_error_in_the_callback_loses_nothing(config, straight):
    def fail(record):
        if record["step"] == 16:
            raise RuntimeError("figure")

    with pytest.raises(RuntimeError, match="figure"):
        train(config, on_metrics=fail)
    train(config)
    assert_same_run(config.output, straight)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(
    stopped, straight, name, damage, caplog
):
    damage(stopped.output / "checkpoints" / "step-00000010" / name)
    with caplog.at_level("INFO"):
        assert train(stopped).status == "finished"
    assert "step-00000010 is damaged" in caplog.text
    assert "at step 9" in caplog.text
    assert_same_run(stopped.output, straight)


def test_when_the_only_checkpoint_is_damaged_nothing_is_touched(stopped):
    shutil.rmtree(stopped.output / "checkpoints" / "step-00000009")
    cut(stopped.output / "checkpoints" / "step-00000010" / "optimizer.safetensors")
    before = contents(stopped.output)
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole: step-00000010"):
        train(stopped)
    assert contents(stopped.output) == before


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_full_disk_leaves_the_checkpoint_before_and_the_run_goes_on_later(
    stopped, straight, monkeypatch, call
):
    save, calls = lib.checkpoint.save_file, []

    def full(*arguments, **keywords):
        calls.append(1)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(lib.checkpoint, "save_file", full)
        with pytest.raises(OSError, match=r"no space left to write .*step-00000012: it needs"):
            train(stopped)
    assert load_checkpoint(stopped.output / "checkpoints").step == 10
    assert not list((stopped.output / "checkpoints").glob(".step*"))
    assert train(stopped).status == "finished"
    assert_same_run(stopped.output, straight)


def test_a_full_disk_while_metrics_are_written_is_named_too(stopped, straight, monkeypatch):
    class Full:
        """Takes five bytes and no more."""

        def __init__(self, file):
            self.file = file

        def write(self, data):
            self.file.write(data[:5])
            raise OSError(errno.ENOSPC, "No space left on device")

        def __getattr__(self, name):
            return getattr(self.file, name)

    open_at = lib.metrics._open_at
    with monkeypatch.context() as patch:
        patch.setattr(lib.metrics, "_open_at", lambda *arguments: Full(open_at(*arguments)))
        with pytest.raises(OSError, match=r"no space left to write .*metrics\.jsonl"):
            train(stopped)
    assert train(stopped).status == "finished"
    assert_same_run(stopped.output, straight)


# What an output folder may hold


def test_a_finished_run_is_up_to_date_and_left_alone(straight, config, monkeypatch):
    shutil.copytree(straight, config.output)
    before = contents(config.output)
    monkeypatch.setattr(TrainStep, "__call__", lambda *a: pytest.fail("it trains"))
    result = train(config)
    assert (result.status, result.step, result.evaluation) == ("up to date", 26, None)
    assert result.checkpoint.name == "step-00000026"
    assert contents(config.output) == before


def test_a_finished_run_is_reported_without_writing(straight, config, monkeypatch):
    shutil.copytree(straight, config.output)
    # as on a disk that is read-only
    refuse = OSError(errno.EROFS, "Read-only file system")

    def no(*arguments, **keywords):
        raise refuse

    for function in ("make_folder", "lock_folder", "atomic_write", "write_atomically"):
        for module in (lib.files, lib.train_folder, lib.checkpoint, lib.metrics):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, no)
    result = train(config)
    assert (result.status, result.step) == ("up to date", 26)
    assert result.checkpoint == config.output / "checkpoints" / "step-00000026"
    with pytest.raises(OSError, match="Read-only"):
        train(dataclasses.replace(config, steps=27))


def test_a_finished_run_whose_last_checkpoint_is_damaged_trains_its_last_steps_again(
    straight, config
):
    shutil.copytree(straight, config.output)
    weights = config.output / "checkpoints/step-00000026/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert train(config).status == "finished"
    assert_same_run(config.output, straight)


def test_a_resumed_run_hashes_its_checkpoint_once(stopped, monkeypatch):
    hashed, sha256_file = [], lib.checkpoint.files.sha256_file
    monkeypatch.setattr(
        lib.checkpoint.files, "sha256_file", lambda path: hashed.append(path) or sha256_file(path)
    )
    train(stopped)
    before = [path.name for path in hashed if path.parent.name == "step-00000010"]
    assert sorted(before) == sorted(set(before))
    assert len(before) == 4


def test_the_last_line_of_progress_shows_the_last_validation_loss(config, capsys):
    result = train(config)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("step 26/26")
    assert f"validation loss {result.evaluation.loss:.3f}" in last
    (record,) = [line for line in lines(config.output) if line["step"] == 26 and "loss" in line]
    assert f"loss {record['loss']:.3f}, " in last


def test_a_finished_run_can_be_made_longer(straight, config):
    shutil.copytree(straight, config.output)
    result = train(dataclasses.replace(config, steps=33))
    assert (result.status, result.step) == ("finished", 33)
    assert lines(config.output)[: len(lines(straight))] == lines(straight)
    assert [r["step"] for r in lines(config.output) if "loss" in r][-3:] == [28, 32, 33]
    assert json.loads((config.output / "config.json").read_text())["steps"] == 33
    assert checkpoint_names(config.output) == ["step-00000030", "step-00000033"]


def test_how_a_run_is_watched_may_change(stopped, straight):
    changes = {"log_interval": 2, "eval_interval": 0, "keep_last": 1, "checkpointing_interval": 5}
    assert train(dataclasses.replace(stopped, **changes)).status == "finished"
    assert final_state(stopped.output, 26) == final_state(straight, 26)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch_size": 5},
            "a step was 4 windows = batch_size 4 × gradient_accumulation_steps 1 × world_size 1, "
            "now 5 = batch_size 5 × .*; batch_size 4 would fit, else give another output",
        ),
        ({"seed": 3}, "seed was 0, now 3"),
        ({"dtype": "bfloat16"}, "dtype was auto, now bfloat16"),
        ({"model": dataclasses.replace(MODEL, d_ff=64)}, "model.d_ff was 32, now 64"),
        (
            {"optimizer": dataclasses.replace(OPTIMIZER, weight_decay=0.2)},
            "optimizer.weight_decay was 0.1, now 0.2",
        ),
        (
            {"gradient_accumulation_steps": 2},
            "now 8 = batch_size 4 × gradient_accumulation_steps 2 × .*; batch_size 2 would fit",
        ),
        # no batch_size fits
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps 3 × world_size 1; give"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused_by_name(stopped, changes, message):
    before = contents(stopped.output)
    with pytest.raises(ValueError, match=message) as caught:
        train(dataclasses.replace(stopped, **changes))
    assert str(stopped.output) in str(caught.value)
    # nothing that stayed the same is listed
    assert str(caught.value).count(" was ") == 1
    assert contents(stopped.output) == before


def test_other_data_in_the_same_folder_are_refused_by_name(stopped, tmp_path):
    before = contents(stopped.output)
    other = tokenized(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=r"data\.train was \w+, now \w+"):
        train(dataclasses.replace(stopped, data=other))
    assert contents(stopped.output) == before


@pytest.mark.parametrize("changes", [{"seed": 1}, {"resume": False}])
def test_a_run_that_another_process_begins_in_the_folder_meanwhile_is_seen(
    config, straight, changes, caplog
):
    errors = []

    def work():
        try:
            train(dataclasses.replace(config, **changes))
        except ValueError as error:
            errors.append(str(error))

    with lock_folder(config.output):
        thread = threading.Thread(target=work)
        thread.start()
        limit = time.monotonic() + 60
        while "waiting for another process" not in caplog.text:
            assert time.monotonic() < limit
            time.sleep(0.001)
        shutil.copytree(straight, config.output, dirs_exist_ok=True, ignore=lambda *a: [".lock"])
    thread.join()
    assert len(errors) == 1
    assert "holds a run" in errors[0]
    assert_same_run(config.output, straight)


def test_without_resume_a_folder_with_a_run_is_refused(stopped):
    before = contents(stopped.output)
    with pytest.raises(ValueError, match="resume is False; give another output"):
        train(dataclasses.replace(stopped, resume=False))
    assert contents(stopped.output) == before


def test_without_resume_an_empty_folder_is_taken(config, straight):
    train(dataclasses.replace(config, resume=False))
    assert_same_run(config.output, straight)


def test_without_an_output_settings_and_content_of_the_data_name_the_folder(config, tmp_path):
    config = dataclasses.replace(config, output=None, runs_dir=tmp_path / "runs")

    def folder(**changes):
        return prepare(dataclasses.replace(config, **changes)).folder

    name = folder()
    assert name.parent == tmp_path / "runs"
    assert name.name.startswith(config.data.name)
    # where and how a run is watched is not what it learns
    same = {"log_interval": 9, "checkpointing_interval": 0, "wandb": True, "keep_last": 9}
    for key, value in same.items():
        assert folder(**{key: value}) == name
    copy = shutil.copytree(config.data, tmp_path / "copy" / config.data.name)
    assert folder(data=copy) == name
    other = tokenized(tmp_path / "elsewhere", seed=1)
    names = {
        name,
        folder(seed=1),
        folder(steps=27),
        folder(batch_size=2),
        folder(model=dataclasses.replace(MODEL, norm="post")),
        folder(optimizer=dataclasses.replace(OPTIMIZER, beta2=0.9)),
        folder(data=other),
    }
    assert len(names) == 7


def test_the_default_vocabulary_is_that_of_the_tokenizer(straight):
    model, tokenizer, config = load_model(straight)
    assert tokenizer.vocab_size == config.model.vocab_size == 300
    assert len(model.output_weight) == 300


def test_a_padded_vocabulary_trains(config):
    model = dataclasses.replace(MODEL, vocab_size=320)
    assert train(dataclasses.replace(config, model=model)).status == "finished"
    assert len(load_model(config.output)[0].output_weight) == 320


# Losses that are not finite


def test_a_learning_rate_that_is_far_too_high_ends_with_a_named_error(config):
    optimizer = OptimizerConfig(learning_rate=1e30, min_learning_rate=0, warmup_steps=0)
    config = dataclasses.replace(config, optimizer=optimizer, max_nonfinite_steps=6)
    with pytest.raises(FloatingPointError) as caught:
        train(config)
    # the first step still had finite weights
    assert str(caught.value).startswith("step 7: loss ")
    assert "gradient norm nan at learning rate 8.32e+29, the 6th" in str(caught.value)
    assert "max_nonfinite_steps" in str(caught.value)
    # every number is JSON's
    for line in (config.output / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
    (record,) = read_metrics(config.output / "metrics.jsonl")
    assert (record["step"], record["skipped_steps"]) == (4, 3)
    assert math.isfinite(record["loss"])


def poison(monkeypatch, *steps):
    """At these steps one weight is infinite, and afterwards what it was."""
    call, taken = TrainStep.__call__, []

    def step(self, *arguments):
        taken.append(1)
        weight = self.model.ln_final.weight
        before = weight.detach().clone()
        if len(taken) in steps:
            weight.data[0] = math.inf
        call(self, *arguments)
        if len(taken) in steps:
            weight.data.copy_(before)

    monkeypatch.setattr(TrainStep, "__call__", step)


def test_steps_that_are_not_finite_are_skipped_and_counted(config, monkeypatch):
    poison(monkeypatch, 2, 5, 6, 7, 8, 14)
    train(dataclasses.replace(config, max_nonfinite_steps=5))
    counts = {r["step"]: r["skipped_steps"] for r in lines(config.output) if "loss" in r}
    assert counts == {4: 1, 8: 5, 12: 5, 16: 6, 20: 6, 24: 6, 26: 6}
    losses = {r["step"]: r["loss"] for r in lines(config.output) if "loss" in r}
    # where every step was skipped there is no mean
    assert math.isnan(losses.pop(8))
    assert all(map(math.isfinite, losses.values()))
    assert '"loss": "nan"' in (config.output / "metrics.jsonl").read_text()


def test_only_steps_in_a_row_end_a_run(config, monkeypatch):
    poison(monkeypatch, 2, 3, 5, 6, 8, 9)
    assert train(dataclasses.replace(config, max_nonfinite_steps=3)).status == "finished"


def test_steps_in_a_row_are_counted_across_an_interruption(config, monkeypatch):
    poison(monkeypatch, 3, 4, 5, 6)
    config = dataclasses.replace(config, max_nonfinite_steps=4)
    assert train(config, on_metrics=signals_at(4, signal.SIGTERM)).step == 4
    with pytest.raises(FloatingPointError, match="step 6"):
        train(config)


# Bad input: named before any work


def edit(fields, path, value):
    *parents, last = path.split(".")
    for name in parents:
        fields = fields[name]
    fields[last] = value


def refusal(config: TrainConfig, changes: dict, tmp_path: Path, capsys) -> str:
    """What the command says, which is one line and leaves no run behind."""
    fields = to_dict(config)
    for path, value in changes.items():
        edit(fields, path, value)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert main(["train", "--config", str(tmp_path / "config.json")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert not (config.output / "metrics.jsonl").exists()
    assert not (config.output / "checkpoints").exists()
    return message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stepz": 3}, "unknown key 'stepz'; did you mean 'steps'?"),
        ({"model.depth": 3}, "unknown key 'model.depth'"),
        ({"steps": "many"}, 'steps is "many"; right is: a whole number'),
        ({"model.num_heads": 3}, "d_model 16 is not divisible by num_heads 3"),
        ({"model.context_length": 10**6}, "context_length is 1,000,000, which needs 1,000,001"),
        ({"batch_size": 10**6}, "windows a step, but"),
        ({"model.vocab_size": 280}, "vocab_size is 280, but the tokenizer"),
        ({"model.attention_kernel": "flash"}, "attention_kernel is 'flash'; right is: scaled_dot"),
        ({"optimizer.warmup_steps": 27}, "warmup_steps 27 is more than steps 26"),
        ({"cuda_graph": True}, "cuda_graph is True, but device is cpu"),
        ({"low_precision_weights": True}, "low_precision_weights is True, but dtype is float32"),
        (
            {"low_precision_weights": True, "dtype": "bfloat16", "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps is 2",
        ),
        ({"device": "gpu"}, "device is 'gpu'; right is: auto, cpu, cuda"),
        ({"device": "cuda:77"}, "device is 'cuda:77', but"),
        ({"dtype": "float64"}, "dtype is 'float64'; right is: auto, float32"),
        ({"data": None}, "data is None; right is: a folder"),
        ({"data": "/no/such/folder"}, "'/no/such/folder', which has no tokenizer.json"),
        ({"output": __file__}, f"{__file__}: not a folder"),
        ({"output": "/proc/run"}, "/proc/run: cannot be written to"),
    ],
)
def test_bad_settings_are_one_line_before_any_work(config, changes, message, tmp_path, capsys):
    assert message in refusal(config, changes, tmp_path, capsys)


@pytest.fixture
def copied(config, tmp_path):
    """A config whose data can be damaged."""
    copy = shutil.copytree(config.data, tmp_path / "tokens")
    return dataclasses.replace(config, data=copy)


def test_tokens_of_another_tokenizer_are_refused(copied, tmp_path, capsys):
    other = Tokenizer({i: bytes([i]) for i in range(256)}, [], [SEPARATOR])
    other.save(copied.data / "tokenizer.json")
    message = refusal(copied, {}, tmp_path, capsys)
    assert f"{copied.data / 'train.npy'} was made by the tokenizer" in message


@pytest.mark.parametrize("part", ["train", "validation"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [(cut, "bytes; its manifest tells"), (flip, "was altered"), (Path.unlink, "no token array")],
)
def test_damaged_token_arrays_are_refused(copied, part, damage, message, tmp_path, capsys):
    damage(copied.data / f"{part}.npy")
    found = refusal(copied, {}, tmp_path, capsys)
    assert f"{part}.npy" in found
    assert message in found


def test_a_validation_text_of_one_token_is_refused(copied, tmp_path, capsys):
    from lib.data import tokenize_file

    (tmp_path / "one.txt").write_text("a")
    tokenizer = Tokenizer.load(copied.data / "tokenizer.json")
    tokenize_file(tokenizer, tmp_path / "one.txt", copied.data / "validation.npy")
    assert "fewer than 2 tokens" in refusal(copied, {}, tmp_path, capsys)


def test_compiling_without_a_compiler_is_refused(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    message = refusal(config, {"compile": True}, tmp_path, capsys)
    assert "compile is True, which on a CPU needs a C++ compiler" in message


def test_metrics_that_a_checkpoint_counts_on_and_that_are_gone_are_named(stopped):
    (stopped.output / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"metrics\.jsonl has only 0 bytes"):
        train(stopped)
    assert checkpoint_names(stopped.output) == ["step-00000009", "step-00000010"]


def test_a_divergence_is_one_line_on_the_command_line(config, tmp_path, capsys):
    optimizer = dataclasses.replace(OPTIMIZER, learning_rate=1e30)
    config = dataclasses.replace(config, optimizer=optimizer, max_nonfinite_steps=2)
    (tmp_path / "config.json").write_text(to_json(config))
    assert main(["train", "--config", str(tmp_path / "config.json")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: step ")
    assert "lower learning_rate" in last


@pytest.mark.parametrize("name", ["config.json", "run.json", "tokenizer.json"])
def test_what_is_missing_from_a_finished_run_is_written_again(config, straight, name):
    shutil.copytree(straight, config.output)
    (config.output / name).unlink()
    assert train(config).status == "up to date"
    load_model(config.output, device="cpu")
    assert (config.output / name).exists()


@pytest.mark.parametrize("name", ["config.json", "run.json"])
def test_settings_are_not_mixed_when_a_description_is_missing(config, stopped, name):
    (config.output / name).unlink()
    with pytest.raises(ValueError, match=r"a step was 4 windows .* now 2"):
        train(dataclasses.replace(config, batch_size=2))


def test_a_description_that_does_not_tell_how_a_step_is_split_is_that_of_one_process(stopped):
    path = stopped.output / "run.json"
    record = json.loads(path.read_text())
    for name in FACTORS:
        del record[name]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"a step was 4 windows .* now 2"):
        train(dataclasses.replace(stopped, batch_size=2))
    assert train(stopped).status == "finished"


def test_another_split_of_the_same_step_goes_on(stopped, straight):
    parts = {"batch_size": 1, "gradient_accumulation_steps": 4}
    assert train(dataclasses.replace(stopped, **parts)).status == "finished"
    for one, other in zip(lines(stopped.output), lines(straight), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_a_damaged_description_is_named(config, stopped):
    (config.output / "run.json").write_text("{}")
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        train(config)


def test_a_run_that_did_more_steps_is_not_up_to_date(config, straight):
    shutil.copytree(straight, config.output)
    with pytest.raises(ValueError, match=r"steps is 20, but the run in .* has done 26"):
        train(dataclasses.replace(config, steps=20))


def test_a_place_for_checkpoints_that_cannot_be_is_found_out_before_any_step(config):
    config.output.mkdir()
    (config.output / "checkpoints").write_text("a file")
    with pytest.raises(OSError, match="checkpoints"):
        train(config)
    assert not (config.output / "metrics.jsonl").exists()


def test_a_run_whose_folder_vanishes_ends_with_an_error(config):
    def remove(record):
        if record["step"] == 8:
            shutil.rmtree(config.output)

    with pytest.raises(OSError, match="removed while it was trained in"):
        train(config, on_metrics=remove)
