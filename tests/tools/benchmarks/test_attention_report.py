"""The report of the attention benchmark: rows, tables and figures, from records."""

import csv

import pytest

from lib.tools.benchmarks.attention import flops
from lib.tools.benchmarks.attention_report import (
    REPORT,
    attention_rows,
    main_rows,
    newest_records,
)
from lib.tools.benchmarks.sweep import Case

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


def rows_of(markdown: str) -> list[dict[str, str]]:
    """The rows of the first table in a text: heading -> cell."""
    _, _, table = f"\n{markdown}".partition("\n|")
    lines = f"|{table}".partition("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [dict(zip(cells[0], row)) for row in cells[2:]]


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


def test_ratios_are_counted_in_long_square_cases_where_both_ran(tmp_path):
    times = {OURS: 1.0, FLEX: 1.5, CUDNN: 0.5, "sdpa_flash": 0.9, "vectorized_torch": None}
    records = [record(4096, times), record(1024, times | {FLEX: 0.9, CUDNN: 2.0})]
    # short, not square, or without ours
    records += [record(512, times), record(2048, times, keys=1024)]
    records.append(record(8192, times | {OURS: None}))
    REPORT.write(records, tmp_path)
    text = (tmp_path / REPORT.name).read_text().partition("as many keys as queries:")[2]
    flex, sdpa = rows_of(text)
    assert [*flex.values()][:6] == ["ours / Flex", "2", "1", "0.900", "1.20", "1.50"]
    assert flex["least in"].startswith("forward, causal, 1,024 × 1,024")
    # the fastest backend of each case counts
    assert [*sdpa.values()][:6] == ["ours / best SDPA", "2", "0", "0.500", "0.700", "0.900"]


def test_a_report_has_what_failed_and_no_column_of_a_kernel_that_is_never_supported(tmp_path):
    kernels = {OURS: 1.0, "sdpa": "wrong", CUDNN: "unsupported", "vectorized_torch": None}
    # memory ran out for the inputs of the second
    records = [record(1024, kernels), record(4096, None)]
    REPORT.write(records, tmp_path)
    text = (tmp_path / "attention_sweep_report.md").read_text()
    assert f"`{CUDNN}` refused 1 cases: no kernel" in text
    assert "Wrong: `sdpa`: forward, causal, 1,024 × 1,024" in text
    tables = text.split("## forward")[1]
    assert CUDNN not in tables
    # of one kernel in the first case and of one in the second, in three tables
    assert tables.count(" oom ") == (1 + 1) * 3
    for name in ("forward", "scaling"):
        path = tmp_path / f"attention_sweep_{name}.png"
        assert path.read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((tmp_path / "attention_sweep_results.csv").open()))
    assert [row["status"] for row in rows] == ["ok", "wrong", "unsupported", "oom", "oom"]


def test_a_report_without_kernels_has_no_figures(tmp_path):
    REPORT.write([record(1024, {CUDNN: "unsupported"})], tmp_path)
    text = (tmp_path / "attention_sweep_report.md").read_text()
    assert "None of these kernels runs here." in text
    assert not list(tmp_path.glob("*.png"))


def test_the_newest_record_of_a_case_counts_whatever_its_kernels_and_samples():
    old, new = record(128, {"sdpa": 1.0}), record(128, {OURS: 3.0}, kernels=[OURS], samples=9)
    other = record(128, {"sdpa": 4.0}, heads=3)
    assert newest_records([old, other, new]) == [new, other]


def test_figures_show_the_sweep_and_not_the_cases_of_targets():
    sweep = [record(n, {"sdpa": 1.0}, batch_size=512 // n) for n in (128, 256)]
    other = record(256, {"sdpa": 1.0}, batch_size=1, heads=1)
    assert main_rows(attention_rows([other, *sweep])) == attention_rows(sweep)
