"""The tokenizer's benchmark: samples, medians, texts and results; the real run takes minutes."""

import numpy as np
import pytest
import torch

import lib.tools.benchmarks.tokenizer as benchmark
from lib.data.stories import generate_stories
from lib.tokenizer.pretokenize import SEPARATOR
from lib.tools.benchmarks import tokenizer_candidates as candidates
from lib.tools.benchmarks.tokenizer import (
    TokenizerBenchmarkConfig,
    benchmark_tokenizer,
    tokenizer_groups,
)
from lib.tools.benchmarks.tokenizer_candidates import (
    compare_ids,
    documents,
    in_new_process,
    interleave,
    peak_memory,
    summarize,
)


def test_candidates_are_interleaved_and_a_slow_one_has_one_sample():
    order = []

    def candidate(name, seconds):
        return lambda: order.append(name) or {"seconds": seconds, "bytes": 1}

    found = {"a": candidate("a", 1.0), "slow": candidate("slow", 31.0)}
    found["b"] = candidate("b", 29.0)
    results = interleave(found, 3)
    assert order == ["a", "slow", "b", "a", "b", "a", "b"]
    assert [len(samples) for samples in results.values()] == [3, 1, 3]


def test_a_summary_has_medians_and_throughputs():
    results = {
        "numba": [{"seconds": s, "bytes": 4_000_000} for s in (2.0, 1.0, 9.0)],
        "slow": [{"seconds": 2.0, "bytes": 1_000_000, "peak_MB": peak} for peak in (5, 7)],
    }
    ours, slow = summarize(results)
    assert (ours["seconds"], ours["spread"], ours["samples"]) == (2.0, 8.0, 3)
    assert (ours["MB_per_s"], ours["ratio"], ours["peak_MB"]) == (2.0, 1.0, None)
    assert (slow["MB_per_s"], slow["ratio"], slow["peak_MB"]) == (0.5, 4.0, 7)


@pytest.mark.parametrize(
    "text", ["", "one", f"one{SEPARATOR}two\n{SEPARATOR}", f"{'x' * (1 << 20)}{SEPARATOR}y"]
)
def test_documents_are_the_text_without_separators(tmp_path, text):
    path = tmp_path / "text.txt"
    path.write_text(text)
    assert list(documents(path)) == text.split(SEPARATOR)


def test_all_tasks_leave_records_of_the_same_text_which_resume(tmp_path, monkeypatch):
    path = tmp_path / "other.txt"
    path.write_text("".join(generate_stories(20_000)), newline="")
    monkeypatch.setattr(benchmark, "DOCUMENT_CHARACTERS", (50, 3_000))
    quick = {"seconds": 1.0, "bytes": 9_000_000}
    monkeypatch.setattr(candidates, "in_new_process", lambda *_: quick)
    config = TokenizerBenchmarkConfig(
        texts=(str(path),), megabytes=1, vocab_sizes=(300,), samples=1, output=tmp_path
    )
    records = benchmark_tokenizer(config)
    asked = [case for group in tokenizer_groups(config, torch.device("cpu")) for case in group]
    assert [record["config"] for record in records] == [vars(case) for case in asked]
    tasks = {}
    for record in records:
        case = record["config"]
        tasks.setdefault(case["task"], []).append(case["candidate"])
        # names of files without their folders
        assert case["text"] == "other"
        assert record["figures"]["seconds"] > 0
    assert tasks["train"][:2] == ["numba", "python"]
    assert tasks["encode"][:2] == ["numba", "python"]
    assert tasks["documents of 50 characters"][-1] == "numba, encode_batch"
    assert ("tokenizers" in tasks["encode"]) == benchmark.is_installed("tokenizers")
    table = (tmp_path / "tokenizer_benchmark.md").read_text()
    assert table.count("| numba, encode_batch |") == 2  # once for each size of documents

    monkeypatch.setattr(benchmark, "measure_task", lambda *_: pytest.fail("measured again"))
    assert benchmark_tokenizer(config) == records


def test_a_missing_text_is_named_before_anything_is_measured(tmp_path):
    config = TokenizerBenchmarkConfig(texts=("nowhere.txt",), output=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"texts must be .* got 'nowhere.txt'"):
        benchmark_tokenizer(config)


def test_peers_with_other_ids_are_named(caplog):
    ours = np.array([1, 2, 3], np.uint16)
    makers = {
        "numba": lambda: lambda text: ours,
        "good": lambda: lambda text: ours.astype(np.uint32),
        "bad": lambda: lambda text: ours[:2],
    }
    assert compare_ids(makers, "text") == {"good": True, "bad": False}
    assert "bad gives other ids" in caplog.text


def test_peak_memory_is_of_the_new_process_alone():
    big = np.ones(60_000_000)
    assert peak_memory() > 480
    # with torch or pandas loaded it would be 300
    assert in_new_process(peak_memory) < 200
    assert big[0] == 1
