"""What the attention benchmark says: tables by length, the targets, CSV. Made of records alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.files import write_atomically
from lib.plots_attention import (
    OURS,
    attention_rows,
    of_those_that_run,
    save_forward_figure,
    save_heatmap_figure,
    save_scaling_figure,
)
from lib.report import Record, format_value, to_csv, to_markdown

NOTE = """TFLOP/s count 4 · batch · heads · queries · keys · head_dim forward and 2.5 times that
backward; half of it with a causal mask on as many queries as keys, and with one on unequal numbers
only the pairs that the mask lets through. Memory is what a call allocates beyond its inputs, for
`backward` both passes together. Kernels took turns on the same inputs; those that hold the scores
did so forward only, and those that launch thousands of small kernels not at all
(`scaled_dot_prod_attention`, on a GPU also `flash_attention_torch`). `oom`: memory ran out.
`unsupported`: PyTorch refuses it. `wrong`: rows of the output are not those of the formula, a mask
with another alignment for one. Ratios above 1: our kernel is faster.
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """A speed that our kernel should reach in each case it is about."""

    words: str
    """Against what, and where."""

    ratio: float
    """The least time of the peer over ours."""

    is_about: Callable[[Mapping[str, Any]], bool]
    """config of a record -> whether it counts."""

    peers: Callable[[str], bool]
    """name of a kernel -> whether it is a peer; the fastest counts."""


def is_short_square(config: Mapping[str, Any], least: int) -> bool:
    """Whether a case of a 16-bit type has as many queries as keys, at least so many."""
    return config["queries"] == config["keys"] >= least and config["dtype"] != "float32"


def is_one_of_twelve_heads(config: Mapping[str, Any], length: int) -> bool:
    """Whether a case is one sequence of 12 heads, 64 wide."""
    shape = [config[key] for key in ("batch_size", "heads", "head_dim", "queries", "keys")]
    return shape == [1, 12, 64, length, length] and config["dtype"] != "float32"


TARGETS = (
    Target(
        "FlexAttention, N ≥ 1,024",
        1.0,
        lambda config: is_short_square(config, 1024),
        lambda kernel: kernel == "flex_attention",
    ),
    Target(
        "the best SDPA backend, N ≥ 4,096",
        0.9,
        lambda config: is_short_square(config, 4096),
        lambda kernel: kernel in ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient"),
    ),
    Target(
        "vectorized_torch, 12 heads, N = 8,192, forward",
        10.0,
        lambda config: is_one_of_twelve_heads(config, 8192) and config["direction"] == "forward",
        lambda kernel: kernel == "vectorized_torch",
    ),
    Target(
        "vectorized_torch in float32, N ≥ 1,024",
        1.0,
        lambda config: config["dtype"] == "float32" and config["queries"] == config["keys"] >= 1024,
        lambda kernel: kernel == "vectorized_torch",
    ),
)
# Memory of a sequence over that of one a quarter as long, at most.
LINEAR = 4.2


def write_report(records: Sequence[Record], output: Path) -> None:
    """Write attention_sweep_results.csv, _report.md and the figures: of each case, the newest."""
    records = newest_records(records)
    rows = attention_rows(records)
    last = max(records, key=lambda record: record["date"])
    text = f"# Attention\n\n{last['device']}, torch {last['versions']['torch']}, {last['date']}.\n"
    text += f"{NOTE}\n{targets_report(rows)}"
    for direction in dict.fromkeys(row["direction"] for row in rows):
        text += sweep_report(direction, [row for row in rows if row["direction"] == direction])
    text += remarks(rows)
    stem = output / "attention_sweep"
    write_atomically(f"{stem}_report.md", text)
    plain = [{k: v for k, v in row.items() if k not in ("times_ms", "kernels")} for row in rows]
    to_csv(plain, f"{stem}_results.csv")
    rows = of_those_that_run(rows)
    if any(row["direction"] == "forward" for row in rows):
        save_forward_figure(rows, f"{stem}_forward.png")
    if rows:
        save_heatmap_figure(rows, f"{stem}_heatmap.png")
        save_scaling_figure(rows, f"{stem}_scaling.png")


