"""Experiments of notebook 04: profiles, predictions beside measurements."""

import pytest
import torch

from lib.lessons.profiling.explorers import (
    make_step,
    memory_image,
    profile_step_memory,
    step_estimator,
    trace_of,
)
from lib.model.config import ModelConfig
from lib.model.costs import num_parameters
from lib.profiling.roofline import Limits


@pytest.fixture(scope="module")
def training():
    """A small training step, and sequences for it."""
    shape = ModelConfig(
        vocab_size=64, context_length=8, d_model=16, num_layers=2, num_heads=2, d_ff=32
    )
    return make_step(shape, 2, torch.device("cpu"))


def test_a_profiled_step_has_its_operators(training):
    step, sequences = training
    step(sequences, 1e-4)
    with torch.profiler.profile() as profiler:
        step(sequences, 1e-4)
    names = [span.name for span in trace_of(profiler).operators]
    # four matmuls a layer forward, two for each of them backward, and three of the head
    assert names.count("aten::mm") == 2 * 4 * 3 + 3


def test_the_memory_of_a_step_holds_its_parameters(training, capfd):
    step, windows = training
    timeline = profile_step_memory(step, windows, torch.device("cpu"))
    assert timeline.highest()["parameters"] == 4 * num_parameters(step.model.config)
    assert "activations" in memory_image(timeline).alt
    assert not capfd.readouterr().err


def test_a_step_is_estimated_from_limits_and_dispatch_and_measured():
    limits = {"float32": Limits(1e30, 1e30)}
    estimate = step_estimator(
        "tiny", torch.device("cpu"), limits, contexts=(16,), dispatch_ms=7.0, samples=3
    )
    found = estimate(1, 16, "float32")
    # a machine whose roof is out of reach takes only the host's time
    assert found.predicted_ms == pytest.approx(7)
    assert found.measured_ms > 0
    assert found.predicted_mb == pytest.approx(found.measured_mb, rel=0.3)
