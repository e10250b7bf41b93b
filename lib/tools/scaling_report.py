"""The report of `scaling.py`: what was measured beside what had been predicted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from lib.core.records import Record, to_frame
from lib.tools.benchmarks.communication import size_name
from lib.tools.benchmarks.rank_training import LENGTH
from lib.tools.benchmarks.sections import SAMPLING, Report, newest, section, table, to_rows

# The method of PyTorch that was measured in turns with one of ours.
PEERS = {"flashddp": "torch_ddp", "fsdp": "fsdp2"}
# The host launches a block of theirs more slowly than a GPU computes it.
HOST_BOUND = ("fsdp", "fsdp2")
# Peaks may be this far from the formula.
TOLERANCE = 0.03
NOTE = """Predictions were recorded before anything was measured here, from records of two and four
H200s: `predicted / measured` is their error. A step takes what `lib.tools.predict` says for
`flashddp`; a sharded method sends as many bytes and leaves a rank its share of the update. Peaks
are those of a rank in a training's third step, beside `lib.profiling.memory_formula.rank_memory`.
`speed` is that of a rank over that of one that trains alone at the same time (`none`). A row of
equality trains the `tiny` model in float32 for an epoch: the largest differences of losses and of
gradient norms (relative) from one process on all ranks' sequences; `none`, where a rank sees its
own sequences alone, shows how large they are where training differs.

`refitted` was fitted afterwards, for `fsdp` and `fsdp2`. A block of theirs takes about as long in
each model, whatever its size: that is the time of the host, which the predictions do not know. So a
step takes at least its blocks times as long, by the median over the other models: no row is fitted
to itself.
"""
COLUMNS = {
    "name": "case",
    "status": "status",
    "median_ms": "measured (ms)",
    "predicted_ms": "predicted (ms)",
    "error": "predicted / measured",
    "refitted_ms": "refitted (ms)",
    "refitted_error": "refitted / measured",
    "tokens_per_s": "tokens/s",
    "predicted_tokens_per_s": "predicted tokens/s",
    "time_ratio": "time / PyTorch's",
    "speed": "speed",
    "peak_gb": "peak (GB)",
    "formula_gb": "formula (GB)",
    "peak_ratio": "peak / formula",
    "loss_off": "losses off by",
    "norm_off": "norms off by",
}


def name_of(row: Mapping[str, Any]) -> str:
    """A row's case in words."""
    if row["what"] == "collective":
        return f"{row['collective']}, {size_name(row['num_bytes'])}"
    if row["what"] == "ring":
        return f"{row['tokens']:,} tokens a rank"
    if row["what"] == "pipeline":
        return f"1F1B of {row['model']}, {row['micro_batches']} micro-batches"
    return f"{training_of(row)}, {row['method']}"


def training_of(row: Mapping[str, Any]) -> str:
    """The model of a training, and the sequences of a rank."""
    return f"{row['model']}, {row['tr_batch_size']} × {row['context_length']:,}"


def scaling_frame(records: Sequence[Record]) -> pd.DataFrame:
    """A row for each newest measurement beside its prediction, then predictions without one."""
    done: dict[tuple, dict[str, Any]] = {}
    predicted: dict[tuple, dict[str, Any]] = {}
    for row in to_rows(to_frame(newest(records, (*LENGTH, *SAMPLING)))):
        is_measured = row["status"] != "predicted"
        row["device"], row["name"] = row["device"] if is_measured else row["of"], name_of(row)
        row["setting"] = f"{row['what']}; {row['ranks']} × {row['device']}"
        (done if is_measured else predicted)[row["setting"], row["name"]] = row
    for key, row in predicted.items():
        bytes_of_peak = row.get("peak_memory_bytes")
        found = {"predicted_ms": row["median_ms"], "formula_gb": bytes_of_peak}
        found |= {"predicted_tokens_per_s": row.get("tokens_per_s")}
        if bytes_of_peak:
            found["formula_gb"] = bytes_of_peak / 1e9
        # what was not measured has a row without figures
        nothing = {"median_ms": None, "tokens_per_s": None, "torch": "not used (predictions)"}
        done.setdefault(key, row | nothing).update(found)
    for row in done.values():
        row |= _comparisons(row, done) | _refitted(row, done)
    frame = pd.DataFrame(list(done.values()), dtype=object)
    return frame.sort_values(["what", "ranks"], kind="stable")


