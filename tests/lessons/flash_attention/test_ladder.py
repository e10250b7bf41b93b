"""The ladder of notebook 06, and the recorded timeline of the Hopper kernel."""

import json

import pytest
import torch

pytest.importorskip("triton")

from lib.core.records import new_record
from lib.lessons.flash_attention import ladder_triton, timeline
from lib.lessons.flash_attention.ladder_triton import LADDER, diff, run_rung, watch_rung


def heads(n: int) -> list[torch.Tensor]:
    return list(torch.randn(3, 1, 2, n, 16, generator=torch.Generator().manual_seed(0)).unbind())


@pytest.mark.parametrize("number", range(2, 9))
def test_a_version_differs_from_the_one_before_in_at_most_forty_lines(number):
    assert 1 <= len(diff(number)) <= 40


@pytest.mark.parametrize("n", [33, 48])
def test_versions_agree_and_from_the_third_on_none_loads_what_the_mask_hides(n):
    q, k, v = heads(n)
    expected, loaded = run_rung(LADDER[0], q, k, v), []
    for rung in LADDER[1:5]:
        out, run = watch_rung(rung, q, k, v)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        assert run.faults() == []
        loaded.append(len(run.of("load", "k")))
    assert loaded == [2 * 9, 2 * 6, 2 * 6, 2 * 6]


def test_a_diff_leaves_out_what_is_only_indented_otherwise():
    lines = diff(4)
    assert not any("key = start + tl.arange" in line for line in lines)
    assert any(line.startswith("+") and "static_range" in line for line in lines)
    # but the old line under a new `if` is there
    following = lines[lines.index("+            if phase:") + 1]
    assert following.startswith(" ")
    assert "tl.where(" in following
    assert diff(5) == ["-num_stages=1", "+num_stages=3"]
    assert "+    mbarrier.arrive(turns.index((PART + 1) % CONFIG.WARPGROUPS))" in diff(8)


def test_speeds_come_from_the_newest_record_and_the_rest_is_not_measured(tmp_path, monkeypatch):
    def write(path, steps):
        config = dict(zip(("batch_size", "heads", "keys", "head_dim"), ladder_triton.SHAPE))
        figures = {"steps": {step: {"tflops": speed} for step, speed in steps.items()}}
        record = new_record(figures, config=config | {"direction": "forward"})
        record |= {"device": "GPU", "date": "2026-01-02T"}
        path.write_text(json.dumps(record) + "\n")

    steps, own = tmp_path / "steps.jsonl", tmp_path / "own.jsonl"
    monkeypatch.setattr(ladder_triton, "STEPS", steps)
    monkeypatch.setattr(ladder_triton, "RECORDS", own)
    own.touch()
    write(steps, {"textbook": 2.0, "portable": 100.0, "portable_pipelined": 150.0, "cudnn": 300.0})
    rows, place = ladder_triton.recorded_ladder()
    assert place == "GPU, 2026-01-02"
    assert [row["TFLOP/s"] for row in rows[:5]] == [2.0, *["not measured"] * 2, 100.0, 150.0]
    assert [row["gain"] for row in rows[:5]] == [None] * 3 + [50, 1.5]
    assert rows[-1]["version"] == "cuDNN"
    write(own, {"textbook": 4.0, "every_tile": 40.0})
    assert ladder_triton.recorded_ladder()[0][1]["gain"] == 10


def recorded(is_ordered: bool) -> dict:
    """Steps of 100 clocks: 10 ordering, 20 waiting for scores, 40 of softmax, 5 for the rest."""
    steps = [[100 * i + x for x in (0, 10, 30, 70, 75)] for i in range(8)]
    return {"figures": {"is_ordered": is_ordered, "clocks": [steps] * 3}}


def test_shares_of_a_timeline_are_times_between_stamps():
    shares = timeline.shares(recorded(True))
    assert list(shares.values()) == pytest.approx([0.1, 0.2, 0.4, 0.05, 0.25])


def test_tensor_cores_are_busy_for_their_matmuls_at_the_peak():
    record = recorded(True) | {"config": {"head_dim": 64}}
    # three warpgroups, 64 queries, 128 keys
    assert timeline.mean_step(record) == 100
    assert timeline.busy_share(record) == 3 * 4 * 64 * 128 * 64 / 4096 / 100


def test_without_a_hopper_gpu_a_recording_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="this needs a Hopper GPU"):
        ladder_triton.measure_ladder(tmp_path / "records.jsonl")
