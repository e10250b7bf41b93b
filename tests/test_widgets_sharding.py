"""What notebook 07 draws, and lets a reader move: the bytes of a rank."""

import dataclasses
from functools import partial

import pytest
from matplotlib.colors import to_hex
from nbformat.v4 import new_code_cell, new_notebook, new_output

from lib.config_sharding import SHARDING_METHODS, ShardingConfig
from lib.memory_accounting import RankMemory, rank_memory
from lib.model_costs import num_parameters, parameters_by_part
from lib.model_presets import model_preset
from lib.notebook_cells import WIDGET_STATE, WIDGET_VIEW, static_widgets
from lib.plots import house_figure
from lib.plots_zero import (
    CARDS,
    KINDS,
    PURPOSE_COLORS,
    draw_cycles,
    draw_flat,
    draw_kinds,
    draw_partition,
    draw_sent,
    draw_stages,
)
from lib.trace_timeline import Timeline
from lib.widgets_sharding import (
    MOST_RANKS,
    OWN,
    PRECISIONS,
    STAGES,
    gpu_sections,
    memory_explorer,
    memory_kinds,
    own_config,
    stage_memory,
    verdict,
)
from tests.drawing_time import charts_per_move

START = ("xl", 8, "bfloat16 weights", "zero1", 4)
SMALL = model_preset("small")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_kinds_add_up_to_what_the_formula_counts(precision, name, ranks):
    memory = stage_memory(SMALL, ranks, name, precision)
    kinds = memory_kinds(SMALL, memory, ranks, is_sharded=name != "none")
    assert list(kinds) == list(KINDS)
    assert sum(kinds.values()) == memory.total + memory.gathered
    assert min(kinds.values()) >= 0


def test_masters_are_four_bytes_for_each_weight_that_has_two():
    memory = stage_memory(SMALL, 1, "none", "bfloat16 weights")
    kinds = memory_kinds(SMALL, memory, 1, is_sharded=False)
    matrices = num_parameters(SMALL) - parameters_by_part(SMALL)["norms"]
    assert kinds["master weights"] == 4 * matrices
    assert kinds["Adam's moments"] == 8 * num_parameters(SMALL)


def test_stages_divide_one_thing_after_another():
    held = [stage_memory(SMALL, 8, name, "bfloat16 weights") for name in STAGES]
    fields = ("optimizer_state", "gradients", "parameters")
    whole = {field: getattr(held[0], field) for field in fields}
    divided = [[getattr(m, field) < whole[field] / 7 for field in fields] for m in held]
    assert divided == [
        [False, False, False],
        [True, False, False],
        [True, True, False],
        [True, True, False],
        [True, True, True],
    ]


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (15 * 10**9, "peak 15 GB, fits into 16 GB"),
        (15 * 10**9 + 1, "fits into 24 GB"),
        (140 * 10**9, "fits into 141 GB"),
        (141 * 10**9, "too much for 141 GB"),
    ],
)
def test_the_smallest_card_that_holds_peak_and_reserve_is_named(num_bytes, words):
    assert words in verdict(RankMemory(num_bytes, 0, 0, 0))


def test_own_sizes_make_a_model_that_can_be_counted():
    for d_model in (256, 8192):
        assert own_config(d_model, 4).head_dim == 64
        assert rank_memory(own_config(d_model, 96), ranks=1).total > 0


def bars_of(axes):
    """(colour, left, width) of the bars."""
    return [
        (to_hex(patch.get_facecolor()).upper(), patch.get_x(), patch.get_width())
        for patch in axes.patches
    ]


def test_kinds_are_drawn_behind_one_another_in_gb():
    with house_figure() as (_, axes):
        draw_kinds(axes, {"a": {"weights": 1e9, "gradients": 3e9}}, peaks={"a": 3.5e9})
        assert bars_of(axes) == [(KINDS["weights"], 0, 1), (KINDS["gradients"], 1, 3)]
        assert [text.get_text() for text in axes.texts] == ["4", "sum\n(GB)"]
        assert list(axes.lines[0].get_xdata()) == [3.5, 3.5]


