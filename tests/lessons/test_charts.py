"""Every figure of the lessons: it draws, with a title and labels, and can be read aloud."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from lib.core.figures import alt_text
from lib.core.files import ROOT
from lib.lessons.ddp import figures as ddp
from lib.lessons.ddp.ring import ring_all_reduce
from lib.lessons.flash_attention import figures as flash
from lib.lessons.fsdp.figures import show_step
from lib.lessons.fsdp.orders import Played
from lib.lessons.fsdp.orders import Span as Event
from lib.lessons.hopper import figures as hopper
from lib.lessons.hopper import timeline
from lib.lessons.mesh import figures as mesh
from lib.lessons.model.figures import show_differences
from lib.lessons.profiling import figures as profiling
from lib.lessons.profiling import records
from lib.lessons.profiling.simulated import ToyTrainer
from lib.lessons.training import figures as training
from lib.lessons.training.broken import read_broken_runs
from lib.lessons.zero1 import figures as zero1
from lib.profiling.measurement import Measurement
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
SPANS = [(0, "forward", 0, 0.0, 1.0), (1, "forward", 0, 1.0, 2.0), (1, "backward", 0, 2.0, 4.0)]
PAIRS = {"consecutive": [[3, 3], [0, 4]], "zigzag": [[3, 3], [2, 2]]}
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
    "schedules": lambda: mesh.show_schedules({"GPipe": SPANS, "1F1B": SPANS}),
    "work": lambda: mesh.show_work(PAIRS),
    "contexts": lambda: zero1.show_contexts(CONTEXTS, title="Long sequences"),
}


def test_each_figure_of_a_lesson_has_a_row():
    files = (ROOT / "lib/lessons").glob("*/figures.py")
    shown = {name for file in files for name in re.findall(r"def (show_\w+)", file.read_text())}
    # a run of a kernel is drawn in triton/test_figures.py
    assert shown - {"show_run"} <= set(re.findall(r"show_\w+", Path(__file__).read_text()))


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
