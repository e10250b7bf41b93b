"""The tokenizer's benchmark: turns, medians, texts and results; the real run takes minutes."""

import numpy as np
import pytest

from lib.benchmark_tokenizer import (
    _without_folders,
    documents,
    in_new_process,
    peak_memory,
    summarize,
    take_turns,
    timed,
    write_results,
)
from lib.config import TokenizerBenchmarkConfig
from lib.pretokenize import SEPARATOR
from lib.report import new_record


def test_candidates_take_turns():
    order = []
    candidates = {
        name: lambda name=name: order.append(name) or {"seconds": 1.0, "bytes": 1} for name in "abc"
    }
    results = take_turns(candidates, 2)
    assert order == list("abcabc")
    assert [len(samples) for samples in results.values()] == [2, 2, 2]


def test_a_slow_candidate_has_one_turn():
    slow, quick = {"seconds": 31.0, "bytes": 1}, {"seconds": 1.0, "bytes": 1}
    results = take_turns({"slow": lambda: slow, "quick": lambda: quick}, 3)
    assert [len(samples) for samples in results.values()] == [1, 3]


def test_summary_is_of_medians_and_throughputs():
    results = {
        "ours": [{"seconds": s, "bytes": 4_000_000} for s in (2.0, 1.0, 9.0)],
        "slow": [{"seconds": 2.0, "bytes": 1_000_000, "peak_MB": peak} for peak in (5, 7)],
    }
    ours, slow = summarize(results, "ours", task="encode")
    assert (ours["seconds"], ours["spread"], ours["samples"]) == (2.0, 8.0, 3)
    assert (ours["MB_per_s"], ours["ratio"], ours["peak_MB"]) == (2.0, 1.0, None)
    assert (slow["MB_per_s"], slow["ratio"], slow["peak_MB"]) == (0.5, 4.0, 7)
    assert slow["task"] == "encode"


def test_timing_counts_the_bytes():
    calls = []
    sample = timed(lambda: calls.append(1), 123)()
    assert calls == [1]
    assert sample["bytes"] == 123
    assert sample["seconds"] >= 0


@pytest.mark.parametrize(
    "text", ["", "one", f"one{SEPARATOR}two\n{SEPARATOR}", f"{'x' * (1 << 20)}{SEPARATOR}y"]
)
def test_documents_are_the_text_without_separators(tmp_path, text):
    path = tmp_path / "text.txt"
    path.write_text(text)
    assert list(documents(path)) == text.split(SEPARATOR)


def test_peak_memory_is_of_the_new_process_alone():
    big = np.ones(60_000_000)
    assert peak_memory() > 480
    assert in_new_process(peak_memory) < 300
    assert big[0] == 1


def test_records_keep_names_and_no_folders(tmp_path):
    config = TokenizerBenchmarkConfig(
        texts=("stories", "/somewhere/else.txt"), large_files=("/x/y.txt",), output=tmp_path
    )
    kept = _without_folders(config)
    assert kept.texts == ("stories", "else.txt")
    assert kept.large_files == ("y.txt",)
    assert str(tmp_path.parent) not in str(kept)


def test_results_are_a_table_and_a_figure(tmp_path):
    records = []
    for task in ("train", "encode"):
        results = {
            "numba": [{"seconds": 1.0, "bytes": 9_000_000}],
            "tiktoken, by document": [{"seconds": 2.0, "bytes": 3_000_000}],
        }
        common = {"task": task, "text": "stories", "vocab_size": 500, "cores": 2}
        records += [new_record(figures) for figures in summarize(results, "numba", **common)]
    write_results(records, tmp_path)
    table = (tmp_path / "tokenizer_benchmark.md").read_text()
    assert "| tiktoken, by document |" in table
    assert "6.00" in table
    assert (tmp_path / "tokenizer_benchmark.csv").read_text().count("\n") == 5
    assert (tmp_path / "tokenizer_benchmark.png").read_bytes().startswith(b"\x89PNG")


def test_sizes_that_make_no_sense_are_named():
    with pytest.raises(ValueError, match="vocab_sizes"):
        TokenizerBenchmarkConfig(vocab_sizes=(100,))
    with pytest.raises(ValueError, match="megabytes is 0"):
        TokenizerBenchmarkConfig(megabytes=0)
