"""From a corpus to a tokenizer, token arrays, a model and its text; each step only when needed."""

import dataclasses
import threading
from contextlib import nullcontext

import pytest

from lib.training.config import SampleConfig
from lib.training.pipeline import run_pipeline
from lib.training.step import TrainStep
from tests.data.books import silent, tokenize
from tests.training.runs import small_pipeline


@pytest.fixture
def whole(tmp_path):
    return small_pipeline(tmp_path, "The cat", "", runs_dir=tmp_path / "runs")


def run(config):
    return run_pipeline(config, progress_bar=silent)


def with_training(config, **changes):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


def stamps(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_pipeline_ends_with_a_model_and_its_text_and_again_trains_nothing(
    whole, tmp_path, monkeypatch
):
    rows, before, texts = run(whole)
    assert [row["step"] for row in rows] == ["tokenizer", "train", "validation"]
    assert (before.status, before.step) == ("finished", 8)
    assert before.output.parent == tmp_path / "runs"
    assert texts[0].startswith("The cat")
    assert all(len(text) > len(prompt) for text, prompt in zip(texts, whole.sample.prompts))

    files = stamps(tmp_path)
    monkeypatch.setattr(TrainStep, "__call__", lambda *a: pytest.fail("it trains"))
    rows, after, again = run(whole)
    assert all(row["MB_per_s"] is None for row in rows)
    assert after.status == "up to date"
    assert (after.output, after.checkpoint) == (before.output, before.checkpoint)
    assert again == texts
    changed = {path.name for path, time in stamps(tmp_path).items() if files.get(path) != time}
    assert changed <= {".lock"}
    # nor does another sample need training
    sample = SampleConfig(prompts=("The dog",), max_new_tokens=0)
    _, result, texts = run(dataclasses.replace(whole, sample=sample))
    assert (result.status, texts) == ("up to date", ["The dog"])


def test_without_the_data_step_the_arrays_that_there_are_are_used(whole, tmp_path):
    _, before, texts = run(whole)
    (tmp_path / "book.txt").unlink()
    skipping = with_training(whole, data=tmp_path / "out")
    rows, result, again = run(dataclasses.replace(skipping, skip_data=True))
    assert rows == []
    assert (result.status, result.output, again) == ("up to date", before.output, texts)


def test_data_that_are_given_are_trained_on_in_place_of_the_corpus(whole, tmp_path):
    other = tokenize(whole.corpus, output=tmp_path / "other", vocab_size=280)
    _, result, _ = run(with_training(whole, data=tmp_path / "other"))
    assert result.output.name.startswith("other-")
    assert other["tokenizer"]["tokens"] == 280


def test_a_stopped_pipeline_has_no_text_and_goes_on(whole, monkeypatch):
    stop = threading.Event()
    stop.set()
    with monkeypatch.context() as patch:
        patch.setattr("lib.training.loop.stop_signals", lambda: nullcontext(stop))
        rows, result, texts = run(whole)
    assert (len(rows), result.status, texts) == (3, "stopped", [])
    _, after, texts = run(whole)
    assert (after.status, after.step, after.output) == ("finished", 8, result.output)
    assert len(texts) == 2
