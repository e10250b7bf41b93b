"""Training runs: what they leave behind, and that nothing is lost whatever happens to them."""

import contextlib
import dataclasses
import errno
import json
import math
import os
import random
import shutil
import signal
import sys
import threading
from unittest import mock

import numpy as np
import pytest
import torch

import lib.training.checkpoint
import lib.training.loop
import lib.training.metrics
from lib.__main__ import main
from lib.core.settings import to_json
from lib.data.token_array import load_token_array
from lib.training.checkpoint import load_checkpoint
from lib.training.config import OptimizerConfig, TrainConfig
from lib.training.evaluation import bytes_of_token, evaluate
from lib.training.generation import load_model
from lib.training.loop import train
from lib.training.metrics import read_metrics
from lib.training.step import TrainStep
from tests.training.runs import (
    assert_same_run,
    before_step,
    checkpoint_names,
    contents,
    final_state,
    flip,
    lines,
    signals_at,
)

# A run by itself


def test_a_run_leaves_what_it_was_and_how_it_went(straight):
    names = {path.name for path in straight.iterdir()} - {".lock"}
    assert names == {"config.json", "bpe.json", "run.json", "metrics.jsonl", "checkpoints"}
    assert checkpoint_names(straight) == ["step-00000024", "step-00000026"]
    records = lines(straight)
    kinds = [(r["step"], "loss" if "loss" in r else "validation") for r in records]
    logged = [(step, "loss") for step in (*range(4, 26, 4), 26)]
    assert kinds == sorted([*logged, *((step, "validation") for step in (10, 20, 26))])
    assert all(r["tokens"] == r["step"] * 4 * 8 for r in records)


def test_a_repeated_run_has_the_same_bits_and_a_result_that_tells_of_it(straight, config, capsys):
    records = []
    result = train(config, on_metrics=records.append)
    assert_same_run(config.output, straight)
    assert records == read_metrics(config.output / "metrics.jsonl")
    assert (result.status, result.step, result.output) == ("finished", 26, config.output)
    assert result.checkpoint == config.output / "checkpoints" / "step-00000026"
    assert result.evaluation.loss == records[-1]["validation_loss"]
    # the last line of progress has both losses
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("step 26/26")
    assert f"loss {records[-2]['loss']:.3f}, " in last
    assert f"validation loss {result.evaluation.loss:.3f}" in last


def test_a_line_is_the_mean_of_its_steps_at_the_learning_rate_of_the_last(straight, config):
    train(dataclasses.replace(config, log_interval=1))
    every = [r for r in lines(config.output) if "loss" in r]
    assert [r["step"] for r in every] == list(range(1, 27))
    for record in (r for r in lines(straight) if "loss" in r):
        mine = [r for r in every if (record["step"] - 1) // 4 == (r["step"] - 1) // 4]
        assert record["loss"] == pytest.approx(np.mean([r["loss"] for r in mine]), rel=1e-9)
        assert record["learning_rate"] == mine[-1]["learning_rate"]
    # up to the highest in 4 steps, down to the lowest at the end
    rates = [r["learning_rate"] for r in every]
    assert rates[:4] == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2])
    assert rates[-1] == pytest.approx(1e-3)
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_evaluations_are_those_of_the_saved_model(straight, data):
    model, tokenizer, _ = load_model(straight, "cpu")
    tokens, lengths = load_token_array(data / "validation.npy"), bytes_of_token(tokenizer)
    found = evaluate(model, tokens, lengths, batch_size=4, device="cpu", max_tokens=200)
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert lines(straight)[-1][f"validation_{name}"] == getattr(found, name)


@pytest.mark.parametrize(
    ("dtype", "low"), [("bfloat16", False), ("bfloat16", True), ("float16", False)]
)
def test_every_precision_learns_and_resumes_exactly(config, straight, dtype, low, tmp_path):
    config = dataclasses.replace(config, dtype=dtype, low_precision_weights=low)
    train(config)
    losses = [r["loss"] for r in lines(config.output) if "loss" in r]
    assert losses[-1] < 0.9 * losses[0]
    again = dataclasses.replace(config, output=tmp_path / "again")
    train(again, on_metrics=signals_at(10, signal.SIGTERM))
    assert train(again).status == "finished"
    assert_same_run(again.output, config.output)
    # activations are rounded; weights only if asked for
    found, exact = (lines(path)[-1]["validation_loss"] for path in (config.output, straight))
    assert found != exact
    assert found == pytest.approx(exact, rel=0.03)
    dtypes = {w.dtype for w in load_model(config.output)[0].parameters() if w.ndim == 2}
    assert dtypes == {torch.bfloat16 if low else torch.float32}


