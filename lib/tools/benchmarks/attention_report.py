"""The report of the attention benchmark: tables by length, CSV and figures, from records.

The rows that all functions here take are those of `attention_rows`, one for each kernel of a case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from lib.core.records import Record, format_value, provenance_of
from lib.tools.benchmarks.sections import (
    SAMPLING,
    Chart,
    Report,
    newest,
    section,
    table,
    to_rows,
)

Row = Mapping[str, Any]
# The kernel to compare the others with: the first of these that was measured.
OURS = ("flash_attention_triton", "flash_attention_cuda", "flash_attention_torch")
# Tokens from which kernels, not launches, decide.
LONG = 1024
NOTE = """TFLOP/s count 4 · batch · heads · queries · keys · head_dim forward and 2.5 times that
backward; half of it with a causal mask and as many queries as keys, and only the visible pairs with
a causal mask and unequal numbers. Memory is what a call allocates beyond its inputs; for
`backward`, what both passes allocate. Kernels were interleaved on the same inputs, except for those
measured alone: kernels that keep the scores, in the backward pass, and kernels that launch
thousands of small ones (`scaled_dot_prod_attention`, on a GPU also `flash_attention_torch`). `oom`:
out of memory. `unsupported`: PyTorch refuses it. `wrong`: rows of the output differ from the
formula's, for example because the mask is aligned differently. Ratios above 1: our kernel is
faster."""


def newest_records(records: Iterable[Record]) -> list[Record]:
    """The last record of each case, whatever its kernels and number of samples."""
    return newest(records, ignore=("kernels", *SAMPLING))


def attention_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """A row for each kernel of each record: its case, its figures, and where they come from."""
    rows = []
    for record in records:
        config, figures = record["config"], record["figures"]
        # memory may run out before any kernel is measured
        failed = {kernel: {"status": figures["status"]} for kernel in config["kernels"]}
        kernels = figures["kernels"] if figures["status"] == "ok" else failed
        case = {key: value for key, value in config.items() if key != "kernels"}
        mask = "causal" if config["is_causal"] else "full"
        # records made before there was the setting lack it
        case |= {
            "mask": mask,
            "in_graph": config.get("in_graph", False),
            "case": case_name(config),
            "flops": figures.get("flops"),
        }
        for kernel, measured in kernels.items():
            # a graph's replay, which allocates nothing, was once measured as 0
            memory = measured.get("peak_memory_bytes") or None
            row = {**case, "kernel": kernel, "median_ms": None, **measured}
            row |= {"peak_memory_bytes": memory, "peak_memory_gb": memory and memory / 1e9}
            rows.append(row | provenance_of(record))
    return rows


def case_name(config: Mapping[str, Any]) -> str:
    """Describe a case in words."""
    return (
        f"{config['direction']}, {'causal' if config['is_causal'] else 'full'}, "
        f"{config['queries']:,} × {config['keys']:,}, head_dim {config['head_dim']}, "
        f"{config['dtype']}, {config['batch_size']} × {config['heads']} heads"
        f"{', in a CUDA graph' if config.get('in_graph') else ''}"
    )


def main_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of the sweep: of the most common dtype, tokens × heads × head_dim, and launch."""

    def size(row: Row) -> tuple:
        longest = max(row["queries"], row["keys"])
        size = row["batch_size"] * row["heads"] * row["head_dim"] * longest
        return row["dtype"], size, row.get("in_graph", False)

    (most, _), *_ = Counter(map(size, rows)).most_common(1)
    return [row for row in rows if size(row) == most]


