"""The report of the attention benchmark: rows, targets, tables and figures, from records."""

import csv

import pytest

from lib.tools.benchmarks.attention import flops
from lib.tools.benchmarks.attention_report import (
    REPORT,
    attention_frame,
    attention_rows,
    direction_tables,
    main_rows,
    newest_records,
    remarks,
    summary,
    targets,
)
from lib.tools.benchmarks.harness import Case
from tests.tools.benchmarks.tables import rows_of

# such as of a figure that is too small for its labels
pytestmark = pytest.mark.filterwarnings("error::UserWarning")

CASE = {
    "head_dim": 64,
    "is_causal": True,
    "direction": "forward",
    "dtype": "bfloat16",
    "batch_size": 2,
    "heads": 2,
    "kernels": ["sdpa"],
    "warmup": 1,
    "samples": 2,
    "max_seconds": 1.0,
}
OURS, FLEX, CUDNN = "flash_attention_triton", "flex_attention", "sdpa_cudnn"


def record(length: int, times_ms: dict | None, **changes) -> dict:
    """A record of a square case; a time of None is out of memory, a text another status."""
    config = {**CASE, "queries": length, "keys": length, **changes}
    kernels = {}
    for kernel, ms in (times_ms or {}).items():
        kernels[kernel] = {"status": "oom" if ms is None else ms, "reason": "no kernel"}
        if isinstance(ms, float):
            kernels[kernel] = {"status": "ok", "median_ms": ms, "tflops": 1 / ms}
            kernels[kernel] |= {"times_ms": [ms], "peak_memory_bytes": 10**9}
    status = "oom" if times_ms is None else "ok"
    figures = {"status": status, "flops": flops(Case(**config)), "kernels": kernels}
    rest = {"device": "chip", "versions": {"torch": "2.6"}, "commit": None, "date": "2026-01-01"}
    return {"config": config, "figures": figures, **rest}


def target_lines(*records: dict) -> dict[str, dict]:
    """The lines of the table of targets by their words."""
    [found] = targets(attention_frame(records))
    return {line["against"]: line for line in rows_of(found)}


def test_targets_are_met_or_not_by_their_ratios():
    times = {OURS: 1.0, FLEX: 0.99, CUDNN: 0.91}
    lines = target_lines(
        record(4096, times | {"sdpa_flash": 2.0}),
        record(1024, times | {FLEX: 1.5}),
        record(512, times),
    )
    flex = lines["FlexAttention, N ≥ 1,024"]
    assert (flex["met"], flex["least ratio"]) == ("1 of 2", "0.990")
    assert flex["in"].startswith("forward, causal, 4,096 × 4,096")
    sdpa = lines["the best SDPA backend, N ≥ 4,096"]
    assert (sdpa["met"], sdpa["least ratio"]) == ("1 of 1", "0.910")
    assert len(lines) == 2


def test_a_peer_out_of_memory_is_beaten_and_ours_is_not_excused():
    for ours, peer, met in ((1.0, None, 1), (None, 1.0, 0)):
        case = record(2048, {OURS: ours, "vectorized_torch": peer}, dtype="float32")
        [line] = target_lines(case).values()
        assert line["met"] == f"{met} of 1"


def test_memory_of_a_million_tokens_stands_beside_that_of_a_quarter():
    shape = {"batch_size": 1, "heads": 12, "head_dim": 64}
    records = [record(2**18, {OURS: 10.0}, **shape), record(2**20, {OURS: 160.0}, **shape)]
    [found] = targets(attention_frame(records))
    assert [line["median_ms"] for line in rows_of(found, -1)] == ["10.0", "160"]


def test_there_is_no_target_for_other_cases():
    assert targets(attention_frame([record(512, {OURS: 1.0, FLEX: 1.0})])) == []


def test_records_become_tables_and_figures(tmp_path):
    kernels = {OURS: 1.0, "sdpa": 2.0, CUDNN: "unsupported", "vectorized_torch": None}
    records = [
        record(1024, kernels),
        record(2048, kernels, queries=512),
        # memory ran out for the inputs
        record(4096, None),
        record(1024, kernels | {"sdpa": "wrong"}, direction="backward"),
    ]
    REPORT.write(records, tmp_path)
    stem = tmp_path / "attention_sweep"
    text = stem.with_name("attention_sweep_report.md").read_text()
    assert text.startswith("# Attention\n\nchip, torch 2.6, 2026-01-01.\n")
    forward, backward = text.split("## forward")[1].split("## backward")
    for part in (forward, backward):
        titles = [line for line in part.splitlines() if line.startswith("###")]
        assert titles == ["### TFLOP/s", "### Time (ms)", "### Peak memory (GB)"]
        # a kernel that is never supported has no column
        assert CUDNN not in part
    assert "| 512 × 2,048 " in forward
    # of one kernel in two cases and of one in the last, in three tables
    assert forward.count(" oom ") == (2 + 1) * 3
    assert " 2.00 |" in forward.split("### Time")[0]
    assert f"`{CUDNN}` refused 3 cases: no kernel" in text
    assert "Wrong: `sdpa`: backward, causal, 1,024 × 1,024" in text
    for name in ("forward", "scaling"):
        path = stem.with_name(f"attention_sweep_{name}.png")
        assert path.read_bytes().startswith(b"\x89PNG")

    rows = list(csv.DictReader(stem.with_name("attention_sweep_results.csv").open()))
    assert len(rows) == 3 * 4 + 1
    assert not any("times_ms" in row for row in rows)
    assert {row["status"] for row in rows} == {"ok", "unsupported", "oom", "wrong"}


