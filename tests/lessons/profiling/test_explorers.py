"""Tables and figures of notebook 04: records, profiles, predictions beside measurements."""

import itertools
import re

import pytest
import torch
from matplotlib.figure import Figure

from lib.core.figures import house_figure
from lib.core.records import append_record
from lib.lessons.profiling.explorers import (
    MOST_SHOWN,
    StepEstimate,
    draw_estimates,
    newest_records,
    plain_log_ticks,
    profile_step,
    profile_step_memory,
    show_records,
    step_explorer,
)
from lib.model.config import ModelConfig
from lib.model.costs import num_parameters
from lib.model.transformer import TransformerLM
from lib.training.config import TrainConfig
from lib.training.step import TrainStep

SETTINGS = {"batch_sizes": (1, 8), "contexts": (64, 128), "dtypes": ("float32", "bfloat16")}


def record(device="GPU A", **figures):
    return {"device": device, "date": "2026-01-02T03:04:05+00:00", "figures": figures}


@pytest.fixture
def shown(monkeypatch):
    """The tables that are displayed."""
    tables = []
    monkeypatch.setattr("IPython.display.display", lambda table: tables.append(table.data))
    return tables


def estimate(batch, context, dtype):
    return StepEstimate(f"{batch} × {context}, {dtype}", 1.0 * batch, 2.0 * batch, 3.0, 4.0)


def explorer(measured=None, still=((1, 64, "float32"), (8, 64, "float32"))):
    calls = [] if measured is None else measured

    def noted(*setting):
        calls.append(setting)
        return estimate(*setting)

    return step_explorer(noted, **SETTINGS, still=still)


def test_records_are_shown_with_the_machine_that_made_them(shown, capsys):
    records = [record(ms=1.5), record("GPU B", ms=2.5), record("GPU B", ms=9.5)]
    row_of = lambda r: r["figures"] if r["figures"]["ms"] < 9 else None  # noqa: E731
    show_records(records, row_of, command="make it", title="Steps")
    text = capsys.readouterr().out
    assert text == "Steps on GPU A, 2026-01-02\nSteps on GPU B, 2026-01-02\n"
    assert [("1.50" in table, "2.50" in table, "9.50" in table) for table in shown] == [
        (True, False, False),
        (False, True, False),
    ]


def test_missing_records_are_one_line_that_says_how_to_make_them(shown, capsys):
    show_records([], lambda r: r, command="python -m lib benchmark step")
    assert re.fullmatch(".*python -m lib benchmark step\n", capsys.readouterr().out)
    assert not shown


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


@pytest.fixture(scope="module")
def training():
    """A small training step, and windows for it."""
    shape = ModelConfig(
        vocab_size=64, context_length=8, d_model=16, num_layers=2, num_heads=2, d_ff=32
    )
    settings = TrainConfig(model=shape, batch_size=2, steps=100)
    step = TrainStep(TransformerLM(shape), settings, torch.device("cpu"), torch.float32)
    return step, torch.zeros(2, 9, dtype=torch.int64)


def test_a_profiled_step_is_summed_up_and_leaves_standard_error_alone(training, capfd):
    summary = profile_step(*training, torch.device("cpu"), steps=2)
    assert summary.steps == 2
    assert summary.kernels > 100
    assert not capfd.readouterr().err


def test_the_memory_of_a_step_holds_its_parameters(training, capfd):
    step, windows = training
    timeline = profile_step_memory(step, windows, torch.device("cpu"))
    assert timeline.highest()["parameters"] == 4 * num_parameters(step.model.config)
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
