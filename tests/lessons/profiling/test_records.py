"""Tables and pictures of notebook 04 from committed records."""

import gzip
import json
import shutil

import pytest
from matplotlib import pyplot as plt

from lib.core.records import append_record
from lib.lessons.profiling import figures, records
from lib.lessons.profiling.records import newest_records


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


@pytest.mark.parametrize(
    ("rows_of", "count", "word"),
    [
        (records.first_steps, 4, "one CUDA graph"),
        (records.calls, 3, "4,096 × 4,096"),
        (records.graph_gains, 2, "times faster"),
        (records.peak_memory, 2, "naive"),
        (records.predicted_steps, 4, "MFU"),
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


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are shown."""
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    yield shown
    plt.close("all")


def test_a_recorded_step_is_drawn_from_its_trace_and_without_one_added_up(
    drawn, tmp_path, monkeypatch
):
    shutil.copytree(records.PROFILES / "eager", tmp_path / "eager")
    monkeypatch.setattr(records, "PROFILES", tmp_path)
    path = tmp_path / "eager/step.json.gz"
    path.unlink(missing_ok=True)
    records.show_gpu_timelines("eager")
    times = {"ph": "X", "pid": 1, "tid": 2, "dur": 5}
    events = [
        times | {"cat": "user_annotation", "name": "training step", "ts": 0, "dur": 20},
        times | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1},
        times | {"cat": "kernel", "name": "sgemm", "ts": 9},
    ]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    records.show_gpu_timelines("eager")
    lanes = [[t.get_text() for t in f.axes[0].get_yticklabels()] for f in drawn]
    assert lanes == [["gpt2-124m, eager: host", "GPU"], ["code", "host launches", "GPU"]]


def test_the_memory_hierarchy_names_each_level_and_its_ridge():
    svg = figures.memory_hierarchy_svg()
    assert all(level.name in svg and level.size in svg for level in figures.LEVELS)
    # 989 TFLOP/s over 4.8 TB/s
    assert ">206<" in svg
