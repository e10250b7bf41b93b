"""The pages of results show what the records say."""

import shutil
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from lib.core.records import read_records, to_frame
from lib.tools.benchmarks.attention_report import attention_rows
from lib.tools.benchmarks.headline import (
    COMPARISONS,
    END,
    START,
    fill_in,
    fill_pages,
    headline_pages,
    headline_rows,
)

ROOT = Path(__file__).resolve().parents[3]


def test_the_pages_show_what_the_records_say(tmp_path):
    shutil.copytree(ROOT / "artifacts", tmp_path / "artifacts", ignore=_all_but_records)
    (tmp_path / ".github").mkdir()
    for page, content in headline_pages(ROOT).items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert text == fill_in(text, content), "run python -m lib benchmark headline"
        # the command restores what was lost
        before, after = text.partition(START)[0], text.partition(END)[2]
        (tmp_path / page).write_text(f"{before}{START}\n{END}{after}", encoding="utf-8")
    fill_pages(tmp_path)
    for page in headline_pages(ROOT):
        assert (tmp_path / page).read_text() == (ROOT / page).read_text()


def _all_but_records(folder, names):
    return [name for name in names if not name.endswith(".jsonl")]


def test_reports_that_the_table_links_to_exist_and_without_records_there_is_no_row(tmp_path):
    assert headline_rows(tmp_path) == []
    rows = [row for _, row in headline_rows(ROOT / "artifacts")]
    assert len(rows) == len(COMPARISONS) == 12
    assert all((ROOT / row["on"].partition("(")[2].rstrip(")")).exists() for row in rows)


ATTENTION = [one for one in COMPARISONS if one.file == "attention_repeats"]


def test_what_is_said_of_attention_on_longer_texts_is_of_the_same_runs():
    longer = {"queries": 16_384, "keys": 16_384}
    rows = [
        replace(one, where=one.where | longer).row(one.read(ROOT / "artifacts"))
        for one in ATTENTION
    ]
    assert {row["runs"] for row in rows} == {"5"}
    assert all(row["best other"].endswith("(FlashAttention-4)") for row in rows)
    forward, forward_128, backward, backward_128 = (row["times"] for row in rows)
    words = (
        f"forward {forward} times FlashAttention-4 with heads of 64 and {forward_128} with 128, "
        f"backward {backward} and {backward_128}."
    )
    assert words in " ".join((ROOT / ".github/RESULTS.md").read_text(encoding="utf-8").split())
    # as the README says of heads of 64
    assert float(forward.split()[-1]) < 1


def test_the_table_of_five_runs_in_the_notes_is_of_the_records():
    rows = attention_rows(read_records(ROOT / "artifacts/attention_repeats.jsonl"))
    notes = (ROOT / "artifacts/flash_attention_notes.md").read_text(encoding="utf-8")

    def speeds(kernel, tokens, head_dim, direction):
        case = kernel, tokens, head_dim, direction
        names = ("kernel", "queries", "head_dim", "direction")
        found = [row["tflops"] for row in rows if tuple(row[name] for name in names) == case]
        assert len(found) == 5
        return found

    def cells(*case, peers):
        ours = speeds("flash_attention_triton", *case)
        yield f"{median(ours):.0f}"
        for peer in peers:
            ratios = [one / other for one, other in zip(ours, speeds(peer, *case))]
            least, most = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
            yield least if least == most else f"{least} to {most}"

    for size in ((4096, 64), (4096, 128), (16_384, 64), (16_384, 128)):
        forward = cells(*size, "forward", peers=("fa4", "sdpa_cudnn"))
        backward = cells(*size, "backward", peers=("fa4", "fa4_deterministic", "sdpa_cudnn"))
        line = " | ".join([f"{size[0]:,}, {size[1]}", *forward, *backward])
        assert f"\n| {line} |\n" in notes


TOKENIZER = COMPARISONS[0]


def record(candidate, speed, **changes):
    figures = {"candidate": candidate, "MB_per_s": speed, "cores": 2}
    figures |= dict(TOKENIZER.where) | changes
    return {"config": None, "figures": figures, "device": "cpu", "date": "2026-01-01"}


def test_the_best_peer_counts_and_our_readable_tokenizer_is_not_a_peer():
    speeds = {"numba": 60.0, "python": 50.0, "tiktoken, slow": 10.0, "tokenizers, in blocks": 20.0}
    row = TOKENIZER.row(to_frame([record(*item) for item in speeds.items()]))
    assert (row["here"], row["best other"], row["times"]) == ("60 MB/s", "20 (tokenizers)", "3.00")
    assert row["on"].startswith("[cpu, 2 cores]")


def test_runs_make_an_interval_and_one_that_lacks_a_side_or_another_case_does_not_count():
    def run(ours, peer, **changes):
        return [record("numba", ours, **changes), record("rustbpe", peer, **changes)]

    records = [*run(100.0, 50.0), record("tokenizers", None), record("numba", 1.0)]
    records += [*run(600.0, 1.0, text="stories"), *run(90.0, 50.0)]
    row = TOKENIZER.row(to_frame(records))
    assert (row["here"], row["best other"]) == ("90 MB/s", "50 (rustbpe)")
    assert (row["times"], row["runs"]) == ("1.80 to 2.00", "2")


@pytest.mark.parametrize(
    ("speeds", "times"),
    [
        ([105.0], "1.05"),
        ([99.0, 105.0], "level (0.99 to 1.05)"),
        ([102.0, 108.0], "1.02 to 1.08"),
        ([97.0, 98.0], "0.97 to 0.98"),
        ([105.1, 105.2], "1.05"),
        ([99.9, 100.1], "level (1.00)"),
        ([10.0, 102.0, 103.0, 104.0, 105.0, 106.0], "1.02 to 1.06"),
    ],
)
def test_a_lead_that_runs_do_not_agree_on_is_level_and_five_runs_count(speeds, times):
    records = [record(*item) for ours in speeds for item in (("numba", ours), ("rustbpe", 100.0))]
    assert TOKENIZER.row(to_frame(records))["times"] == times


def test_a_text_without_the_marks_is_refused():
    with pytest.raises(ValueError, match=r"must contain .* and then"):
        fill_in(f"{END} {START}", "")
