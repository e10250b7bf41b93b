"""The README's table of results shows what the records say."""

import shutil
from pathlib import Path

import pytest

from lib.benchmarks.headline import (
    COMPARISONS,
    END,
    START,
    fill_in,
    fill_readme,
    headline_rows,
)

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_shows_what_the_records_say(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    filled = fill_in(text, headline_rows(ROOT / "artifacts"))
    assert text == filled, "run python -m lib benchmark headline"

    # the command restores a table that was lost
    shutil.copytree(ROOT / "artifacts", tmp_path / "artifacts", ignore=_all_but_records)
    before, after = text.partition(START)[0], text.partition(END)[2]
    (tmp_path / "README.md").write_text(f"{before}{START}\n{END}{after}", encoding="utf-8")
    fill_readme(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == text


def _all_but_records(folder, names):
    return [name for name in names if not name.endswith(".jsonl")]


def test_reports_that_the_table_links_to_exist():
    rows = headline_rows(ROOT / "artifacts")
    assert len(rows) == len(COMPARISONS) == 12
    assert all((ROOT / row["on"].partition("(")[2].rstrip(")")).exists() for row in rows)


def test_without_records_there_is_no_row(tmp_path):
    assert headline_rows(tmp_path) == []


TOKENIZER = COMPARISONS[0]


def record(candidate, speed, **changes):
    figures = {"candidate": candidate, "MB_per_s": speed, "cores": 2}
    return {"config": {}, "figures": figures | dict(TOKENIZER.where) | changes, "device": "cpu"}


def test_the_best_peer_counts_and_our_readable_tokenizer_is_not_a_peer():
    speeds = {"numba": 60.0, "python": 50.0, "tiktoken, slow": 10.0, "tokenizers, in blocks": 20.0}
    row = TOKENIZER.row([record(*item) for item in speeds.items()])
    assert (row["here"], row["best other"], row["times"]) == ("60 MB/s", "20 (tokenizers)", "3.00")
    assert row["on"].startswith("[cpu, 2 cores]")


def test_the_newest_record_of_the_case_counts_and_what_did_not_run_is_no_peer():
    records = [record("numba", 1.0), record("rustbpe", 500.0), record("tokenizers", None)]
    records += [record("numba", 600.0), record("numba", 1.0, text="stories")]
    assert TOKENIZER.row(records)["times"] == "1.20"


def test_a_text_without_the_marks_is_refused():
    with pytest.raises(ValueError, match=r"must contain .* and then"):
        fill_in(f"{END} {START}", [])
