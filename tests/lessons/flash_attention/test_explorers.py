"""Displays of notebooks 06 and 07: online softmax in steps, code of kernels, records."""

import json

import numpy as np
import pytest

from lib.lessons.flash_attention.explorers import (
    needed_row,
    recorded_on_gpu,
    show_kernel,
    softmax_steps,
)

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


def test_a_kernel_is_shown_from_its_file_and_one_that_is_not_there_is_named():
    found = show_kernel("lessons/flash_attention/ladder_triton", "mask_on_diagonal", "for phase")
    assert "```python\nfor phase in tl.static_range(2)" in found.data
    with pytest.raises(ValueError, match="has no function 'nothing'"):
        show_kernel("lessons/flash_attention/ladder_triton", "nothing")


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
