"""What is checked before a run, how its folder is named, and which run a folder belongs to."""

import dataclasses
import errno
import json
import shutil
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

import lib.core.files
import lib.training.checkpoint
import lib.training.metrics
import lib.training.run_folder
from lib.__main__ import main
from lib.core.files import lock_folder
from lib.core.settings import to_dict
from lib.data.token_array import tokenize_file
from lib.tokenizer.bpe import Tokenizer
from lib.training.generation import load_model
from lib.training.loop import train
from lib.training.run_folder import open_run, run_folder
from lib.training.step import TrainStep
from tests.training.runs import (
    BYTES,
    MODEL,
    OPTIMIZER,
    assert_same_run,
    contents,
    flip,
    tokenized,
    truncate,
)

CPU = torch.device("cpu")

SHORT = {"low_precision_weights": True, "dtype": "bfloat16"}

# Bad input is named before any work


def refusal(config, changes, tmp_path, capsys) -> str:
    """What the command prints, which is one line and leaves no run behind."""
    fields = to_dict(config)
    for path, value in changes.items():
        owner = fields["model"] if path.startswith("model.") else fields
        owner[path.removeprefix("model.")] = value
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert main(["train", "--config", str(tmp_path / "config.json")]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert not (config.output / "metrics.jsonl").exists()
    assert not (config.output / "checkpoints").exists()
    return message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.context_length": 10**6}, "context_length"),
        ({"batch_size": 10**6}, "batch_size"),
        ({"gradient_accumulation_steps": 10**6}, "batch_size 4 * gradient_accumulation_steps"),
        ({"model.vocab_size": 280}, "vocab_size must be at least 300"),
        ({"cuda_graph": True}, "cuda_graph must be False on device cpu"),
        ({"low_precision_weights": True}, "dtype must be bfloat16 or float16 with low_precision"),
        (SHORT | {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps must be 1 with"),
        ({"device": "cuda:77"}, "'cuda:77'"),
        ({"data": None}, "data must be a folder made by"),
        ({"data": "/no/such/folder"}, "'/no/such/folder', which has no bpe.json"),
        ({"output": __file__}, f"{__file__}: not a folder"),
        ({"output": "/proc/run"}, "/proc/run: cannot be written to"),
    ],
)
def test_bad_settings_are_one_line_before_any_work(config, changes, message, tmp_path, capsys):
    assert message in refusal(config, changes, tmp_path, capsys)


def test_tensorboard_without_its_package_is_refused(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    message = refusal(config, {"tensorboard": True}, tmp_path, capsys)
    assert "tensorboard must be False without its package (pip install tensorboard)" in message


def leave_one_token(data: Path) -> None:
    (data / "one.txt").write_text("a")
    tokenize_file(Tokenizer.load(data / "bpe.json"), data / "one.txt", data / "validation.npy")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: BYTES.save(data / "bpe.json"), "train.npy"),
        (lambda data: truncate(data / "validation.npy"), "validation.npy"),
        (lambda data: flip(data / "validation.npy"), "validation.npy"),
        (lambda data: (data / "validation.npy").unlink(), "validation.npy"),
        (leave_one_token, "must have at least 2 tokens, got 1"),
    ],
)
def test_data_that_are_damaged_or_not_of_the_tokenizer_are_refused(
    config, damage, message, tmp_path, capsys
):
    copy = shutil.copytree(config.data, tmp_path / "tokens")
    damage(copy)
    assert message in refusal(dataclasses.replace(config, data=copy), {}, tmp_path, capsys)


def test_the_vocabulary_is_the_tokenizers_or_padded(config, straight):
    model, tokenizer, saved = load_model(straight)
    assert tokenizer.vocab_size == saved.model.vocab_size == len(model.output_weight) == 300
    padded = dataclasses.replace(MODEL, vocab_size=320)
    assert train(dataclasses.replace(config, model=padded)).status == "finished"
    assert len(load_model(config.output)[0].output_weight) == 320


# The name of a folder


def test_without_an_output_settings_and_content_of_the_data_name_the_folder(config, tmp_path):
    config = dataclasses.replace(config, output=None, runs_dir=tmp_path / "runs")

    def folder(**changes):
        return open_run(dataclasses.replace(config, **changes)).folder

    name = folder()
    assert name.parent == tmp_path / "runs"
    assert name.name.startswith(config.data.name)
    # logging and saving do not change what is learned, nor does a copy of the data
    copy = shutil.copytree(config.data, tmp_path / "copy" / config.data.name)
    assert folder(log_interval=9, checkpointing_interval=0, wandb=True, keep_last=9) == name
    assert folder(data=copy) == name
    names = {
        name,
        folder(seed=1),
        folder(steps=27),
        folder(dtype="bfloat16"),
        folder(batch_size=2),
        folder(model=dataclasses.replace(MODEL, norm="post")),
        folder(optimizer=dataclasses.replace(OPTIMIZER, beta2=0.9)),
        folder(data=tokenized(tmp_path / "elsewhere", seed=1)),
    }
    assert len(names) == 8


