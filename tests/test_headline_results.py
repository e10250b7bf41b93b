"""The README's table of results: it says what the records say."""

from pathlib import Path

import pytest

from lib.headline_results import (
    END,
    START,
    attention_rows,
    fill_in,
    headline_rows,
    tokenizer_rows,
    training_rows,
)

ROOT = Path(__file__).resolve().parent.parent


def test_the_readme_says_what_the_records_say():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    filled = fill_in(text, headline_rows(ROOT / "artifacts"))
    assert text == filled, "python -m lib.headline_results puts it right"


def test_records_that_the_table_links_to_are_there():
    for row in headline_rows(ROOT / "artifacts"):
        path = row["on"].partition("(")[2].rstrip(")")
        assert (ROOT / path).exists()


def test_without_records_there_is_no_row(tmp_path):
    assert headline_rows(tmp_path) == []


def test_the_best_peer_counts_and_our_readable_tokenizer_is_none():
    def record(candidate, speed, task):
        figures = {"task": task, "text": "natural", "vocab_size": 10_000, "cores": 1}
        return {"figures": {**figures, "candidate": candidate, "MB_per_s": speed}, "device": "cpu"}

    speeds = {"numba": 60.0, "python": 50.0, "slow": 10.0, "quick": 20.0}
    records = [record(*item, task) for item in speeds.items() for task in ("train", "encode")]
    first, second = tokenizer_rows(records)
    assert (first["best other"], first["times"], first["here"]) == ("20 (quick)", "3.00", "60 MB/s")
    assert second["on"].startswith("[cpu, 1 core]")


def test_the_newest_training_counts():
    def record(candidate, speed):
        figures = {"task": "step", "model": "gpt2-124m", "candidate": candidate}
        return {"figures": {**figures, "tokens_per_s": speed}, "device": "gpu"}

    records = [record("all", 1.0), record("nanoGPT-style", 500.0), record("all", 600.0)]
    assert training_rows(records)[0]["times"] == "1.20"


def test_attention_is_compared_with_the_fastest_kernel_that_ran():
    kernels = {"flash_attention_triton": 400.0, "sdpa_cudnn": None, "flex_attention": 300.0}
    figures = {"kernels": {name: {"tflops": speed} for name, speed in kernels.items()}}
    config = {"queries": 4096, "keys": 4096, "is_causal": True, "dtype": "bfloat16"}
    records = [
        {"config": {**config, "head_dim": d, "direction": way}, "figures": figures, "device": "gpu"}
        for d in (64, 128)
        for way in ("forward", "backward")
    ]
    rows = attention_rows(records)
    assert [row["best other"] for row in rows] == ["300 (flex_attention)"] * 4
    assert [row["times"] for row in rows] == ["1.33"] * 4


def test_a_text_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="right is: both, in this order"):
        fill_in(f"{END} {START}", [])
