"""What notebook 06 lets a reader move: the ring's steps, and predicted scaling."""

import numpy as np
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from lib.benchmark_lm_matrix_report import matrix_rows
from lib.notebook_cells import WIDGET_STATE, WIDGET_VIEW, static_widgets
from lib.widgets_ddp import RANKS, measured_scaling, ring_stepper, scaling_curve, scaling_explorer


def row(**changed):
    values = {"model": "small", "wrapper": "flashddp", "backend": "nccl", "status": "ok"}
    values |= {"ranks": 2, "tr_batch_size": 4, "context_length": 256, "compile": True}
    values |= {"dtype": "bfloat16", "device": "NVIDIA A", "scaling_efficiency": 0.9}
    return values | changed


def test_measured_points_are_those_of_our_wrapper_on_gpus():
    rows = [row(), row(ranks=4, scaling_efficiency=0.8), row(wrapper="naive")]
    rows += [row(backend="gloo"), row(status="oom"), row(scaling_efficiency=None)]
    name = "measured: 1,024 tokens, bfloat16, compiled, A"
    assert measured_scaling(rows) == {"small": {name: [(2, 0.9), (4, 0.8)]}}


def test_of_several_kernels_the_best_is_shown():
    rows = [row(), row(scaling_efficiency=0.95), row(scaling_efficiency=0.7)]
    (points,) = measured_scaling(rows)["small"].values()
    assert points == [(2, 0.95)]


def test_other_settings_are_other_points():
    found = measured_scaling([row(), row(compile=False), row(tr_batch_size=8), row(model="large")])
    assert [len(points) for points in found.values()] == [3, 1]


def test_no_records_are_no_points():
    assert measured_scaling(matrix_rows([])) == {}


def test_a_curve_begins_with_one_rank_at_full_speed_and_overlap_helps():
    settings = ("small", 4096, "8 × 400 Gbit/s", 2e14)
    ours, plain = scaling_curve(*settings), scaling_curve(*settings, overlap=False)
    assert ours[0] == plain[0] == (1, 1.0)
    assert [ranks for ranks, _ in ours] == sorted(RANKS)
    assert {1, 2, 4, 8, 9, 16, 32, 64} <= set(RANKS)
    assert all(a >= b for (_, a), (_, b) in zip(ours, plain))


def static(box):
    """The outputs that are left of a widget where nobody can move it."""
    from ipywidgets import Widget

    state = {WIDGET_STATE: {"state": Widget.get_manager_state(widgets=None)["state"]}}
    view = {WIDGET_VIEW: {"model_id": box.model_id}, "text/plain": "VBox(…)"}
    cell = new_code_cell("x", outputs=[new_output("display_data", view)])
    return static_widgets(new_notebook(cells=[cell], metadata={"widgets": state})).cells[0].outputs


def test_each_step_of_the_ring_has_a_picture_of_its_own():
    slider, view, _ = ring_stepper(np.arange(9).reshape(3, 3)).children
    assert list(slider.options) == [f"{number} of 4" for number in range(5)]
    seen = set()
    for option in slider.options:
        slider.value = option
        seen.add(view.outputs[0]["data"]["image/png"])
    assert len(seen) == 5


def test_without_a_slider_the_start_and_the_middle_of_the_ring_are_shown():
    outputs = static(ring_stepper(np.arange(9).reshape(3, 3)))
    assert sum("image/png" in output.data for output in outputs) == 2


@pytest.fixture(scope="module")
def explorer():
    return scaling_explorer(
        flops_per_s={"small": 2e14, "medium": 3e14},
        tokens=[1024, 4096],
        start=("small", 4096, "100 Gbit/s", 16),
    )


def test_each_slider_changes_the_picture(explorer):
    *sliders, view = explorer.children
    for slider in sliders:
        before = view.outputs[0]["data"]["image/png"]
        slider.index = (slider.index + 1) % len(slider.options)
        assert view.outputs[0]["data"]["image/png"] != before


def test_tokens_are_read_with_a_comma(explorer):
    assert [label for label, _ in explorer.children[1].options] == ["1,024", "4,096"]


def test_without_sliders_the_chosen_setting_is_shown(explorer):
    outputs = static(explorer)
    assert sum("image/png" in output.data for output in outputs) == 1
    assert "Model: " in outputs[0].data["text/plain"]
