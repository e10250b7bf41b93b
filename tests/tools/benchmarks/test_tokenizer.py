"""The tokenizer's benchmark: samples, medians, texts and results; the real run takes minutes."""

import numpy as np
import pytest

import lib.tools.benchmarks.tokenizer as benchmark
from lib.core.records import new_record
from lib.data.stories import generate_stories
from lib.tokenizer.pretokenize import SEPARATOR
from lib.tools.benchmarks.tokenizer import (
    TokenizerBenchmarkConfig,
    _without_folders,
    compare_ids,
    documents,
    in_new_process,
    interleave,
    measure_documents,
    measure_encoding,
    peak_memory,
    summarize,
    write_tokenizer_report,
)


def test_candidates_are_interleaved_and_a_slow_one_has_one_sample():
    order = []

    def candidate(name, seconds):
        return lambda: order.append(name) or {"seconds": seconds, "bytes": 1}

    candidates = {"a": candidate("a", 1.0), "slow": candidate("slow", 31.0)}
    candidates["b"] = candidate("b", 29.0)
    results = interleave(candidates, 3)
    assert order == ["a", "slow", "b", "a", "b", "a", "b"]
    assert [len(samples) for samples in results.values()] == [3, 1, 3]


def test_a_summary_has_medians_and_throughputs():
    results = {
        "numba": [{"seconds": s, "bytes": 4_000_000} for s in (2.0, 1.0, 9.0)],
        "slow": [{"seconds": 2.0, "bytes": 1_000_000, "peak_MB": peak} for peak in (5, 7)],
    }
    ours, slow = summarize(results, task="encode")
    assert (ours["seconds"], ours["spread"], ours["samples"]) == (2.0, 8.0, 3)
    assert (ours["MB_per_s"], ours["ratio"], ours["peak_MB"]) == (2.0, 1.0, None)
    assert (slow["MB_per_s"], slow["ratio"], slow["peak_MB"]) == (0.5, 4.0, 7)
    assert slow["task"] == "encode"


@pytest.mark.parametrize(
    "text", ["", "one", f"one{SEPARATOR}two\n{SEPARATOR}", f"{'x' * (1 << 20)}{SEPARATOR}y"]
)
def test_documents_are_the_text_without_separators(tmp_path, text):
    path = tmp_path / "text.txt"
    path.write_text(text)
    assert list(documents(path)) == text.split(SEPARATOR)


def test_all_candidates_encode_and_decode_the_same_text(tmp_path, monkeypatch):
    path = tmp_path / "stories.txt"
    path.write_text("".join(generate_stories(20_000)), newline="")
    sampled = {}

    def noted(function, num_bytes):
        def sample():
            function()
            return {"seconds": 1.0, "bytes": num_bytes}

        sampled.setdefault(num_bytes, []).append(function)
        return sample

    monkeypatch.setattr(benchmark, "timed", noted)
    rows = list(measure_encoding(path, 300, 1))
    assert list(sampled) == [path.stat().st_size]
    tasks = {}
    for row in rows:
        tasks.setdefault(row["task"], []).append(row["candidate"])
        assert (row["text"], row["vocab_size"], row["ratio"]) == ("stories", 300, 1.0)
    assert tasks["encode"][:2] == ["numba", "python"]
    assert tasks["decode"][:2] == ["numba", "numba, from a list"]
    if benchmark.is_installed("tiktoken"):
        assert {"tiktoken, 256 KB blocks", "tiktoken, by document"} <= set(tasks["encode"])
        assert tasks["decode"][2:] == ["tiktoken"]


def test_peers_with_other_ids_are_named(caplog):
    ours = np.array([1, 2, 3], np.uint16)
    makers = {
        "numba": lambda: lambda text: ours,
        "good": lambda: lambda text: ours.astype(np.uint32),
        "bad": lambda: lambda text: ours[:2],
    }
    assert compare_ids(makers, "text") == {"good": True, "bad": False}
    assert "bad gives other ids" in caplog.text


def test_documents_are_encoded_one_by_one_and_as_a_batch(tmp_path, monkeypatch):
    path = tmp_path / "stories.txt"
    path.write_text("".join(generate_stories(20_000)), newline="")
    monkeypatch.setattr(benchmark, "DOCUMENT_CHARACTERS", (50, 3_000))
    rows = list(measure_documents(path, 300, 1))
    tasks = [f"documents of {size} characters" for size in ("50", "3,000")]
    assert list(dict.fromkeys(row["task"] for row in rows)) == tasks
    candidates = [row["candidate"] for row in rows if row["task"] == tasks[0]]
    assert candidates[0] == "numba"
    assert candidates[-1] == "numba, encode_batch"


def test_peak_memory_is_of_the_new_process_alone():
    big = np.ones(60_000_000)
    assert peak_memory() > 480
    assert in_new_process(peak_memory) < 300
    assert big[0] == 1


def test_records_keep_file_names_without_folders(tmp_path):
    paths = {"texts": ("stories", "/somewhere/else.txt"), "large_files": ("/x/y.txt",)}
    kept = _without_folders(TokenizerBenchmarkConfig(**paths, output=tmp_path))
    assert (kept.texts, kept.large_files) == (("stories", "else.txt"), ("y.txt",))
    assert str(kept.output) == tmp_path.name


def test_results_are_a_table_and_a_figure(tmp_path):
    records = []
    for task in ("train", "encode"):
        results = {
            "numba": [{"seconds": 1.0, "bytes": 9_000_000}],
            "tiktoken, by document": [{"seconds": 2.0, "bytes": 3_000_000}],
        }
        common = {"task": task, "text": "stories", "vocab_size": 500, "cores": 2}
        records += [new_record(figures) for figures in summarize(results, **common)]
    write_tokenizer_report(records, tmp_path)
    table = (tmp_path / "tokenizer_benchmark.md").read_text()
    assert "| tiktoken, by document |" in table
    assert "6.00" in table
    assert (tmp_path / "tokenizer_benchmark.csv").read_text().count("\n") == 5
    assert (tmp_path / "tokenizer_benchmark.png").read_bytes().startswith(b"\x89PNG")