def test_each_number_stands_beside_its_own_case_in_the_order_of_the_records():
    # not sorted: older versions of pandas mix that up if they are told not to sort
    cases = [(64, True, 1024), (64, False, 1024), (128, True, 1024), (64, True, 4096)]
    records = [
        record(length, {OURS: ms, "sdpa": 10 * ms}, head_dim=head_dim, is_causal=is_causal)
        for ms, (head_dim, is_causal, length) in zip((1.0, 2.0, 3.0, 4.0), cases)
    ]
    times = rows_of(direction_tables(attention_frame(records))[3])
    columns = ("head_dim", "mask", "queries × keys", OURS, "sdpa")
    assert [[line[name] for name in columns] for line in times] == [
        ["64", "causal", "1,024 × 1,024", "1.00", "10.0"],
        ["64", "full", "1,024 × 1,024", "2.00", "20.0"],
        ["128", "causal", "1,024 × 1,024", "3.00", "30.0"],
        ["64", "causal", "4,096 × 4,096", "4.00", "40.0"],
    ]


def test_a_report_without_kernels_has_no_figures(tmp_path):
    REPORT.write([record(1024, {CUDNN: "unsupported"})], tmp_path)
    assert (
        "None of these kernels runs here." in (tmp_path / "attention_sweep_report.md").read_text()
    )
    assert not list(tmp_path.glob("*.png"))


def test_the_newest_record_of_a_case_counts_whatever_its_kernels_and_samples():
    old, new = record(128, {"sdpa": 1.0}), record(128, {OURS: 3.0}, kernels=[OURS], samples=9)
    other = record(128, {"sdpa": 4.0}, heads=3)
    assert newest_records([old, other, new]) == [new, other]


def test_figures_show_the_sweep_and_not_the_cases_of_targets():
    sweep = [record(n, {"sdpa": 1.0}, batch_size=512 // n) for n in (128, 256)]
    other = record(256, {"sdpa": 1.0}, batch_size=1, heads=1)
    assert main_rows(attention_rows([other, *sweep])) == attention_rows(sweep)


def test_remarks_count_what_the_compiler_replaced():
    record_ = record(1024, {"vectorized_torch_compiled": 1.0})
    record_["figures"]["kernels"]["vectorized_torch_compiled"]["became_sdpa"] = True
    (line,) = remarks(attention_rows([record_]))
    assert "in 1 of 1 cases" in line


def test_the_terminal_shows_the_fastest_kernel_of_each_case_beside_pytorchs():
    records = [record(1024, {"sdpa": 2.0, OURS: 0.5}), record(2048, {FLEX: None}), record(64, None)]
    fastest, *failed = [list(line.values()) for line in rows_of(summary(records))]
    assert fastest[0].startswith("forward, causal, 1,024 × 1,024, head_dim 64")
    assert fastest[1:4] == ["2.00", OURS, "0.500"]
    assert float(fastest[4]) == pytest.approx(records[0]["figures"]["flops"] / 0.5e9, rel=0.01)
    assert [line[1:] for line in failed] == [["–"] * 4] * 2


def test_replays_of_cuda_graphs_are_cases_of_their_own():
    times = {OURS: 1.0, "fa4": 0.5}
    records = [record(1024, times), record(1024, times | {"fa4": 2.0}, in_graph=True)]
    # records made before the setting lack it
    assert "in_graph" not in records[0]["config"]
    rows = attention_rows(newest_records(records))
    assert [row["in_graph"] for row in rows] == [False, False, True, True]
    assert len({row["case"] for row in rows}) == 2
    speeds = direction_tables(attention_frame(records))[1]
    eager, graph = (line for line in speeds.splitlines() if "1,024 ×" in line)
    assert "Python" in eager
    assert "a CUDA graph" in graph
    assert "0.500" in eager.split("|")[-3]
    assert "2.00" in graph.split("|")[-3]
