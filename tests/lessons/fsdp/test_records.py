"""The steps of FSDP2 on H200s that notebook 09 shows."""

import json

from lib.lessons.fsdp import records


def test_each_step_of_fsdp2_stands_beside_that_of_the_same_run():
    rows = records.fsdp2_steps()
    assert {(row["model"], row["ranks"]) for row in rows} >= {("large", 2), ("xl", 2), ("xl", 4)}
    for row in rows:
        assert abs(row["fsdp2 (ms)"] / row["flashddp (ms)"] - row["ratio"]) < 0.1 * row["ratio"]


def test_failed_trainings_and_those_on_cpus_are_left_out(tmp_path, monkeypatch):
    lines = [json.loads(line) for line in records.RECORDS.read_text().splitlines()]
    lines = [line for line in lines if line["config"]["method"] in ("fsdp2", "flashddp")]
    monkeypatch.setattr(records, "RECORDS", tmp_path / "records.jsonl")
    for line in lines:
        line["config"]["backend"] = "gloo"
    records.RECORDS.write_text("\n".join(map(json.dumps, lines)))
    assert records.fsdp2_steps() == []
