"""Every figure of the lessons: it draws, with a title and labels, and can be read aloud."""

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex

from lib.core.figures import BLUE, GRAY, SKY, VERMILLION, alt_text
from lib.lessons.ddp import figures as ddp
from lib.lessons.ddp.ring import ring_all_reduce
from lib.lessons.flash_attention import figures as flash
from lib.lessons.fsdp.figures import show_step
from lib.lessons.fsdp.orders import Played
from lib.lessons.fsdp.orders import Span as Event
from lib.lessons.hopper import figures as hopper
from lib.lessons.hopper import timeline
from lib.lessons.model.figures import show_differences
from lib.lessons.profiling import figures as profiling
from lib.lessons.profiling import records
from lib.lessons.profiling.simulated import ToyTrainer
from lib.lessons.training import figures as training
from lib.lessons.training.broken import read_broken_runs
from lib.lessons.zero1 import figures as zero1
from lib.profiling.measurement import Measurement
from lib.profiling.roofline import draw_roofline
from lib.profiling.timeline import Timeline

RING = ring_all_reduce(np.array([[1, 2, 3], [10, 20, 30], [100, 200, 300]]))
LINE = Timeline(
    step_ms=10.0,
    backward=(2.0, 7.0),
    compute=(("forward", ((0.0, 1.5),)), ("backward", ((2.0, 4.0), (5.0, 7.0))), ("update", ())),
    communication=((3.0, 9.0),),
    exposed=((7.0, 9.0), (4.5, 4.501)),
)
ORDER = Played(
    "nothing",
    1,
    3.0,
    (
        Event("network", "gather", 0, 0.0, 1.0),
        Event("compute", "forward", 0, 1.0, 3.0),
        Event("memory", "held", 0, 0.0, 3.0),
    ),
)
COSTS = [{"variant": "a", "costs": [0.1, 0.2, 0.3]}, {"variant": "b", "costs": [-1, 1, 0]}]
PATHS = {"momentum": torch.rand(9, 3, 2), "AdamW": torch.rand(9, 3, 2)}
BAND = {"steps": [1, 2], "low": [3.0, 2.0], "high": [4.0, 3.0]}
SPEEDS = {"forward": {"ours": {1024: 3.0, 2048: 4.0}, "cuDNN": {1024: 2.0}}}
TILES = pd.DataFrame(
    [
        {"BQ": BQ, "BK": BK, "num_warps": warps, "tflops": speed}
        for warps, speeds in ((4, (1, 2, 3, None)), (8, (5, 6, 7, 9)))
        for (BQ, BK), speed in zip(((32, 32), (32, 64), (64, 32), (64, 64)), speeds)
    ],
    dtype=object,
)
OWNERS = {"round robin": [0, 1, 0], "largest first": [0, 1, 1]}
CONTEXTS = {"a": {256: 10e9, 512: 30e9}, "a, checkpoints": {256: 8e9, 512: 9e9}}


def toy_loop():
    gpu = ToyTrainer()
    gpu.step(gpu.load(3)).item()
    return gpu


