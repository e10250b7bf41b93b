"""What notebook 04 shows: tables of records, and bars of predictions beside measurements."""

import pytest
import torch

from lib.config_training import ModelConfig, TrainConfig
from lib.model import TransformerLM
from lib.model_costs import num_parameters
from lib.notebook_cells import WIDGET_STATE, WIDGET_VIEW, static_widgets
from lib.plots import house_figure
from lib.plots_profile import draw_host_and_device
from lib.report import append_record
from lib.train_step import TrainStep
from lib.widgets_profiling import (
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


def words(box):
    return box.children[-1].outputs[0]["data"]["text/plain"]


def test_records_are_shown_with_the_machine_that_made_them(shown, capsys):
    records = [record(ms=1.5), record("GPU B", ms=2.5)]
    show_records(records, lambda r: r["figures"], command="make it", title="Steps")
    text = capsys.readouterr().out
    assert "Steps on GPU A, 2026-01-02" in text
    assert "Steps on GPU B, 2026-01-02" in text
    assert ["1.50" in table for table in shown] == [True, False]


def test_a_record_without_a_row_is_left_out(shown):
    records = [record(ms=1.5), record(ms=2.5)]
    row_of = lambda r: r["figures"] if r["figures"]["ms"] > 2 else None  # noqa: E731
    show_records(records, row_of, command="make it")
    assert len(shown) == 1
    assert "1.50" not in shown[0]


def test_missing_records_are_one_line_that_says_how_to_make_them(shown, capsys):
    show_records([], lambda r: r, command="python -m lib benchmark step")
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    assert "python -m lib benchmark step" in text
    assert not shown


def test_of_records_for_the_same_thing_the_last_stays(tmp_path):
    path = tmp_path / "a.jsonl"
    for ms in (1, 2):
        append_record(path, record(task="step", model="m", candidate="all", ms=ms) | {"config": ms})
    append_record(path, record(task="step", model="m", candidate="none", ms=3) | {"config": 1})
    append_record(path, record("GPU B", task="step", model="m", candidate="all", ms=4))
    assert [r["figures"]["ms"] for r in newest_records(path)] == [2, 3, 4]


def test_records_without_a_task_are_told_apart_by_their_config(tmp_path):
    path = tmp_path / "a.jsonl"
    for length, ms in ((1, 1), (2, 2), (1, 3)):
        append_record(path, record(ms=ms) | {"config": {"seq_len": length}})
    assert [r["figures"]["ms"] for r in newest_records(path)] == [3, 2]


def test_no_file_of_records_is_no_records(tmp_path):
    assert newest_records(tmp_path / "none.jsonl") == []


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


def test_lanes_are_as_long_as_dispatch_and_as_the_step():
    figures = {"dispatch_ms": 5.0, "busy_ms": 2.0, "idle_ms": 4.0}
    with house_figure() as (_, axes):
        draw_host_and_device(axes, {"eager": figures, "graph": figures})
        ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
        assert ends == [5, 2, 6] * 2
        assert axes.get_legend_handles_labels()[1] == ["host dispatches", "GPU busy", "GPU idle"]


def test_bars_are_as_long_as_time_and_memory():
    with house_figure() as (figure, axes):
        axes.remove()
        draw_estimates(figure, [StepEstimate("a", 1.0, 2.0, 30.0, 40.0)])
        lengths = [[bar.get_width() for bar in axes.patches] for axes in figure.axes]
    assert lengths == [[1.0, 2.0], [30.0, 40.0]]


def test_what_ran_out_of_memory_says_so():
    with house_figure() as (figure, axes):
        axes.remove()
        draw_estimates(figure, [StepEstimate("a", 1.0, None, 30.0, None)])
        texts = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert texts == [["1", "oom"], ["30", "oom"]]


def test_a_setting_is_measured_when_it_is_chosen_and_only_once():
    measured = []
    box = explorer(measured)
    batch, context, _, note, _ = box.children
    assert measured == [(1, 64, "float32"), (8, 64, "float32")]
    said = []
    note.observe(lambda change: said.append(change["new"]), "value")
    context.value = 128
    assert measured[-1] == (8, 128, "float32")
    assert said == ["measuring…", ""]
    count = len(measured)
    context.value = 64
    batch.value = 1
    assert len(measured) == count


def test_the_figure_follows_the_sliders():
    box = explorer()
    before = box.children[-1].outputs[0]["data"]["image/png"]
    box.children[2].value = "bfloat16"
    assert box.children[-1].outputs[0]["data"]["image/png"] != before


def test_the_newest_settings_stay(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "lib.widgets_profiling.draw_estimates",
        lambda figure, estimates: drawn.append([e.name for e in estimates]),
    )
    box = explorer(still=[(1, 64, "float32")])
    for batch in (8, 1):
        for context in (128, 64):
            for dtype in ("bfloat16", "float32"):
                for slider, value in zip(box.children, (batch, context, dtype)):
                    slider.value = value
    assert len(drawn[-1]) == MOST_SHOWN
    assert drawn[-1][-1] == "1 × 64, float32"
    assert len(set(drawn[-1])) == MOST_SHOWN


def test_without_sliders_the_still_settings_are_shown():
    from ipywidgets import Widget
    from nbformat.v4 import new_code_cell, new_notebook, new_output

    box = explorer()
    state = Widget.get_manager_state()
    view = {WIDGET_VIEW: {"model_id": box.model_id}}
    cell = new_code_cell(outputs=[new_output("display_data", data=view)])
    notebook = new_notebook(cells=[cell], metadata={"widgets": {WIDGET_STATE: state}})
    outputs = static_widgets(notebook).cells[0].outputs
    assert sum("image/png" in output.data for output in outputs) == 1
    assert words(box).startswith("Predicted and measured. Time: ")