def supported(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of kernels that are supported in at least one case."""
    kernels = rows.loc[rows["status"] != "unsupported", "kernel"]
    return rows[rows["kernel"].isin(kernels)]


def pivot(rows: pd.DataFrame, figure: str) -> pd.DataFrame:
    """A figure with a row for each case and a column for each kernel, in the order of `rows`."""
    kernels = list(dict.fromkeys(rows["kernel"]))
    cases = list(dict.fromkeys(rows["case"]))
    wide = rows.drop_duplicates(["case", "kernel"], keep="last")
    return wide.pivot(index="case", columns="kernel", values=figure).loc[cases, kernels]


def direction_tables(rows: pd.DataFrame) -> list[str]:
    """Tables of one direction, a row for each case: TFLOP/s and ratios, milliseconds, memory."""
    rows = supported(rows).copy()
    if not len(rows):
        return ["None of these kernels runs here."]
    is_ok = rows["status"] == "ok"
    rows["queries × keys"] = [f"{q:,} × {k:,}" for q, k in zip(rows["queries"], rows["keys"])]
    rows["batch × heads"] = [f"{b} × {h}" for b, h in zip(rows["batch_size"], rows["heads"])]
    rows["launched by"] = rows["in_graph"].map({True: "a CUDA graph", False: "Python"})
    shape = ["head_dim", "mask", "dtype", "queries × keys", "batch × heads"]
    shape += ["launched by"] * bool(rows["in_graph"].any())
    cases = rows.drop_duplicates("case", keep="last").set_index("case")

    # times of the fastest peers over ours
    times = pivot(rows.assign(ms=rows["median_ms"].where(is_ok)), "ms").astype(float)
    ours = times[[kernel for kernel in OURS if kernel in times]].bfill(axis=1)
    peers = {"Flex": "^flex_", "best SDPA": "^sdpa", "FA4": "^fa4", "naive": "^vectorized_torch$"}
    ratios = {
        f"ours / {name}": times.filter(regex=regex).min(axis=1) / ours.iloc[:, 0]
        for name, regex in peers.items()
        if ours.shape[1] and times.filter(regex=regex).shape[1]
    }
    parts = []
    figures = {"TFLOP/s": "tflops", "Time (ms)": "median_ms", "Peak memory (GB)": "peak_memory_gb"}
    for title, figure in figures.items():
        shown = rows[figure].where(is_ok, rows["status"])
        lines = cases[shape].join(pivot(rows.assign(shown=shown), "shown"))
        lines = lines.assign(**ratios) if figure == "tflops" else lines
        parts += [f"### {title}", ahead(cases, ratios) if figure == "tflops" else ""]
        parts.append(table(lines.assign(recorded=cases["recorded"])))
    return parts


def remarks(rows: Sequence[Row]) -> list[str]:
    """List which cases were refused and why, and wrong results."""
    refused = Counter(
        (row["kernel"], row["reason"]) for row in rows if row["status"] == "unsupported"
    )
    lines = [f"`{k}` refused {count} cases: {why}" for (k, why), count in refused.items()]
    wrong = [f"`{row['kernel']}`: {row['case']}" for row in rows if row["status"] == "wrong"]
    return lines + ([f"Wrong: {'; '.join(wrong)}."] if wrong else [])


def ahead(cases: pd.DataFrame, ratios: Mapping[str, pd.Series]) -> str:
    """How often our kernel is faster than each peer, and by which ratios, in long square cases."""
    is_long = (cases["queries"] == cases["keys"]) & (cases["queries"] >= LONG)
    lines = []
    for name, of_all in ratios.items():
        found = of_all[is_long].dropna()
        if len(found):
            line = {"ratio": name, "cases": len(found), "above 1": int((found > 1).sum())}
            line |= {"least": found.min(), "median": found.median(), "most": found.max()}
            lines.append(line | {"least in": found.idxmin()})
    words = f"From {LONG:,} tokens on, with as many keys as queries:"
    return f"{words}\n\n{table(lines)}" if lines else ""


def attention_frame(records: Sequence[Record]) -> pd.DataFrame:
    """The newest rows, with None for missing figures."""
    frame = pd.DataFrame(attention_rows(newest_records(records)), dtype=object)
    figures = ("median_ms", "tflops", "peak_memory_gb", "reason")
    frame = frame.reindex(columns=list(dict.fromkeys([*frame.columns, *figures])))
    return frame.where(frame.notna(), None)


def overview(frame: pd.DataFrame) -> list[str]:
    """Which cases were refused and why, and wrong results."""
    lines = [f"- {line}" for line in remarks(to_rows(frame))]
    return [section("Remarks", "\n".join(lines))] * bool(lines)


class AttentionReport(Report):
    """The report whose records hold several kernels."""

    def was_measured(self, record: Record) -> bool:
        """Whether one of the kernels was measured."""
        return any(row["status"] == "ok" for row in attention_rows([record]))

    def line(self, record: Record) -> str:
        """The time of each kernel, or its status."""
        rows = attention_rows([record])
        words = [format_value(r["median_ms"]) if r["status"] == "ok" else r["status"] for r in rows]
        return ", ".join(f"{row['kernel']} {word}" for row, word in zip(rows, words)) + " (ms)"


def sweep(frame: pd.DataFrame) -> pd.DataFrame:
    """The supported square cases of the sweep, for charts."""
    rows = pd.DataFrame(main_rows(to_rows(frame)), columns=frame.columns)
    return supported(rows).query("queries == keys")


def forward(frame: pd.DataFrame) -> pd.DataFrame:
    """Those of the forward pass."""
    return sweep(frame).query("direction == 'forward'")


PANELS = ("direction", "head_dim", "mask")
NAMES: dict[str, Any] = {"x": "queries", "series": "kernel", "panels": PANELS}
TIME = ("queries and keys, with tokens × heads the same", "time (ms)")
SPEED = (TIME[0], "speed (TFLOP/s)")
REPORT = AttentionReport(
    "attention_sweep",
    "Attention",
    {},
    note=NOTE,
    by=("direction",),
    rows=attention_frame,
    overview=overview,
    further=direction_tables,
    charts=[
        Chart(
            "attention_sweep_scaling.png",
            "lines",
            y="median_ms",
            labels=TIME,
            log=True,
            only=sweep,
            **NAMES,
        ),
        Chart(
            "attention_sweep_forward.png", "lines", y="tflops", labels=SPEED, only=forward, **NAMES
        ),
    ],
    text="_report.md",
    table="_results.csv",
)
