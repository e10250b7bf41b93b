"""The steps on record of notebook 08."""

import json

import pytest

from lib.core.records import read_records
from lib.lessons.zero1 import records


def test_every_run_of_zero1_on_gpus_is_a_row():
    counted = sum(
        record["config"]["backend"] == "nccl"
        and record["config"]["method"] == "zero1"
        and record["figures"]["status"] == "ok"
        for record in read_records(records.RECORDS)
    )
    rows = records.zero1_steps()
    assert len(rows) == counted > 10
    for row in rows:
        assert {"zero1", "flashddp"} <= row["step (ms)"].keys()
        medians = row["step (ms)"]["zero1"] / row["step (ms)"]["flashddp"]
        # the median of ratios is not the ratio of medians, but near it
        assert row["zero1 ÷ flashddp"] == pytest.approx(medians, rel=0.05)


def test_runs_on_cpus_and_failed_ones_are_left_out(tmp_path, monkeypatch):
    lines = records.RECORDS.read_text(encoding="utf-8").splitlines()
    changed = []
    for number, record in enumerate(map(json.loads, lines)):
        if record["config"]["method"] == "zero1":
            part, key, value = [("config", "backend", "gloo"), ("figures", "status", "oom")][
                number % 2
            ]
            record[part][key] = value
        changed.append(json.dumps(record))
    monkeypatch.setattr(records, "RECORDS", tmp_path / "records.jsonl")
    records.RECORDS.write_text("\n".join(changed), encoding="utf-8")
    assert records.zero1_steps() == []
