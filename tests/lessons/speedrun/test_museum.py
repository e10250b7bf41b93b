"""The museum of broken runs: what is recorded shows, and each fault shows where it should."""

import numpy as np
import pytest

from lib.lessons.speedrun.museum import FAULTS, read_museum, symptoms
from lib.lessons.training import faults
from lib.lessons.training.faults import HEALTHY, STEPS

RUNS = read_museum()
BY_NAME = {FAULTS.get(number, HEALTHY): run for number, run in RUNS.items()}
TABLE = {FAULTS.get(row["run"], HEALTHY): row for row in symptoms(RUNS)}


def test_there_are_at_least_twelve_faults_on_record():
    assert len(FAULTS) >= 12
    assert all(len(run["loss"]) == STEPS for run in RUNS.values())


def test_no_two_runs_have_the_same_symptoms():
    shown = [tuple(value for key, value in row.items() if key != "run") for row in TABLE.values()]
    assert len({*shown}) == len(shown)


def test_each_fault_shows_in_the_symptom_that_tells_it():
    healthy = TABLE[HEALTHY]
    last, out, norm, gap = "last loss", "held out", "median norm", "ranks' weights differ by"
    # better than any model can be, on all text or on its own batch alone
    for fault in ("no causal mask", "targets not shifted"):
        assert TABLE[fault][out] < healthy[out] - 0.5, fault
    assert TABLE["same batch"][last] < 0.1
    assert TABLE["same batch"][out] > 2 * healthy[out]
    for fault in ("targets two ahead", "learning rate too high", "schedule over too early"):
        assert TABLE[fault][out] > healthy[out] + 1, fault
    assert TABLE["embedding starts too large"]["first loss"] > 2 * healthy["first loss"]
    peak = {fault: run["attention_peak"][0] for fault, run in BY_NAME.items()}
    assert peak["scores not scaled"] > 2 * peak[HEALTHY]
    ends = {fault: run["loss_by_position"] for fault, run in BY_NAME.items()}
    worse = np.subtract(ends["last tile of queries never written"], ends[HEALTHY])
    assert min(worse[-2:]) > max(worse[:6]) + 0.3
    added, kept = TABLE["gradients added, not averaged"], TABLE["gradients not cleared"]
    assert added[norm] == pytest.approx(2 * healthy[norm], rel=0.1)
    assert added[last] == pytest.approx(healthy[last], abs=0.1)
    assert kept[norm] > 1.5 * healthy[norm]
    assert kept[last] > healthy[last] + 0.3
    # what only ranks show
    assert TABLE["both ranks read the same batches"]["ranks' losses differ by"] == 0
    apart = ("gradients not exchanged", "different initial weights")
    for fault, row in TABLE.items():
        assert (row[gap] > 0) == (fault in apart), fault


@pytest.mark.parametrize("fault", [HEALTHY, "gradients not exchanged"])
def test_ranks_stay_equal_where_their_gradients_are_averaged(fault, monkeypatch):
    monkeypatch.setattr(faults, "STEPS", 10)
    monkeypatch.setattr(faults, "WARMUP_STEPS", 2)
    tokens = np.arange(2000) % 50
    history = faults.train_with(fault, tokens, tokens, 64, ranks=2)
    assert (history["weight_gap"][-1] == 0) == (fault == HEALTHY)
    assert len(history["loss"]) == len(history["loss_of_rank_1"]) == 10
