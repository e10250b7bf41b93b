"""Tables and figure of the communication benchmark, from its records alone."""

from __future__ import annotations

from pathlib import Path

from lib.communication_costs import Link, predicted_ms
from lib.files import write_atomically
from lib.plots_distributed import (
    NAMES,
    fitted_links,
    group_name,
    group_of,
    save_communication_figure,
    size_name,
)
from lib.report import Record, to_csv, to_markdown

COLUMNS = {
    "name": "collective",
    "size": "size",
    "figures.status": "status",
    "figures.median_ms": "median (ms)",
    "figures.iqr_ms": "IQR (ms)",
    "figures.samples": "samples",
    "figures.algorithm_bandwidth_gbs": "algorithm bandwidth (GB/s)",
    "figures.bus_bandwidth_gbs": "bus bandwidth (GB/s)",
    "predicted_ms": "by formula (ms)",
    "formula_over_measured": "formula / measured",
}
NOTES = """\
Of each sample the slowest rank counts; a sample is the mean of calls that follow one another, with
what the host needs to start them. Size: all-reduce and broadcast, the tensor on each rank;
reduce-scatter, the input; all-gather, the output. Algorithm bandwidth is size over time; bus
bandwidth is that times 2(n-1)/n for all-reduce, (n-1)/n for reduce-scatter and all-gather and 1 for
broadcast, with n ranks (nccl-tests). The result of each row was checked on all ranks. The formula
is a ring's: (n-1) messages one after another, for all-reduce twice as many, each of which takes a
latency and its bytes over the bandwidth. Both are fitted to the rows (least squares of the
logarithm of formula / measured).
"""
GLOO_NOTE = """
gloo's reduce-scatter is an all-reduce of which each rank keeps a part, so its bus bandwidth comes
out at half or less. Processes of one host exchange data through its memory and share its cores:
that says nothing of a network.
"""


def write_report(records: list[Record], output: Path) -> None:
    """Write communication_benchmark.csv, .md and .png of `records`, the newest of each row.

    There is no figure where nothing was measured.
    """
    settings = ("warmup", "samples", "max_seconds")
    newest: dict[tuple, Record] = {}
    for record in records:
        newest[tuple(v for k, v in record["config"].items() if k not in settings)] = record
    order = list(NAMES)
    records = sorted(
        newest.values(),
        key=lambda r: (
            group_of(r),
            order.index(r["config"]["collective"]),
            r["config"]["num_bytes"],
        ),
    )
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault(group_of(record), []).append(record)
    last = max(records, key=lambda record: record["date"])
    is_gloo = any(record["config"]["backend"] == "gloo" for record in records)
    parts = [
        f"# Communication\n\n{last['device']}, torch {last['versions']['torch']}, {last['date']}.\n"
        f"{NOTES}{GLOO_NOTE if is_gloo else ''}"
    ]
    rows = []
    for chosen in groups.values():
        links = fitted_links(chosen)
        fitted = [with_formula(record, links) for record in chosen]
        rows += fitted
        parts.append(f"## {group_name(chosen[0])}\n\n{_link_table(links, fitted)}")
        present = {
            key for row in fitted for key in (*row, *(f"figures.{k}" for k in row["figures"]))
        }
        columns = {key: heading for key, heading in COLUMNS.items() if key in present}
        parts.append(to_markdown(fitted, columns))
    stem = output / "communication_benchmark"
    write_atomically(f"{stem}.md", "\n".join(parts))
    plain = [
        {**r, "figures": {k: v for k, v in r["figures"].items() if k != "times_ms"}} for r in rows
    ]
    to_csv(plain, f"{stem}.csv")
    if any(record["figures"]["status"] == "ok" for record in records):
        save_communication_figure(records, f"{stem}.png")


def with_formula(record: Record, links: dict[str, Link | None]) -> Record:
    """`record` with its names in a table, and what the formula says with its collective's link."""
    config = record["config"]
    collective, num_bytes = config["collective"], config["num_bytes"]
    row = record | {"name": NAMES[collective], "size": size_name(num_bytes)}
    link = links.get(collective)
    if link is None or record["figures"]["status"] != "ok":
        return row
    cost = (collective, num_bytes, config["ranks"], link.latency_us, link.bandwidth_gbs)
    predicted = predicted_ms(*cost)
    measured = record["figures"]["median_ms"]
    return row | {"predicted_ms": predicted, "formula_over_measured": predicted / measured}


def _link_table(links: dict[str, Link | None], rows: list[Record]) -> str:
    """Latency and bandwidth of each fit, and how far it is off."""
    table = []
    for name, link in links.items():
        if link is not None:
            ratios = [
                row["formula_over_measured"]
                for row in rows
                if row["config"]["collective"] == name and "formula_over_measured" in row
            ]
            table.append(
                {
                    "fitted": NAMES[name],
                    "latency a message (µs)": link.latency_us,
                    "bandwidth (GB/s)": link.bandwidth_gbs,
                    "formula / measured, least": min(ratios),
                    "most": max(ratios),
                }
            )
    return to_markdown(table) if table else "One size alone gives no fit.\n"