def _comparisons(row: Mapping[str, Any], rows: Mapping[tuple, Mapping]) -> dict[str, Any]:
    """Ratios of a measured row to its prediction, the formula and other rows of its setting."""
    milliseconds, found = row.get("median_ms"), {}
    if milliseconds and row.get("predicted_ms"):
        found["error"] = row["predicted_ms"] / milliseconds
    if not milliseconds or row["what"] != "step":
        return found
    peak, formula = row["measured"]["peak"] / 1e9, row["predicted"]["peak"] / 1e9
    found |= {"peak_gb": peak, "formula_gb": formula, "peak_ratio": peak / formula}

    def time_of(method: str | None) -> float | None:
        return rows.get((row["setting"], f"{training_of(row)}, {method}"), {}).get("median_ms")

    if alone := time_of("none"):
        found["speed"] = alone / milliseconds
    if peer := time_of(PEERS.get(row["method"])):
        found["time_ratio"] = milliseconds / peer
    return found


def _refitted(row: Mapping[str, Any], rows: Mapping[tuple, Mapping]) -> dict[str, Any]:
    """A step bound by the host, from milliseconds a block that other models took."""
    if row["what"] != "step" or row["method"] not in HOST_BOUND or not row.get("predicted_ms"):
        return {}
    blocks = [
        other["median_ms"] / other["num_layers"]
        for other in rows.values()
        if (other["what"], other["device"]) == ("step", row["device"])
        and other["method"] == row["method"]
        and other["median_ms"]
        and training_of(other) != training_of(row)
    ]
    if not blocks:
        return {}
    found = {"refitted_ms": max(row["predicted_ms"], statistics.median(blocks) * row["num_layers"])}
    if row["median_ms"]:
        found["refitted_error"] = found["refitted_ms"] / row["median_ms"]
    return found


def overview(frame: pd.DataFrame) -> list[str]:
    """Errors of the predictions by part, tokens/s from one GPU to all, memory and equality."""
    rows = [row for row in to_rows(frame) if row["status"] == "ok"]
    errors: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("error"):
            errors.setdefault(row["setting"], []).append(row)
        if row.get("refitted_error"):
            refitted = row | {"error": row["refitted_error"]}
            errors.setdefault(f"refitted {row['method']}; {row['setting']}", []).append(refitted)
    sections = {"Errors of the predictions": table([_errors(*each) for each in errors.items()])}
    speeds: dict[tuple, dict[str, Any]] = {}
    steps = [row for row in rows if row["what"] == "step"]
    for row in steps:
        line = speeds.setdefault((row["device"], row["name"]), {"step": row["name"]})
        if row["method"] == "none":
            line["1 alone"] = row["tokens_per_s"] / row["ranks"]
        else:
            line[f"{row['ranks']} GPUs"] = row["tokens_per_s"]
    sections["Tokens/s"] = table(list(speeds.values()))
    if steps:
        off = {row["name"]: row["peak_ratio"] - 1 for row in steps}
        worst = max(off, key=lambda name: abs(off[name]))
        within = sum(abs(row["peak_ratio"] - 1) <= TOLERANCE for row in steps)
        sections["Memory"] = (
            f"{within} of {len(steps)} peaks are within {TOLERANCE:.0%} of the formula; "
            f"the farthest is {off[worst]:+.1%} ({worst})."
        )
    equal = [row for row in rows if row["what"] == "equality" and row["method"] != "none"]
    if equal:
        most = [max(row[name] for row in equal) for name in ("loss_off", "norm_off")]
        sections["Equality"] = (
            f"Of {len(equal)} trainings, none is farther from one process than {most[0]:.1e} in a "
            f"loss and {most[1]:.1e} of a gradient norm."
        )
    return [section(title, text) for title, text in sections.items() if text]


def _errors(setting: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How far the predictions of a setting are off, as factors."""
    off = [abs(math.log(row["error"])) for row in rows]
    worst = rows[off.index(max(off))]
    median = f"{math.expm1(statistics.median(off)):.0%}"
    largest = {"largest": f"{worst['error'] - 1:+.0%}", "of": worst["name"]}
    return {"setting": setting, "rows": len(rows), "median error": median, **largest}


REPORT = Report(
    "scaling",
    "From one GPU of a host to all",
    COLUMNS,
    note=NOTE,
    by=("setting",),
    rows=scaling_frame,
    overview=overview,
)