def test_training_logs_to_wandb_when_asked_and_goes_on_without_it(config, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert train(dataclasses.replace(config, steps=6, wandb=True)).status == "finished"
    assert "W&B does not work here" in caplog.text


# Killed, stopped, torn, full: a run continues as if nothing had happened


def test_a_stopped_command_says_how_to_go_on_and_ends_with_the_bits_of_one_left_alone(
    config, straight, tmp_path, capsys, caplog
):
    path = tmp_path / "config.json"
    path.write_text(to_json(config))
    command = ["train", "--config", str(path)]
    with before_step(5, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert main(command) == 130
    assert "finishing this step and saving it" in caplog.text
    output = capsys.readouterr().out
    assert "stopped at step 5" in output
    assert "the same command continues from here" in output
    assert main(command) == 0
    assert_same_run(config.output, straight)


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
        (lib.training.checkpoint, "write_tensors"),
        (lib.training.metrics.MetricsLog, "write"),
        (lib.training.loop, "describe_run"),
    ]:
        setattr(owner, name, dying(getattr(owner, name)))
    train(config)


# each starts a process
@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_kills_at_any_write_lose_and_repeat_nothing(config, straight, processes, kills):
    draw = random.Random(0)
    while kills:
        process = processes.Process(target=train_and_die, args=(config, draw.randrange(1, 50)))
        process.start()
        process.join(120)
        if process.exitcode == 0:
            # it ended before its kill: the next one is a new run
            assert_same_run(config.output, straight)
            shutil.rmtree(config.output)
            continue
        assert process.exitcode == -signal.SIGKILL
        kills -= 1
        # a kill in the middle of a line is rare; this is what it would leave
        if draw.random() < 0.5:
            with open(config.output / "metrics.jsonl", "a") as file:
                file.write('{"step": 7, "lo')
    assert train(config).step == config.steps
    assert_same_run(config.output, straight)


def fails_at(step: int):
    def on_metrics(record):
        if record["step"] == step:
            raise RuntimeError("figure")

    return on_metrics


@pytest.mark.parametrize(
    ("on_metrics", "end", "saved"),
    [
        (lambda: signals_at(4, signal.SIGTERM), "stopped", 4),
        (lambda: signals_at(10, signal.SIGINT), "stopped", 10),
        # the last step needs no stop
        (lambda: signals_at(26, signal.SIGINT), "finished", 26),
        # the second interruption ends a run at once
        (lambda: signals_at(10, signal.SIGINT, signal.SIGINT), KeyboardInterrupt, 9),
        (lambda: fails_at(10), RuntimeError, 9),
    ],
)
def test_a_run_that_ends_early_loses_nothing_and_restores_signal_handlers(
    config, straight, on_metrics, end, saved
):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    if isinstance(end, str):
        result = train(config, on_metrics=on_metrics())
        assert (result.status, result.step) == (end, saved)
    else:
        with pytest.raises(end):
            train(config, on_metrics=on_metrics())
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert load_checkpoint(config.output / "checkpoints").step == saved
    assert train(config).status == ("up to date" if saved == 26 else "finished")
    assert_same_run(config.output, straight)


@pytest.mark.parametrize("answers", range(1, 4))
def test_a_stop_at_any_moment_saves_the_step_that_is_reported(config, monkeypatch, answers):
    class Event:
        left = answers

        def is_set(self):
            self.left -= 1
            return self.left < 0

    monkeypatch.setattr(lib.training.loop, "stop_signals", lambda: contextlib.nullcontext(Event()))
    result = train(dataclasses.replace(config, checkpointing_interval=0))
    assert result.status == "stopped"
    assert load_checkpoint(result.checkpoint).step == result.step == answers + 1


def test_a_run_whose_time_is_up_ends_after_the_step_and_continues(config, straight):
    result = train(dataclasses.replace(config, max_seconds=1e-3))
    assert (result.status, result.step) == ("stopped", 1)
    # zero evaluates and saves at the end only
    rest = {"max_seconds": 3600.0, "eval_interval": 0, "checkpointing_interval": 0}
    assert train(dataclasses.replace(config, **rest)).status == "finished"
    assert [r["step"] for r in lines(config.output) if "validation_loss" in r] == [26]
    assert checkpoint_names(config.output) == ["step-00000001", "step-00000026"]
    assert final_state(config.output, 26) == final_state(straight, 26)


@pytest.mark.parametrize(
    ("step", "saved"),
    # between two checkpoints, at one, and at the end, where nothing else is saved by default
    [(10, 9), (15, 15), (26, 26)],
)
def test_an_evaluation_that_fails_loses_nothing_that_was_due(
    config, straight, step, saved, monkeypatch, caplog
):
    config = dataclasses.replace(config, eval_interval=5 if step == 15 else 10)
    calls, original = [], lib.training.loop.evaluate

    def evaluate_or_fail(*arguments, **options):
        calls.append(1)
        if len(calls) == (3 if step > 10 else 1):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(lib.training.loop, "evaluate", evaluate_or_fail)
        with pytest.raises(torch.OutOfMemoryError):
            train(config)
    assert load_checkpoint(config.output / "checkpoints").step == saved
    assert f"the evaluation after step {step} failed; saved: {config.output}" in caplog.text
    load_model(config.output)
    result = train(config)
    assert (result.status, result.evaluation is None) == ("finished", False)
    assert final_state(config.output, 26) == final_state(straight, 26)
    found = [r["step"] for r in lines(config.output) if "validation_loss" in r]
    assert found == [*range(config.eval_interval, 26, config.eval_interval), 26]
    assert train(config).status == "up to date"


def test_an_evaluation_after_its_checkpoint_is_kept_when_the_run_is_resumed(config, monkeypatch):
    # a run that fails in step 13 has saved step 12, and evaluated it after that
    config = dataclasses.replace(config, eval_interval=4, steps=16)
    with before_step(13, mock.Mock(side_effect=RuntimeError("step"))), pytest.raises(RuntimeError):
        train(config)
    before = lines(config.output)
    assert before[-1].keys() > {"validation_loss"}
    with open(config.output / "metrics.jsonl", "a") as file:
        file.write('{"step": 12, "lo')
    steps, original = [], lib.training.loop.evaluate
    evaluate = lambda *a, **k: (steps.append(1), original(*a, **k))[1]  # noqa: E731
    monkeypatch.setattr(lib.training.loop, "evaluate", evaluate)
    with pytest.warns(UserWarning, match=r"metrics\.jsonl:\d+ is not a record, skipped"):
        train(config)
    assert lines(config.output)[: len(before)] == before
    assert [r["step"] for r in lines(config.output) if "validation_loss" in r] == [4, 8, 12, 16]
    assert len(steps) == 1


def test_a_run_in_another_thread_leaves_signals_alone(config):
    results, handlers, before = [], set(), signal.getsignal(signal.SIGINT)

    def work():
        note = lambda record: handlers.add(signal.getsignal(signal.SIGINT))  # noqa: E731
        results.append(train(config, on_metrics=note))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == {before}
    assert results[0].status == "finished"


def test_metrics_are_on_the_disk_before_the_checkpoint_that_counts_on_them(config, monkeypatch):
    calls = []

    def noting(name, original):
        return lambda *a, **k: (calls.append(name), original(*a, **k))[1]

    sync, save = lib.training.metrics.MetricsLog.sync, lib.training.loop.save_checkpoint
    monkeypatch.setattr(lib.training.metrics.MetricsLog, "sync", noting("sync", sync))
    monkeypatch.setattr(lib.training.loop, "save_checkpoint", noting("save", save))
    train(config)
    assert calls == ["sync", "save"] * 9


def test_a_damaged_checkpoint_is_passed_over_and_when_all_are_nothing_is_touched(
    stopped, straight, caplog
):
    old, new = (stopped.output / "checkpoints" / f"step-{step:08d}" for step in (9, 10))
    flip(new / "model.safetensors")
    kept = shutil.copytree(stopped.output, stopped.output.with_name("kept"))
    with caplog.at_level("INFO"):
        assert train(stopped).status == "finished"
    assert "step-00000010 is damaged" in caplog.text
    assert "at step 9" in caplog.text
    assert_same_run(stopped.output, straight)

    shutil.rmtree(kept / "checkpoints" / old.name)
    before = contents(kept)
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole: step-00000010"):
        train(dataclasses.replace(stopped, output=kept))
    assert contents(kept) == before


def test_a_full_disk_leaves_the_checkpoint_before_and_the_run_continues_later(
    stopped, straight, monkeypatch
):
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(lib.training.checkpoint, "write_tensors", mock.Mock(side_effect=full))
        with pytest.raises(OSError, match=r"no space left to write .*step-00000012: it needs"):
            train(stopped)
    assert load_checkpoint(stopped.output / "checkpoints").step == 10
    assert not list((stopped.output / "checkpoints").glob(".step*"))
    assert train(stopped).status == "finished"
    assert_same_run(stopped.output, straight)


def test_a_folder_or_metrics_that_vanish_are_named(stopped):
    (stopped.output / "metrics.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl is missing"):
        train(stopped)
    assert checkpoint_names(stopped.output) == ["step-00000009", "step-00000010"]

    fresh = dataclasses.replace(stopped, output=stopped.output.with_name("fresh"))
    with pytest.raises(OSError, match="removed during training"):
        train(fresh, on_metrics=lambda record: shutil.rmtree(fresh.output))


# Resuming with other settings


def test_a_finished_run_can_be_made_longer_but_not_shorter(straight, config):
    shutil.copytree(straight, config.output)
    result = train(dataclasses.replace(config, steps=33))
    assert (result.status, result.step) == ("finished", 33)
    assert lines(config.output)[: len(lines(straight))] == lines(straight)
    assert [r["step"] for r in lines(config.output) if "loss" in r][-3:] == [28, 32, 33]
    assert json.loads((config.output / "config.json").read_text())["steps"] == 33
    assert checkpoint_names(config.output) == ["step-00000030", "step-00000033"]
    with pytest.raises(ValueError, match=r"steps must be at least 33, which the run in .*, got 20"):
        train(dataclasses.replace(config, steps=20))


def test_how_a_run_is_logged_and_saved_may_change(stopped, straight):
    changes = {"log_interval": 2, "eval_interval": 0, "keep_last": 1, "checkpointing_interval": 5}
    assert train(dataclasses.replace(stopped, **changes)).status == "finished"
    assert final_state(stopped.output, 26) == final_state(straight, 26)


# Losses that are not finite


def test_a_learning_rate_that_is_far_too_high_ends_with_a_named_error(config, tmp_path, capsys):
    optimizer = OptimizerConfig(learning_rate=1e30, min_learning_rate=0, warmup_steps=0)
    config = dataclasses.replace(config, optimizer=optimizer, max_nonfinite_steps=6)
    (tmp_path / "config.json").write_text(to_json(config))
    assert main(["train", "--config", str(tmp_path / "config.json")]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    # the first step still had finite weights
    assert message.startswith("error: step 7: loss ")
    assert "gradient norm nan at learning rate 8.32e+29" in message
    assert "consecutive non-finite step 6 (max_nonfinite_steps)" in message
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
    # the mean of no steps
    assert math.isnan(losses.pop(8))
    assert all(map(math.isfinite, losses.values()))
    assert '"loss": "nan"' in (config.output / "metrics.jsonl").read_text()


def test_only_consecutive_steps_end_a_run_also_across_an_interruption(config, monkeypatch):
    poison(monkeypatch, 2, 3, 5, 6, 8, 9, 12, 13, 14)
    config = dataclasses.replace(config, max_nonfinite_steps=3)
    assert train(config, on_metrics=signals_at(12, signal.SIGTERM)).step == 12
    with pytest.raises(FloatingPointError, match="step 14"):
        train(config)
