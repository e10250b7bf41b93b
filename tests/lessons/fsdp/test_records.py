"""The steps of FSDP on GPUs that notebook 10 shows."""

import json

from lib.lessons.fsdp import records


def test_failed_trainings_and_those_on_cpus_are_left_out(tmp_path, monkeypatch):
    lines = [json.loads(line) for line in records.RECORDS.read_text().splitlines()]
    monkeypatch.setattr(records, "RECORDS", tmp_path / "records.jsonl")
    for line in lines:
        line["config"]["backend"] = "gloo"
    records.RECORDS.write_text("\n".join(map(json.dumps, lines)))
    assert records.steps_on_two_h100s() == []


def test_a_step_of_ours_on_h100s_stands_beside_fsdp2_and_as_a_graph_beside_ddp():
    rows = records.steps_on_two_h100s()
    found = {(row["model"], row["kernels start"]): row for row in rows}
    for model in ("large", "xl", "2.7b"):
        assert found[model, "one by one"]["fsdp"] < found[model, "one by one"]["fsdp2"]
    graph = found["large", "as a CUDA graph"]
    assert graph["fsdp2"] is None
    assert not any(row["model"] == "8b" for row in rows)


def test_the_largest_model_fits_as_the_formula_says():
    step = records.step_of_8b()
    assert step["not hidden (ms)"] < step["messages (ms)"] < 1e3 * step["seconds"]
    assert abs(step["peak (GB)"] / step["by formula (GB)"] - 1) < 0.03
