"""Displays of notebooks 06 and 07: online softmax in steps, code of kernels, records."""

import ast
import json
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


SHOWING = [
    cell.source
    for name in ("06_flash_attention", "07_hopper")
    for cell in nbformat.read(ROOT / f"notebooks/{name}.ipynb", as_version=4).cells
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