def newest_records(records: Iterable[Record]) -> list[Record]:
    """Of each case the last record, whatever the kernels and the number of samples."""
    settings = ("kernels", "warmup", "samples", "max_seconds")
    newest = {}
    for record in records:
        newest[tuple(v for k, v in record["config"].items() if k not in settings)] = record
    return list(newest.values())


def sweep_report(direction: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Tables of one direction: TFLOP/s and ratios, milliseconds, memory; a row for each case."""
    text = f"\n## {direction.capitalize()}\n"
    rows = of_those_that_run(rows)
    if not rows:
        return f"{text}\nNone of these kernels runs here.\n"
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    cases = by_case(rows)
    tables = {"TFLOP/s": "tflops", "Time (ms)": "median_ms", "Peak memory (GB)": "peak_memory_gb"}
    for title, figure in tables.items():
        table = []
        for by_kernel in cases:
            first = next(iter(by_kernel.values()))
            line = {name: first[name] for name in ("head_dim", "mask", "dtype")}
            line |= {"queries × keys": f"{first['queries']:,} × {first['keys']:,}"}
            line |= {"batch × heads": f"{first['batch_size']} × {first['heads']}"}
            for kernel in kernels:
                row = by_kernel.get(kernel, {})
                is_ok = row.get("status") == "ok"
                line[kernel] = row.get(figure) if is_ok else row.get("status")
            if figure == "tflops":
                line |= {
                    "ours / Flex": ratio_to(by_kernel, lambda k: k == "flex_attention"),
                    "ours / best SDPA": ratio_to(by_kernel, lambda k: k.startswith("sdpa")),
                }
            table.append(line)
        empty = {key for key in table[0] if all(line[key] is None for line in table)}
        table = [{k: v for k, v in line.items() if k not in empty} for line in table]
        text += f"\n### {title}\n\n{to_markdown(table)}"
    return text


def targets_report(rows: Sequence[Mapping[str, Any]]) -> str:
    """The targets: how many cases meet each and the closest one, then every case; or nothing."""
    summary, details = [], []
    for target in TARGETS:
        compared = [found for case in by_case(rows) if (found := comparison(target, case))]
        if not compared:
            continue
        details += compared
        ratios = [row for row in compared if row["ratio"] is not None]
        worst = min(ratios, key=lambda row: row["ratio"], default={"ratio": None, "case": None})
        met = sum(row["met"] for row in compared)
        summary.append(
            {
                "against": target.words,
                "at least": target.ratio,
                "met": f"{met} of {len(compared)}",
                "least ratio": worst["ratio"],
                "in": worst["case"],
            }
        )
    details += long_rows(rows)
    if not details:
        return ""
    text = f"## Targets\n\n{to_markdown(summary)}\n" if summary else "## Targets\n\n"
    longest = [row for row in details if row["target"] == LONG]
    met = sum(row["met"] for row in longest)
    if longest:
        text += f"{LONG}: met in {met} of {len(longest)} passes.\n\n"
    return text + to_markdown(details)


LONG = "N = 1,048,576 on one card, memory linear in N"


def comparison(target: Target, case: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The line of a case in the table of targets; None where it is not about it."""
    ours = case.get("flash_attention_triton")
    peers = {kernel: row for kernel, row in case.items() if target.peers(kernel)}
    timed = {k: row for k, row in peers.items() if row["status"] == "ok"}
    is_oom = any(row["status"] == "oom" for row in peers.values())
    if ours is None or not target.is_about(ours) or not (timed or is_oom):
        return None
    best = min(timed, key=lambda kernel: timed[kernel]["median_ms"], default=None)
    is_timed = ours["status"] == "ok" and best is not None
    ratio = timed[best]["median_ms"] / ours["median_ms"] if is_timed else None
    return {
        "target": f"{target.ratio:g} × {target.words}",
        "case": ours["case"],
        "ours (ms)": ours.get("median_ms"),
        "peer": best or "oom",
        "peer (ms)": timed[best]["median_ms"] if best else None,
        "ratio": ratio,
        "peak memory (GB)": ours.get("peak_memory_gb"),
        # a peer that has no room is beaten
        "met": ours["status"] == "ok" and (ratio is None or ratio >= target.ratio),
    }


def long_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line for each pass over the longest sequence; its ratio is that of memory to a quarter."""
    found = {}
    for row in rows:
        for length in (2**18, 2**20):
            is_ours = row["kernel"] == "flash_attention_triton"
            if is_ours and is_one_of_twelve_heads(row, length):
                found[row["direction"], length] = row
    lines = []
    for (direction, length), row in found.items():
        if length != 2**20:
            continue
        memory = [found.get((direction, n), {}).get("peak_memory_bytes") for n in (2**20, 2**18)]
        ratio = memory[0] / memory[1] if all(memory) else None
        lines.append(
            {
                "target": LONG,
                "case": row["case"],
                "ours (ms)": row.get("median_ms"),
                "peer": "memory at N = 262,144",
                "peer (ms)": None,
                "ratio": ratio,
                "peak memory (GB)": row.get("peak_memory_gb"),
                "met": row["status"] == "ok" and ratio is not None and ratio <= LINEAR,
            }
        )
    return lines


def remarks(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the compiler replaced, and what was refused with which words."""
    compiled = [row for row in rows if row.get("became_sdpa") is not None]
    lines = []
    if compiled:
        replaced = [row["case"] for row in compiled if row["became_sdpa"]]
        lines.append(
            f"`vectorized_torch_compiled` became PyTorch's own attention in {len(replaced)} of "
            f"{len(compiled)} cases, and is textbook attention, fused, in the others."
            + (f" Replaced: {'; '.join(replaced)}." if replaced else "")
        )
    refused: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["status"] == "unsupported":
            key = (row["kernel"], row["reason"])
            refused[key] = refused.get(key, 0) + 1
    lines += [f"`{k}` refused {count} cases: {why}" for (k, why), count in refused.items()]
    wrong = [f"`{row['kernel']}`: {row['case']}" for row in rows if row["status"] == "wrong"]
    lines += [f"Wrong: {'; '.join(wrong)}."] if wrong else []
    return "\n## Remarks\n\n" + "".join(f"- {line}\n" for line in lines) if lines else ""


def line(record: Record) -> str:
    """What is printed of a case once it is measured."""
    rows = {row["kernel"]: row for row in attention_rows([record])}
    if not rows:
        return f"{record['config']['direction']}: {record['figures']['status']}"
    words = []
    for kernel, row in rows.items():
        is_ok = row["status"] == "ok"
        words.append(f"{kernel} {format_value(row['median_ms'])}" if is_ok else "")
    failed = [f"{kernel} {row['status']}" for kernel, row in rows.items() if row["status"] != "ok"]
    times = ", ".join(filter(None, words))
    failed = f"; {', '.join(failed)}" if failed else ""
    return f"{next(iter(rows.values()))['case']}: {times} ms{failed}"


def by_case(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Mapping[str, Any]]]:
    """Rows grouped: kernel -> row, for each case."""
    cases: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["kernel"]] = row
    return list(cases.values())


def ratio_to(case: Mapping[str, Mapping[str, Any]], is_peer: Callable[[str], bool]) -> float | None:
    """Time of the fastest peer over that of ours; None where one of them has none."""
    times = {k: row["median_ms"] for k, row in case.items() if row["status"] == "ok"}
    ours = next((times[kernel] for kernel in OURS if kernel in times), None)
    peers = [time for kernel, time in times.items() if is_peer(kernel)]
    return min(peers) / ours if ours and peers else None
