"""The steps on record of notebook 09."""

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
    assert len(records.zero1_steps()) == counted > 10


def test_the_ratio_is_that_of_the_steps_of_a_run():
    runs = {}
    for record in read_records(records.RECORDS):
        figures = record["figures"]
        key = figures["launch"], record["config"]["model"], record["config"]["tr_batch_size"]
        runs.setdefault(key, {})[record["config"]["method"]] = figures
    for found in runs.values():
        if "zero1" in found and found["zero1"]["status"] == "ok":
            medians = found["zero1"]["median_ms"] / found["flashddp"]["median_ms"]
            # the median of ratios is not the ratio of medians, but near it
            assert found["zero1"]["step_ratio"] == pytest.approx(medians, rel=0.05)


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