def test_shares_are_of_a_hundred():
    with house_figure() as (_, axes):
        draw_kinds(axes, {"a": {"weights": 1e9, "gradients": 3e9}}, percent=True)
        assert [width for _, _, width in bars_of(axes)] == [25, 75]
        assert axes.get_xlim() == (0, 100)


@pytest.mark.parametrize(("longest", "count"), [(1, 1), (17, 2), (100, 4), (500, 4)])
def test_limits_are_those_within_reach_and_the_next_one(longest, count):
    with house_figure() as (_, axes):
        draw_kinds(axes, {"a": {"weights": longest * 1e9}}, limits=list(CARDS))
        assert [line.get_xdata()[0] for line in axes.lines] == list(CARDS)[:count]
        assert axes.get_xlim()[1] > max(longest, list(CARDS)[count - 1])


def test_no_limit_runs_through_a_sum():
    with house_figure() as (figure, axes):
        draw_kinds(axes, {"a": {"weights": 7.9e9}, "b": {"weights": 90e9}}, limits=list(CARDS))
        figure.canvas.draw()
        sums = [text for text in axes.texts if text.get_text() in ("7.9", "90")]
        assert len(sums) == 2
        assert all(text.get_window_extent().x0 > axes.bbox.x1 for text in sums)
        assert all(text.get_window_extent().x1 < figure.bbox.x1 for text in sums)


def test_a_partition_says_the_largest_load():
    with house_figure() as (_, axes):
        draw_partition(axes, [4, 2, 2], [0, 1, 0], 2, title="so")
        assert axes.get_title(loc="left") == "so: largest load 1.50 × an equal share"
        rows = [(patch.get_y() + 0.35, patch.get_width() * 1e6) for patch in axes.patches]
    assert rows == [pytest.approx(row) for row in [(0, 4), (1, 2), (0, 2)]]


@pytest.mark.parametrize(("sizes", "padding"), [([5, 4], 3), ([8, 4], 0)])
def test_a_buffer_shows_its_padding(sizes, padding):
    with house_figure() as (_, axes):
        draw_flat(axes, sizes, [(0, 6), (6, 12)])
        hatched = [1e6 * patch.get_width() for patch in axes.patches if patch.get_hatch()]
        words = [text.get_text() for text in axes.texts]
    assert hatched == pytest.approx([padding] * (padding > 0))
    assert words == ["rank 0: 0 to 6", "rank 1: 6 to 12"]


def test_cycles_share_a_time_axis_and_have_a_lane_for_each_purpose():
    compute = (("forward", ((8.0, 9.0),)), ("backward", ((0.0, 5.0),)), ("", ((1.0, 2.0),)))
    line = Timeline(10.0, (0.0, 5.0), compute, (), ())
    collectives = {"gradients": ((1.0, 4.0),), "weights": ((6.0, 9.0),)}
    with house_figure(squeeze=False) as (figure, _):
        figure.clear()
        longer = dataclasses.replace(line, step_ms=20.0)
        draw_cycles(figure, {"a": (line, collectives), "b": (longer, collectives)})
        assert [axes.get_xlim() for axes in figure.axes] == [pytest.approx((0, 20.4))] * 2
        drawn = {
            to_hex(found.get_facecolor()[0]).upper(): found.get_paths()[0].vertices[:, 0]
            for found in figure.axes[0].collections
        }
    for purpose, color in PURPOSE_COLORS.items():
        (span,) = collectives[purpose]
        assert (drawn[color].min(), drawn[color].max()) == span


def test_stages_are_curves_over_ranks_and_cards_that_are_within_reach():
    with house_figure() as (_, axes):
        draw_stages(axes, {"a": [(1, 30e9), (2, 20e9)], "b": [(1, 30e9), (2, 10e9)]}, [16, 24, 80])
        assert [list(line.get_ydata()) for line in axes.lines[:2]] == [[30, 20], [30, 10]]
        assert [text.get_text() for text in axes.texts] == ["16 GB, T4", "24 GB, RTX 4090"]


