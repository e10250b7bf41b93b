"""Kept runs are listed with what they are, and removed only when that was confirmed."""

import io
import json
import os
import shutil
import time

import pytest

from lib.__main__ import main
from lib.core.files import lock_folder, try_lock_folder
from lib.training.runs import (
    RemoveRunsConfig,
    RunsConfig,
    age_in_words,
    list_runs,
    remove_runs,
)


@pytest.fixture
def folder(tmp_path):
    """A finished run, and an older one that was interrupted before its first checkpoint."""
    for step in (50, 100):
        checkpoint = tmp_path / f"good/checkpoints/step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "model.safetensors").write_bytes(bytes(1_500_000))
    lines = [{"validation_loss": 1.0, "validation_bits_per_byte": 0.5}, {"loss": 1.0}]
    (tmp_path / "good/metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "started").mkdir()
    (tmp_path / "started/config.json").touch()
    old = time.time() - 3 * 86_400
    os.utime(tmp_path / "started/config.json", (old, old))
    (tmp_path / "speedrun.jsonl").touch()
    return tmp_path


def test_runs_are_listed_with_step_judgment_size_and_age_the_newest_first(folder, capsys):
    assert list_runs(RunsConfig(folder)) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells == [
        ["good", "100", "0.500", "3.00", "0 min"],
        ["started", "–", "–", "0", "3 days"],
    ]
    assert list_runs(RunsConfig(folder / "none")) == 0
    assert "no runs in" in capsys.readouterr().out


@pytest.mark.parametrize(("answer", "goes"), [("y", True), ("yes", True), ("", False)])
def test_a_run_is_removed_only_after_a_yes(folder, capsys, monkeypatch, answer, goes):
    asked = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or answer)
    assert remove_runs(RemoveRunsConfig(folder, ("good",))) == int(not goes)
    assert asked == ["Remove good, 3.0 MB, 0 min old? [y/N] "]
    assert (folder / "good").exists() is not goes
    assert (folder / "started").exists()


def test_where_nobody_can_answer_nothing_is_removed_but_with_yes(folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert remove_runs(RemoveRunsConfig(folder, ("good", "started"))) == 1
    assert (folder / "good").exists()
    # words after the command are names
    words = ["good", "started", "--yes", "--runs_dir", str(folder)]
    assert main(["runs", "remove", *words]) == 0
    assert [path.name for path in folder.iterdir()] == ["speedrun.jsonl"]


@pytest.mark.parametrize("names", [(), ("good", "bad"), ("../good",), ("speedrun.jsonl",)])
def test_a_name_that_is_no_run_is_refused_before_anything_is_removed(folder, names):
    with pytest.raises(ValueError, match="names must be runs in"):
        remove_runs(RemoveRunsConfig(folder, names, yes=True))
    assert (folder / "good").exists()


@pytest.mark.parametrize("yes", [True, False])
def test_a_run_that_is_being_trained_is_not_removed_and_none_beside_it(folder, monkeypatch, yes):
    monkeypatch.setattr("builtins.input", lambda question: "y")
    config = RemoveRunsConfig(folder, ("started", "good"), yes)
    with lock_folder(folder / "good"), pytest.raises(ValueError, match="training, got good"):
        remove_runs(config)
    assert (folder / "good/metrics.jsonl").exists()
    assert (folder / "started").exists()
    assert remove_runs(config) == 0


def test_a_run_is_locked_while_it_is_removed(folder, monkeypatch):
    rmtree, calls = shutil.rmtree, []

    def noting(path):
        calls.append(path)
        with try_lock_folder(path) as is_free:
            assert not is_free
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", noting)
    assert remove_runs(RemoveRunsConfig(folder, ("good",), yes=True)) == 0
    assert calls == [folder / "good"]
    assert sorted(path.name for path in folder.iterdir()) == ["speedrun.jsonl", "started"]


def test_ages_are_whole_units():
    ages = [age_in_words(seconds) for seconds in (-5, 59, 3_599, 3_600, 7_200, 86_400, 200_000)]
    assert ages == ["0 min", "0 min", "59 min", "1 hour", "2 hours", "1 day", "2 days"]
