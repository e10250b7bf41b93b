"""The steps on H200s that notebook 08 shows, and the prediction that is fitted to them."""

import json

import pytest

from lib.lessons.ddp import records
from lib.lessons.ddp.costs import H200_INTERFERENCE, H200_LINKS, Interference
from lib.profiling.collectives import fit_link

STEPS = records.gpu_steps()
STEADY = records.steady(STEPS)


def worst(steps, interference=H200_INTERFERENCE) -> float:
    return max(abs(step.error(interference)) for step in steps)


def test_every_steady_step_of_the_two_best_wrappers_is_predicted_within_two_points():
    chosen = [step for step in STEADY if step.wrapper in ("flashddp", "torch_ddp")]
    assert len(chosen) >= 25
    assert worst(chosen) < 2
    assert worst(chosen, Interference()) > 9


@pytest.mark.parametrize("changed", [(0.36, 0.051), (0.48, 0.051), (0.42, 0.048), (0.42, 0.054)])
def test_no_neighbor_fits_better(changed):
    ours = [step for step in STEADY if step.wrapper == "flashddp"]
    assert worst(ours) < worst(ours, Interference(*changed))


def test_messages_after_backward_are_predicted_but_for_one_setting():
    wrong = [step for step in STEADY if abs(step.error()) > 2]
    assert {(step.model, step.how) for step in wrong} == {("matrix", "CUDA graph")}
    assert {step.wrapper for step in wrong} == {"naive", "flat", "overlap"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_links_are_those_fitted_to_the_records(ranks):
    link = fit_link("all_reduce", ranks, records.all_reduces(ranks).items())
    assert (link.latency_us, link.bandwidth_gbs) == pytest.approx(
        (H200_LINKS[ranks].latency_us, H200_LINKS[ranks].bandwidth_gbs), rel=0.005
    )


def test_a_step_stands_beside_the_rank_alone_of_its_run():
    for step in STEPS:
        # medians of times, and of their ratios epoch by epoch
        assert step.alone_ms / step.step_ms == pytest.approx(step.efficiency, abs=0.15)
    assert {step.how for step in STEPS} == {"eager", "compiled", "CUDA graph"}


def test_failed_trainings_and_those_on_cpus_are_left_out(tmp_path, monkeypatch):
    lines = [json.loads(line) for line in records.RECORDS.read_text().splitlines()][:6]
    monkeypatch.setattr(records, "RECORDS", tmp_path / "records.jsonl")
    lines[2]["figures"]["status"], lines[3]["config"]["backend"] = "oom", "gloo"
    records.RECORDS.write_text("\n".join(map(json.dumps, lines)))
    assert len(records.gpu_steps()) == 3