def test_how_a_step_is_split_does_not_change_a_runs_folder(config):
    def name(num_ranks, **changes):
        return run_folder(dataclasses.replace(config, **changes), {"train": "0"}, num_ranks, CPU)

    assert name(2) == name(1, batch_size=8) == name(1, gradient_accumulation_steps=2)
    assert name(2) != name(1)


# A folder that holds a run


def test_a_finished_run_is_up_to_date_and_nothing_is_written(straight, config, monkeypatch):
    shutil.copytree(straight, config.output)
    before = contents(config.output)
    monkeypatch.setattr(TrainStep, "__call__", lambda *a: pytest.fail("it trains"))
    # as on a disk that is read-only
    refuse = mock.Mock(side_effect=OSError(errno.EROFS, "Read-only file system"))
    for name in ("make_folder", "lock_folder", "write_atomically"):
        monkeypatch.setattr(lib.training.run_folder, name, refuse)
    result = train(config)
    assert (result.status, result.step, result.evaluation) == ("up to date", 26, None)
    assert result.checkpoint == config.output / "checkpoints" / "step-00000026"
    assert contents(config.output) == before
    with pytest.raises(OSError, match="Read-only"):
        train(dataclasses.replace(config, steps=27))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 5}, "a step was 4 sequences = .*, now 5 = .*; batch_size 4 would fit"),
        ({"dtype": "bfloat16"}, "dtype was float32, now bfloat16"),
        ({"model": dataclasses.replace(MODEL, d_ff=64)}, "model.d_ff was 32, now 64"),
        ({"gradient_accumulation_steps": 2}, "now 8 = .*; batch_size 2 would fit"),
        (
            lambda folder: {"data": tokenized(folder, seed=1)},
            "data.train was .*validation was",
        ),
        # no batch_size fits
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps 3 × world_size 1; give"),
    ],
)
def test_other_settings_or_data_in_the_same_folder_are_refused_by_name(
    stopped, changes, message, tmp_path
):
    before = contents(stopped.output)
    with pytest.raises(ValueError, match=message) as caught:
        train(dataclasses.replace(stopped, **changes(tmp_path) if callable(changes) else changes))
    assert str(stopped.output) in str(caught.value)
    # nothing that stayed the same is listed
    assert str(caught.value).count(" was ") == (3 if callable(changes) else 1)
    assert contents(stopped.output) == before


def test_another_attention_kernel_continues_the_same_run_and_is_said(stopped, caplog):
    data = {"train": "0"}
    kernel = {"model": dataclasses.replace(MODEL, attention_kernel="vectorized_torch")}
    other = dataclasses.replace(stopped, **kernel)
    assert run_folder(other, data, 1, CPU) == run_folder(stopped, data, 1, CPU)
    with caplog.at_level("INFO"):
        assert train(other).status == "finished"
    assert "attention_kernel was sdpa, now vectorized_torch" in caplog.text
    # and a finished run is finished with any kernel
    assert train(stopped).status == "up to date"


def test_the_dtype_that_auto_picks_continues_the_same_run_under_its_name(config):
    first, second = (
        dataclasses.replace(config, dtype=name, steps=3) for name in ("auto", "float32")
    )
    assert run_folder(first, {"train": "0"}, 1, CPU) == run_folder(second, {"train": "0"}, 1, CPU)
    assert train(first).status == "finished"
    assert train(second).status == "up to date"
    assert train(dataclasses.replace(second, steps=6)).status == "finished"
    assert train(dataclasses.replace(first, steps=6)).status == "up to date"


def test_a_run_that_another_process_starts_in_the_folder_meanwhile_is_seen(
    config, straight, caplog
):
    errors = []

    def work():
        try:
            train(dataclasses.replace(config, resume=False))
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
    assert "hold no run" in errors[0]
    assert_same_run(config.output, straight)


def test_without_resume_a_folder_must_hold_no_run(config, half, straight):
    fresh = dataclasses.replace(config, resume=False)
    train(fresh)
    assert_same_run(config.output, straight)
    before = contents(half)
    with pytest.raises(ValueError, match="output must hold no run when resume is False"):
        train(dataclasses.replace(fresh, output=half))
    assert contents(half) == before


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "train.npy"])
def test_files_of_something_else_are_not_overwritten(config, name):
    config.output.mkdir()
    (config.output / name).write_text('{"model_type": "gpt2"}\n')
    before = contents(config.output)
    message = f"output must be new or the folder of a run, got .* which has {name} but neither"
    with pytest.raises(ValueError, match=message):
        train(config)
    assert contents(config.output) == before


@pytest.mark.parametrize(
    "name",
    ["config.json", "run.json", "bpe.json", "checkpoints/step-00000026/model.safetensors"],
)
def test_what_is_missing_from_a_finished_run_is_made_again(config, straight, name):
    shutil.copytree(straight, config.output)
    (config.output / name).unlink()
    assert train(config).status == "finished"
    assert (config.output / name).exists()
    assert_same_run(config.output, straight)
