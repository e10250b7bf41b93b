"""Experiments of notebook 04: profiles of a training step."""

import pytest
import torch

from lib.lessons.profiling.explorers import make_step, memory_image, profile_step_memory, trace_of
from lib.model.config import ModelConfig
from lib.model.costs import num_parameters


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
    assert timeline.num_bytes["parameters"].max() == 4 * num_parameters(step.model.config)
    assert "activations" in memory_image(timeline).alt
    assert not capfd.readouterr().err
