"""What notebook 06 shows: online softmax in steps, code of kernels, who works when, records."""

import ast
import importlib.util
import itertools
import json
import random
from pathlib import Path

import nbformat
import numpy as np
import pytest
from matplotlib.figure import Figure

from lib.flash_attention import reference
from lib.lessons import show
from lib.lessons.flash_attention.explorers import (
    draw_softmax_step,
    needed_row,
    recorded_on_gpu,
    show_cuda,
    show_kernel,
    softmax_steps,
)
from lib.lessons.flash_attention.figures import peer_speeds
from lib.lessons.flash_attention.schedule import (
    STAGES,
    TIMELINES,
    busy_share,
    run_order,
    simulate,
)
from lib.model.attention import scaled_dot_product_attention

ROOT = Path(__file__).resolve().parents[3]
SCORES = np.array([0.5, -1.0, 2.0, 1.5, 30.0, 2.5, -40.0])
VALUES = np.random.default_rng(0).normal(size=(7, 3))


@pytest.mark.parametrize("tile", [1, 2, 3, 7, 9])
def test_after_each_tile_the_output_is_softmax_of_the_keys_seen(tile):
    steps = softmax_steps(SCORES, VALUES, tile)
    assert [step.seen for step in steps] == [0, *range(tile, 7, tile), 7]
    for step in steps[1:]:
        weights = np.exp(SCORES[: step.seen] - SCORES[: step.seen].max())
        assert step.maximum == SCORES[: step.seen].max()
        assert step.total == pytest.approx(weights.sum())
        assert step.out / step.total == pytest.approx(weights @ VALUES[: step.seen] / weights.sum())


def test_exponentials_are_drawn_for_the_keys_seen_and_shrink_with_a_new_maximum():
    steps = softmax_steps(SCORES, VALUES, 3)
    exponentials, words = [], []
    for number in range(len(steps)):
        figure = Figure()
        draw_softmax_step(figure, SCORES, steps, number)
        exponentials.append([bar.get_height() for bar in figure.axes[1].patches])
        words.append(figure.get_suptitle())
    assert not any(exponentials[0])
    assert exponentials[1] == pytest.approx([np.exp(-1.5), np.exp(-3), 1, 0, 0, 0, 0])
    assert exponentials[2][2] == pytest.approx(np.exp(2 - 30))
    starts = ["Nothing seen", "First tile: m = 2.00", "m: 2.00 → 30.00", "m stays 30.00"]
    assert all(text.startswith(start) for text, start in zip(words, starts, strict=True))


SETTINGS = [*TIMELINES.values(), {"warpgroups": 3, "tiles": 5, "runs_ahead": True}]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_work_comes_after_what_it_needs(setting):
    spans = {(s.who, s.what, s.tile): s for s in simulate(**setting)}
    groups, tiles = range(setting["warpgroups"]), range(setting["tiles"])
    assert len(spans) == len(tiles) * (2 + 3 * len(groups))
    for group, tile in itertools.product(groups, tiles):
        scores, softmax, values = (
            spans[group, what, tile] for what in ("scores", "softmax", "values")
        )
        assert spans[-1, "load K", tile].end <= scores.start
        assert spans[-1, "load V", tile].end <= values.start
        assert scores.end <= softmax.start < softmax.end <= values.start
        old = tile - STAGES
        if old >= 0:
            assert spans[group, "scores", old].end <= spans[-1, "load K", tile].start
            assert spans[group, "values", old].end <= spans[-1, "load V", tile].start
        if tile and not setting["runs_ahead"]:
            assert spans[group, "values", tile - 1].end <= scores.start


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_tensor_cores_do_no_more_than_they_can(setting):
    spans = simulate(**setting)
    matmuls = 2 * setting["tiles"] * setting["warpgroups"]
    assert busy_share(spans) * max(span.end for span in spans) == pytest.approx(matmuls, rel=0.1)
    if setting.get("ping_pong"):
        times = sorted((s.start, s.end) for s in spans if s.what in ("scores", "values"))
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(times))


def test_asking_ahead_more_warpgroups_and_turns_keep_the_tensor_cores_busy():
    shares = {name: busy_share(simulate(**setting)) for name, setting in TIMELINES.items()}
    assert shares["one, step by step"] < shares["one, issuing ahead"]
    assert shares["two, unordered"] < 0.8 * shares["two, ping-pong"]
    assert shares["two, ping-pong"] < shares["three, ping-pong"]


TOGETHER = "A.S{0} B.S{0} A.PV{0} B.PV{0}"


def test_tensor_cores_follow_an_order_and_wait_for_what_a_product_needs():
    order = " ".join(TOGETHER.format(i) for i in range(4))
    spans = {(s.who, s.what, s.tile): s for s in run_order(order)}
    names = [(group, what) for what in ("scores", "values") for group in (0, 1)]
    times = [spans[group, what, i] for i in range(4) for group, what in names]
    assert all(a.end <= b.start for a, b in itertools.pairwise(times))
    for group, tile in itertools.product((0, 1), range(4)):
        softmax = spans[group, "softmax", tile]
        assert spans[group, "scores", tile].end <= softmax.start
        assert softmax.end <= spans[group, "values", tile].start


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("A.S3", ""), r"A\.S3 must be there once, found 0 times"),
        (("A.S3", "A.S3 A.S3"), r"A\.S3 must be there once, found 2 times"),
        (("A.S3", "A.S4"), r"no matmul is called 'A\.S4'"),
        (("A.S0 B.S0 A.PV0", "A.PV0 A.S0 B.S0"), r"A\.PV0 waits for A\.S0, which comes later"),
        (("A.S0 B.S0", "A.S0 B.S0 A.S1 A.S2"), r"must be there once"),
    ],
)
def test_an_order_that_cannot_be_done_is_told_why(change, message):
    order = " ".join(TOGETHER.format(i) for i in range(4))
    with pytest.raises(ValueError, match=message):
        run_order(order.replace(*change))


