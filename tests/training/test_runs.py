"""Kept runs are listed with what they are."""

import json
import os
import time

import pytest

from lib.training.runs import RunsConfig, age_in_words, list_runs


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


def test_ages_are_whole_units():
    ages = [age_in_words(seconds) for seconds in (-5, 59, 3_599, 3_600, 7_200, 86_400, 200_000)]
    assert ages == ["0 min", "0 min", "59 min", "1 hour", "2 hours", "1 day", "2 days"]