FIGURES = {
    "differences": lambda: show_differences(COSTS),
    "paths": lambda: training.show_paths(PATHS, torch.tensor([1.0, 9.0])),
    "band": lambda: training.show_band({1: 3.5, 2: 2.5}, BAND, levels={"bigram": 2.2}, first=1),
    "broken runs": lambda: training.show_broken_runs(read_broken_runs(), 1.0),
    "samples": lambda: profiling.show_samples(
        [3.0, 1.0, 2.0], title="Steps", measurement=Measurement("ok", (3.0, 1.0, 2.0))
    ),
    "loop": lambda: profiling.show_loop(toy_loop(), title="A step"),
    "kernels": lambda: profiling.show_traces(records.anonymous_traces(), named=2),
    "recorded steps": lambda: records.show_gpu_timelines("matrix_eager", "matrix_graph"),
    "tiles": lambda: flash.show_visited_tiles([7, 9], 2),
    "speed of tiles": lambda: flash.show_tile_speeds(TILES),
    "fragments": hopper.show_fragments,
    "ldmatrix": hopper.show_ldmatrix,
    "banks": lambda: hopper.show_banks(lambda row, chunk: chunk ^ row),
    "peers": lambda: hopper.show_peers(SPEEDS, title="Causal"),
    "recorded schedule": lambda: timeline.show_recorded(timeline.recorded_timelines()[True]),
    "ring": lambda: ddp.show_ring(RING),
    "timelines": lambda: ddp.show_timelines({"a": LINE, "b": LINE}),
    "an order": lambda: show_step(ORDER, 1, 2, title="just in time"),
    "partitions": lambda: zero1.show_partitions([4, 2, 2], OWNERS, ranks=2),
    "flat": lambda: zero1.show_flat([5, 4], [(0, 6), (6, 12)], title="A buffer"),
    "contexts": lambda: zero1.show_contexts(CONTEXTS, title="Long sequences"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_titles_and_labels_and_can_be_read_aloud(name, drawn):
    FIGURES[name]()
    assert drawn
    for figure in drawn:
        figure.draw_without_rendering()
        shown = [axes for axes in figure.axes if axes.axison]
        titles = [axes.get_title(loc="left") or axes.get_title() for axes in shown]
        assert figure.get_suptitle() or titles[0]
        # of panels with one axis only the outer ones are labeled; bars and lanes by their names
        for axis in ("xaxis", "yaxis"):
            labels = [getattr(axes, axis).get_label_text() for axes in shown]
            named = [t.get_text() for axes in shown for t in getattr(axes, axis).get_ticklabels()]
            assert any(labels) or any(not text.replace(".", "").isdigit() for text in named)
        assert alt_text(figure).startswith(figure.get_suptitle() or titles[0].split("\n")[0])


def boxes(axes, color):
    """(start, end) of the drawn boxes of a color, by their order."""
    found = [part for part in axes.collections if to_hex(part.get_facecolor()[0]) == color.lower()]
    extents = [path.get_extents() for part in found for path in part.get_paths()]
    return [(box.x0, box.x1) for box in extents]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_a_timeline_has_its_phases_and_what_is_exposed(drawn):
    longer = Timeline(20.0, (2.0, 7.0), (("update", ((1.0, 2.0),)),), (), ())
    ddp.show_timelines({"flat": LINE, "b": longer})
    first, second = drawn[0].axes
    assert boxes(first, BLUE) == [(2, 4), (5, 7)]
    assert boxes(first, SKY) == [(3, 9)]
    assert boxes(first, VERMILLION) == [(7, 9)]
    assert first.get_title(loc="left") == "flat: 10 ms, 6 ms of communication, 2 exposed"
    assert [axes.get_xlim() for axes in (first, second)] == [pytest.approx((0, 20.4))] * 2
    legend = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert sorted(legend) == [
        "all-reduce, exposed",
        "all-reduce, hidden",
        "backward",
        "forward",
        "update",
    ]


def test_a_ring_shows_values_and_how_much_of_the_sum_they_are(drawn):
    ddp.show_ring(RING)
    panels = [axes for axes in drawn[0].axes if axes.axison]
    assert len(panels) == len(RING) == 5
    for axes, step in zip(panels, RING):
        assert [float(text) for text in texts(axes)] == step.values.T.ravel().tolist()
        kinds = axes.collections[0].get_array().ravel()
        assert (
            kinds.tolist()
            == np.select([step.added == 1, step.added < 3], [0, 1], 2).T.ravel().tolist()
        )
        assert len(axes.patches) == len(step.sent)


@pytest.mark.parametrize(("length", "tile"), [(8, 2), (7, 3), (5, 4), (9, 1)])
def test_visited_tiles_are_those_that_hold_a_visible_pair(length, tile, drawn):
    visible = np.tril(np.ones((length, length), bool))
    kinds = []
    for row, column in np.ndindex(-(-length // tile), -(-length // tile)):
        part = visible[row * tile :, column * tile :][:tile, :tile]
        kinds.append(0 if not part.any() else 1 if part.all() else 2)
    flash.show_visited_tiles([length, 1], tile)
    axes = drawn[0].axes[0]
    assert axes.collections[0].get_array().ravel().tolist() == kinds
    assert f"{np.mean(np.array(kinds) > 0):.0%} visited" in axes.get_title(loc="left")


def test_a_lane_holds_two_numbers_of_b_and_four_of_a_and_c(drawn):
    hopper.show_fragments(lane=6)
    titles = {axes.get_title(loc="left"): axes for axes in drawn[0].axes}
    assert [len(titles[name].patches) for name in ("A, 16 × 8", "B, 8 × 8", "C, 16 × 8")] == [
        4,
        2,
        4,
    ]
    assert texts(titles["A, 16 × 8"])[:8] == list("00112233")
    assert texts(titles["B, 8 × 8"])[:8] == ["0", "4", "8", "12", "16", "20", "24", "28"]


def test_a_partition_says_the_largest_load_and_a_buffer_shows_its_padding(drawn):
    zero1.show_partitions([4e6, 2e6, 2e6], {"so": [0, 1, 0], "thus": [0, 1, 1]}, ranks=2)
    left = drawn[0].axes[0]
    assert left.get_title(loc="left") == "so: largest load 1.50 × an equal share"
    assert boxes(left, BLUE) == [(0, 4), (4, 6)]
    zero1.show_flat([5e6, 4e6], [(0, 6_000_000), (6_000_000, 12_000_000)], title="")
    assert boxes(drawn[1].axes[0], GRAY) == [(9, 12)]
    assert texts(drawn[1].axes[0]) == ["0: 0 to 6,000,000", "1: 6,000,000 to 12,000,000"]


@pytest.mark.parametrize(("longest", "count"), [(1, 1), (17, 2), (100, 4), (500, 4)])
def test_kinds_of_memory_add_up_beside_the_cards_they_need(longest, count, axes):
    weights, rest = longest * 1e9 / 4, longest * 3e9 / 4
    zero1.draw_kinds(axes, {"a": {"weights": weights, "gradients": rest}}, {"a": 2e9})
    assert [bar.get_width() for bar in axes.patches] == pytest.approx(
        [longest / 4, longest * 3 / 4]
    )
    assert texts(axes)[0] == f"{longest:.3g}"
    assert [line.get_xdata()[0] for line in axes.lines] == list(zero1.CARDS)[:count]
    assert axes.collections[0].get_segments()[0][:, 0].tolist() == [2, 2]


def test_variants_whose_sign_depends_on_the_seed_have_another_color(drawn):
    show_differences(COSTS)
    (axes,) = drawn[0].axes
    dots = [line.get_xdata().tolist() for line in axes.lines if line.get_marker() == "o"]
    assert dots == [[0.1, 0.2, 0.3], [-1, 1, 0]]
    assert len({bar.get_facecolor() for bar in axes.patches}) == 2


def test_points_of_a_roofline_are_named_beside_them_one_below_the_other(drawn):
    limits, points, _ = records.block_on_gpu()
    _, axes = plt.subplots()
    draw_roofline(axes, limits, points, title="A block")
    plt.show()
    named = {text.get_text(): text for text in axes.texts if text.get_text() != " ridge"}
    assert named.keys() == {point.name for point in points}
    boxes = [text.get_window_extent() for text in named.values()]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_the_longest_kernels_are_named(drawn):
    profiling.show_traces(records.anonymous_traces(), named=2)
    named = [[text.get_text() for text in f.axes[0].get_legend().get_texts()] for f in drawn]
    assert [len(names) for names in named] == [2, 2, 2]
    assert "elementwise_kernel" in named[0][0]
    assert all("nvjet" in names[0] for names in named[1:])


def test_the_fastest_tiles_are_framed_and_what_does_not_fit_has_no_number(drawn):
    flash.show_tile_speeds(TILES)
    texts = [[text.get_text() for text in axes.texts] for axes in drawn[0].axes]
    assert texts == [["1", "2", "3", "–"], ["5", "6", "7", "9"]]
    bold = [[p.get_linewidth() > 2 for p in axes.patches] for axes in drawn[0].axes]
    assert bold == [[], [True]]


def test_each_part_of_a_recorded_step_follows_the_one_before(drawn):
    timeline.show_recorded(timeline.recorded_timelines()[False])
    (axes,) = drawn[0].axes
    assert sum(len(part.get_paths()) for part in axes.collections) == 3 * 4 * 4
    assert "unordered" in axes.get_title(loc="left")
