"""The links and the interference of H200s, against the records that they are fitted to."""

import math
from typing import NamedTuple

import pytest

from lib.core.files import ROOT
from lib.core.records import read_records, records
from lib.lessons.ddp.costs import (
    BACKWARD_SHARE,
    H200_INTERFERENCE,
    H200_LINKS,
    Interference,
    predict_scaling,
)
from lib.profiling.collectives import fit_link

# Efficiencies that scatter by more than this cannot test a prediction.
MOST_SPREAD = 0.02


class Step(NamedTuple):
    """A data-parallel step, and the step of one rank alone in the same run."""

    figures: dict
    alone_ms: float

    @property
    def wrapper(self) -> str:
        return self.figures["wrapper"]

    def messages(self, gradient_bytes):
        if self.wrapper in ("flashddp", "torch_ddp"):
            return math.ceil(gradient_bytes / (self.figures["bucket_size_mb"] * 2**20))
        # six matrices a block, and three outside
        return 1 if self.wrapper == "flat" else 6 * self.figures["num_layers"] + 3

    def error(self, interference=H200_INTERFERENCE):
        """Predicted less measured efficiency, in percentage points."""
        size = 2 if self.figures["low_precision_weights"] else 4
        gradient_bytes = size * self.figures["parameters"]
        link = H200_LINKS[self.figures["ranks"]]
        predicted = predict_scaling(
            gradient_bytes,
            self.figures["ranks"],
            latency_us=link.latency_us,
            bandwidth_gbs=link.bandwidth_gbs,
            backward_ms=BACKWARD_SHARE * self.alone_ms,
            other_ms=(1 - BACKWARD_SHARE) * self.alone_ms,
            buckets=self.messages(gradient_bytes),
            overlap=self.wrapper not in ("naive", "flat"),
            interference=interference,
        )
        return 100 * (predicted.efficiency - self.figures["scaling_efficiency"])


def gpu_steps():
    """All data-parallel steps on record, each with one rank alone in the same run."""
    keys = ("launch", "kernel", "tr_batch_size", "low_precision_weights", "compile", "cuda_graph")
    found, alone = [], {}
    for record in read_records(ROOT / "artifacts/lm_matrix.jsonl"):
        figures = record["figures"]
        if record["config"]["backend"] == "nccl" and figures["status"] == "ok":
            run = tuple(figures[key] for key in keys)
            if figures["wrapper"] == "none":
                alone[run] = figures["median_ms"]
            else:
                found.append((figures, run))
    return [Step(figures, alone[run]) for figures, run in found]


STEPS = gpu_steps()
STEADY = [step for step in STEPS if step.figures["iqr_scaling_efficiency"] <= MOST_SPREAD]


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
    kinds = {(step.figures["model"], step.figures["cuda_graph"]) for step in wrong}
    assert kinds == {("matrix", True)}
    assert {step.wrapper for step in wrong} == {"naive", "flat", "overlap"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_links_are_those_fitted_to_the_records(ranks):
    found = records("communication_benchmark", backend="nccl", collective="all_reduce", ranks=ranks)
    link = fit_link("all_reduce", ranks, zip(found["num_bytes"], found["median_ms"]))
    assert (link.latency_us, link.bandwidth_gbs) == pytest.approx(
        (H200_LINKS[ranks].latency_us, H200_LINKS[ranks].bandwidth_gbs), rel=0.005
    )