def test_what_is_sent_is_drawn_from_the_top():
    with house_figure() as (_, axes):
        draw_sent(axes, {"a": 1e9, "b": 2e9})
        assert [text.get_text() for text in axes.texts] == ["1", "2"]
        assert axes.yaxis_inverted()


@pytest.fixture(scope="module")
def explorer():
    return memory_explorer(start=START)


def by_name(box):
    return {child.description: child for child in box.children[:-1]}


def test_each_slider_changes_the_picture(explorer):
    for slider in by_name(explorer).values():
        before = explorer.children[-1].outputs[0]["data"]["image/png"]
        chosen = slider.value
        slider.value = next(option for option in slider.options if option != chosen)
        assert explorer.children[-1].outputs[0]["data"]["image/png"] != before
        slider.value = chosen


def test_ranks_go_from_1_to_64(explorer):
    assert list(by_name(explorer)["Ranks"].options) == list(range(1, MOST_RANKS + 1))
    assert MOST_RANKS == 64


def test_own_sizes_have_sliders_only_when_asked_for(explorer):
    model = by_name(explorer)["Model"]
    assert not {"Width", "Layers"} & set(by_name(explorer))
    model.value = OWN
    assert list(by_name(explorer))[:3] == ["Model", "Width", "Layers"]
    before = explorer.children[-1].outputs[0]["data"]["image/png"]
    by_name(explorer)["Width"].value = 8192
    assert explorer.children[-1].outputs[0]["data"]["image/png"] != before
    model.value = "xl"
    assert not {"Width", "Layers"} & set(by_name(explorer))


def test_a_move_takes_less_than_a_chart(explorer):
    slider = by_name(explorer)["Ranks"]
    moves = [partial(setattr, slider, "value", ranks) for ranks in (9, 10, 11, 12, 13, 14, 15)]
    assert charts_per_move(moves) < 1


def test_without_sliders_the_chosen_setting_is_shown():
    from ipywidgets import Widget

    box = memory_explorer(start=START)
    state = {WIDGET_STATE: {"state": Widget.get_manager_state(widgets=None)["state"]}}
    view = {WIDGET_VIEW: {"model_id": box.model_id}, "text/plain": "VBox(…)"}
    cell = new_code_cell("x", outputs=[new_output("display_data", view)])
    notebook = static_widgets(new_notebook(cells=[cell], metadata={"widgets": state}))
    words, picture = notebook.cells[0].outputs
    assert words.data["text/plain"] == (
        "Model: xl  Ranks: 8  Precision: bfloat16 weights  Stage: zero1  Windows: 4"
    )
    text = picture.data["text/plain"]
    assert text.startswith("Predicted memory. xl, 2 billion weights, 8 ranks")
    assert "Adam's moments" in text


def record(backend, date, **changed):
    """One as `python -m lib benchmark sharding` writes it, of its settings only."""
    shape = dataclasses.asdict(SMALL)
    names = ("dtype", "tf32", "compile", "cuda_graph", "low_precision_weights")
    config = {name: getattr(ShardingConfig(), name) for name in names} | shape
    config["bucket_size_mb"] = 25.0
    config |= {"model": "small", "kernel": "sdpa", "method": "zero1", "ranks": 2}
    config |= {"backend": backend, "tr_batch_size": 2, "steps_per_epoch": 3, **changed}
    config |= {"wrapper": SHARDING_METHODS[config["method"]]["ddp_wrapper"]}
    about = {"device": "GPU A", "cpu": "C", "cores": 2, "seed": 0, "commit": "", "date": date}
    return {"config": config, "figures": {"status": "ok"}, "versions": {"torch": "2"}, **about}


def test_sections_are_of_gpus_and_the_newest_record_of_each_counts():
    records = [record("nccl", "2026-01-01"), record("gloo", "2026-01-02")]
    records += [record("nccl", "2026-01-03"), record("nccl", "2026-01-04", method="flashddp")]
    (section,) = gpu_sections(records)
    assert [(row["method"], row["date"]) for row in section.rows] == [
        ("flashddp", "2026-01-04"),
        ("zero1", "2026-01-03"),
    ]


def test_no_records_are_no_sections():
    assert gpu_sections([]) == []
