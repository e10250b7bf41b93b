"""Tables and pictures of notebook 04 from committed records."""

from functools import partial

import pytest

from lib.core.records import append_record
from lib.lessons.profiling import records
from lib.lessons.profiling.records import newest_records
from lib.profiling.trace import edges, union
from lib.profiling.trace import total as trace_total


def record(device="GPU A", **values):
    return {"device": device, "date": "2026-01-02T03:04:05+00:00", "figures": values}


def test_of_records_for_the_same_thing_the_last_stays(tmp_path):
    path = tmp_path / "a.jsonl"
    assert newest_records(path) == []
    for ms in (1, 2):
        append_record(path, record(task="step", model="m", candidate="all", ms=ms) | {"config": ms})
    append_record(path, record(task="step", model="m", candidate="none", ms=3) | {"config": 1})
    append_record(path, record("GPU B", task="step", model="m", candidate="all", ms=4))
    # without a task, the config tells them apart
    for length, ms in ((1, 5), (2, 6), (1, 7)):
        append_record(path, record(ms=ms) | {"config": {"seq_len": length}})
    assert [r["figures"]["ms"] for r in newest_records(path)] == [2, 3, 4, 7, 6]


def test_a_table_has_the_date_of_its_own_rows_and_not_of_the_rest_of_the_file(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(records, "ARTIFACTS", tmp_path)
    shown = record(task="call", size=256, returned_ms=1.0, done_ms=2.0)
    later = record(task="size", numbers=16, min_ms=1.0) | {"date": "2026-05-06T00:00:00+00:00"}
    for one in (shown, later):
        append_record(tmp_path / "roofline.jsonl", one | {"config": None})
    assert len(records.calls()) == 1
    assert capsys.readouterr().out == "GPU A, 2026-01-02\n"


@pytest.mark.parametrize(
    ("rows_of", "count", "word"),
    [
        (records.calls, 3, "4,096 × 4,096"),
        (records.ways_to_launch, 2, "one CUDA graph"),
        (records.launch_bound_steps, 4, "launches"),
        (records.peak_memory, 2, "naive"),
        (partial(records.predicted_steps, 0.04), 4, "MFU"),
    ],
)
def test_a_table_names_its_machine_and_has_its_rows(rows_of, count, word, capsys):
    rows = rows_of()
    assert "NVIDIA H200, 2026-" in capsys.readouterr().out
    assert len(rows) == count
    assert word in str(rows)


def test_a_recorded_block_reaches_no_more_than_its_roof_and_causal_attention_counts_half():
    limits, points, words = records.block_on_gpu()
    assert "gpt2-124m, bfloat16, 32 × 1,024 tokens, NVIDIA H200" in words
    shares = {point.name: limits.share(point) for point in points}
    assert max(shares.values()) < 1
    assert shares["attention, fused"] == pytest.approx(0.42, abs=0.01)


@pytest.mark.parametrize("folder", records.PROFILE_NAMES)
def test_a_recorded_trace_has_the_kernels_and_launches_of_its_summary(folder):
    trace, profile = records.recorded_trace(folder), records.profiles()[folder]
    launched = {call.correlation for call in trace.calls}
    own = [kernel for kernel in trace.kernels if kernel.correlation in launched]
    assert len(own) == pytest.approx(profile.kernels, abs=1)
    busy_ms = trace_total(union(edges(own))) / 1e3
    assert busy_ms == pytest.approx(profile.busy_ms, rel=0.02)
    size = (records.PROFILES / folder / "step.json.gz").stat().st_size
    assert size < 300_000