def test_a_warpgroup_has_room_for_two_tiles_of_scores():
    others = "A.PV0 B.S0 B.PV0 A.PV1 B.S1 B.PV1 A.PV2 B.S2 B.PV2 A.S3 A.PV3 B.S3 B.PV3"
    with pytest.raises(ValueError, match=r"A\.S2 waits for A\.PV0, which comes later"):
        run_order(f"A.S0 A.S1 A.S2 {others}")


def test_any_order_can_be_done_in_which_scores_come_first_and_have_room():
    one = [f"{what}{i}" for i in range(4) for what in ("S", "PV")]
    # one warpgroup after the other
    spans = run_order(" ".join(f"{group}.{word}" for group in "AB" for word in one))
    assert not [span for span in spans if span.who < 0]
    generator = random.Random(0)
    for _ in range(100):
        queues = {"A": (0, 0), "B": (0, 0)}
        order = []
        while len(order) < 16:
            group = generator.choice("AB")
            scores, values = queues[group]
            # scores come before values, at most two tiles ahead
            if scores < min(4, values + 2) and (scores == values or generator.random() < 0.5):
                order.append(f"{group}.S{scores}")
                queues[group] = scores + 1, values
            elif values < scores:
                order.append(f"{group}.PV{values}")
                queues[group] = scores, values + 1
        assert len(run_order(" ".join(order))) == 24


def test_speeds_are_of_kernels_that_were_measured():
    row = {"direction": "forward", "head_dim": 64, "mask": "causal", "queries": 8, "keys": 8}
    rows = [row | {"kernel": "flash_attention_triton", "tflops": 3.0}]
    rows += [row | {"kernel": "sdpa_cudnn", "tflops": 2.0}, row | {"kernel": "sdpa_flash"}]
    rows += [row | {"kernel": "fa4", "tflops": 4.0, "keys": 9}]
    rows += [row | {"kernel": "sdpa_cudnn", "tflops": 9.0, "mask": "full"}]
    found = peer_speeds(rows, "forward", 64)
    assert found == {"ours": {8: 3.0}, "cuDNN": {8: 2.0}}


def test_code_of_a_kernel_is_shown_without_its_compiler(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = show_kernel(
        "flash_attention/triton_kernels", "_load_rows", "row = tl.arange", "column"
    ).data
    file = "lib/flash_attention/triton_kernels.py"
    link, shown = text.split(", ", 1)
    assert shown.startswith("`_load_rows`:\n\n```python\nrow =")
    line = int(link.removeprefix(f"[`{file}`](../{file}#line=").removesuffix(")"))
    assert "row = tl.arange" in (ROOT / file).read_text(encoding="utf-8").splitlines()[line]
    assert text.endswith("column = tl.arange(0, BD)\n```")


NOTEBOOK = ROOT / "notebooks/06_flash_attention.ipynb"
SHOWING = [
    cell.source
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells
    if cell.cell_type == "code" and ("show_kernel(" in cell.source or "show_source(" in cell.source)
    if not cell.source.startswith("import")
]


@pytest.mark.parametrize("source", SHOWING)
def test_every_piece_of_code_in_the_notebook_is_there_and_parses(source):
    shown = []
    names = {
        "display": shown.append,
        "show_kernel": show_kernel,
        "show_cuda": lambda *given: show_cuda(*given) and None,
        "show": show,
        "reference": reference,
        "scaled_dot_product_attention": scaled_dot_product_attention,
    }
    body = ast.parse(source).body
    exec(compile(ast.Module(body[:-1], []), "cell", "exec"), names)
    shown.append(eval(compile(ast.Expression(body[-1].value), "cell", "eval"), names))
    # C++, which nobody parses here, is None
    for markdown in filter(None, shown):
        code = markdown.data.split("```python\n")[1].removesuffix("\n```")
        # an excerpt may begin inside of a loop or function
        ast.parse("def f():\n" + "".join(f"    {line}\n" for line in code.split("\n")))


def test_a_row_that_the_lesson_needs_is_found_or_named():
    rows = [{"kernel": "a", "queries": 8}, {"kernel": "b", "queries": 8}]
    assert needed_row(rows, kernel="b", queries=8) is rows[1]
    with pytest.raises(LookupError, match=r"no measured row has kernel = 'b', queries = 16"):
        needed_row(rows, kernel="b", queries=16)


def test_of_records_the_newest_of_each_case_count_on_the_gpu_with_the_most(tmp_path):
    def record(device, queries, ms, samples=3):
        config = {"queries": queries, "kernels": ["sdpa"], "samples": samples}
        return {"device": device, "cpu": "CPU", "config": config, "figures": {"ms": ms}}

    path = tmp_path / "sweep.jsonl"
    given = [record("CPU", n, 0) for n in range(9)]
    given += [record("GPU A", 8, 1), record("GPU A", 16, 2), record("GPU B", 8, 3)]
    given += [record("GPU A", 8, 4, samples=5)]
    path.write_text("".join(json.dumps(one) + "\n" for one in given))
    found = recorded_on_gpu(path)
    assert {(r["config"]["queries"], r["figures"]["ms"]) for r in found} == {(8, 4), (16, 2)}
    assert {r["device"] for r in found} == {"GPU A"}
    path.write_text(json.dumps(given[0]) + "\n")
    assert recorded_on_gpu(path) == recorded_on_gpu(tmp_path / "none.jsonl") == []
