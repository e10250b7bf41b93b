"""The broken runs of notebook 03: what is recorded, and that each fault shows."""

import numpy as np
import pytest

from lib.lessons.training import faults
from lib.lessons.training.broken import FAULTS, read_broken_runs, read_run
from lib.lessons.training.faults import HEALTHY, NO_WARM_UP, train_with


@pytest.fixture(scope="module")
def history():
    """A short run with each fault, on numbers that follow one another."""
    tokens = np.tile(np.arange(40), 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "STEPS", 12)
        patch.setattr(faults, "WARMUP_STEPS", 4)
        patch.setattr(faults, "BATCH_SIZE", 2)
        patch.setattr(faults, "SHAPE", faults.SHAPE | {"context_length": 16, "d_model": 32})
        return {
            fault: train_with(fault, tokens, tokens, 40)
            for fault in (HEALTHY, NO_WARM_UP, *FAULTS.values())
        }


def test_each_fault_changes_the_run(history):
    losses = [run["loss"] for run in history.values()]
    assert len({tuple(loss) for loss in losses}) == len(losses) == 8


def test_a_fault_shows_where_the_notebook_says(history):
    healthy = history[HEALTHY]
    assert history["targets not shifted"]["loss"][0] != healthy["loss"][0]
    peaks = {fault: run["attention_peak"][0] for fault, run in history.items()}
    assert max(peaks, key=peaks.get) == "scores not scaled"
    # the same until the schedules differ, when the warm-up is over
    early = history["schedule over too early"]["loss"]
    assert early[:4] == healthy["loss"][:4]
    assert early[-1] != healthy["loss"][-1]
    assert history["gradients not cleared"]["grad_norm"][1] > healthy["grad_norm"][1]


def test_the_committed_records_hold_every_run():
    runs = read_broken_runs()
    assert runs.keys() == {HEALTHY, *FAULTS}
    assert all(run["run"] == FAULTS.get(name, HEALTHY) for name, run in runs.items())
    runs[NO_WARM_UP] = read_run(NO_WARM_UP)
    assert all(len(run["loss"]) == faults.STEPS for run in runs.values())
