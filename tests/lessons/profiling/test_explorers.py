"""Experiments of notebook 04: profiles, predictions beside measurements, sliders."""

import itertools

import pytest
import torch
from matplotlib.figure import Figure

from lib.core.figures import house_figure
from lib.lessons.profiling.explorers import (
    MOST_SHOWN,
    StepEstimate,
    draw_estimates,
    launch_explorer,
    make_step,
    memory_image,
    profile_step_memory,
    step_estimator,
    step_explorer,
    trace_of,
)
from lib.lessons.profiling.figures import plain_log_ticks
from lib.model.config import ModelConfig
from lib.model.costs import num_parameters
from lib.profiling.roofline import Limits

SETTINGS = {"batch_sizes": (1, 8), "contexts": (64, 128), "dtypes": ("float32", "bfloat16")}


def estimate(batch, context, dtype):
    return StepEstimate(f"{batch} × {context}, {dtype}", 1.0 * batch, 2.0 * batch, 3.0, 4.0)


def explorer(measured=None, still=((1, 64, "float32"), (8, 64, "float32"))):
    calls = [] if measured is None else measured

    def noted(*setting):
        calls.append(setting)
        return estimate(*setting)

    return step_explorer(noted, **SETTINGS, still=still)


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


def test_a_logarithmic_axis_is_labelled_in_plain_digits():
    with house_figure() as (figure, axes):
        axes.loglog([1, 10], [3, 3000])
        plain_log_ticks(axes.yaxis)
        figure.canvas.draw()
        labels = [label.get_text() for label in axes.get_yticklabels()]
    assert {"5", "200", "1,000"} <= set(labels)


def test_bars_are_as_long_as_time_and_memory():
    estimates = [StepEstimate("a", 1.0, 2.0, 30.0, 40.0), StepEstimate("b", 1.0, None, 30.0, None)]
    figure = Figure()
    draw_estimates(figure, estimates)
    lengths = [[bar.get_width() for bar in axes.patches] for axes in figure.axes]
    assert lengths == [[1, 1, 2, 0], [30, 30, 40, 0]]
    texts = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert texts == [["1", "1", "2", "oom"], ["30", "30", "40", "oom"]]


def test_a_setting_is_measured_when_it_is_chosen_and_only_once():
    measured = []
    box = explorer(measured)
    batch, context, _, note, *_ = box.children
    assert measured == [(1, 64, "float32"), (8, 64, "float32")]
    said = []
    note.observe(lambda change: said.append(change["new"]), "value")
    before = box.children[-2].outputs
    context.value = 128
    assert box.children[-2].outputs != before
    assert measured[-1] == (8, 128, "float32")
    assert said == ["measuring…", ""]
    count = len(measured)
    context.value = 64
    batch.value = 1
    assert len(measured) == count


def test_the_newest_settings_stay(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "lib.lessons.profiling.explorers.draw_estimates",
        lambda figure, estimates: drawn.append([e.name for e in estimates]),
    )
    box = explorer(still=[(1, 64, "float32")])
    for setting in itertools.product((8, 1), (128, 64), ("bfloat16", "float32")):
        for slider, value in zip(box.children, setting):
            slider.value = value
    assert len(drawn[-1]) == MOST_SHOWN
    assert drawn[-1][-1] == "1 × 64, float32"
    assert len(set(drawn[-1])) == MOST_SHOWN


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


def test_the_sliders_of_launches_show_when_the_gpu_starves():
    box = launch_explorer()
    view = box.children[2].outputs
    # 12 launches of 20 µs and a last kernel of 5
    assert "245 µs, GPU idle 76%" in view[0]["data"]["text/plain"]
