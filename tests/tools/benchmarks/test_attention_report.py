"""The report of the attention benchmark: rows, targets, tables and figures, from records."""

import csv

import pytest

from lib.tools.benchmarks.attention import flops
from lib.tools.benchmarks.attention_report import (
    REPORT,
    attention_frame,
    attention_rows,
    main_rows,
    newest_records,
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


NEARLY = [("0 of 1", "0.990"), ("1 of 1", "0.910")]


@pytest.mark.parametrize(
    ("length", "dtype", "times", "lines"),
    [
        (
            4096,
            "bfloat16",
            {OURS: 1.0, FLEX: 0.99, CUDNN: 0.91},
            NEARLY,
        ),
        (1024, "bfloat16", {OURS: 1.0, FLEX: 1.5, CUDNN: 0.1}, [("1 of 1", "1.50")]),
        # a peer out of memory is beaten, and ours is not excused
        (2048, "float32", {OURS: 1.0, "vectorized_torch": None}, [("1 of 1", "–")]),
        (2048, "float32", {OURS: None, "vectorized_torch": 1.0}, [("0 of 1", "–")]),
        # too short for every target
        (512, "bfloat16", {OURS: 1.0, FLEX: 1.0}, []),
    ],
)
def test_targets_are_met_or_not_by_their_ratios(length, dtype, times, lines):
    found = targets(attention_frame([record(length, times, dtype=dtype)]))
    shown = [(row["met"], row.get("least ratio", "–")) for text in found for row in rows_of(text)]
    assert shown == lines


def test_records_become_tables_and_figures(tmp_path):
    kernels = {OURS: 1.0, "sdpa": 2.0, CUDNN: "unsupported", "vectorized_torch": None}
    records = [
        record(1024, kernels),
        record(2048, kernels, queries=512),
        # memory ran out for the inputs
        record(4096, None),
        record(1024, kernels | {"sdpa": "wrong"}, direction="backward"),
    ]
    ours = records[-1]["figures"]["kernels"][OURS]
    ours["became_sdpa"] = True
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
    assert "in 1 of 1 cases" in text
    assert "Wrong: `sdpa`: backward, causal, 1,024 × 1,024" in text
    for name in ("forward", "scaling"):
        path = stem.with_name(f"attention_sweep_{name}.png")
        assert path.read_bytes().startswith(b"\x89PNG")

    rows = list(csv.DictReader(stem.with_name("attention_sweep_results.csv").open()))
    assert len(rows) == 3 * 4 + 1
    assert not any("times_ms" in row for row in rows)
    assert {row["status"] for row in rows} == {"ok", "unsupported", "oom", "wrong"}


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


def test_the_terminal_shows_the_fastest_kernel_of_each_case_beside_pytorchs():
    records = [record(1024, {"sdpa": 2.0, OURS: 0.5}), record(2048, {FLEX: None}), record(64, None)]
    fastest, *failed = [list(line.values()) for line in rows_of(summary(records))]
    assert fastest[0].startswith("forward, causal, 1,024 × 1,024, head_dim 64")
    assert fastest[1:4] == ["2.00", OURS, "0.500"]
    assert float(fastest[4]) == pytest.approx(records[0]["figures"]["flops"] / 0.5e9, rel=0.01)
    assert [line[1:] for line in failed] == [["–"] * 4] * 2
