"""What the language-model matrix says: a section for each model and setting. Of records alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lib.benchmark_lm_matrix_cases import spread, turn_ratios
from lib.config_lm_matrix import SIZES
from lib.files import write_atomically
from lib.model_presets import MODEL_PRESETS
from lib.plots_lm_matrix import (
    Section,
    save_losses_figure,
    save_memory_figure,
    save_throughput_figure,
    save_time_figure,
)
from lib.report import Record, format_value, to_csv, to_markdown

NOTE = """Each rank is a process with a part of the batch; `none` is the baseline, where each rank
trains a model of its own while the others do the same. Wrappers took turns, an epoch at a time. A
turn is a sample, its time the ranks' mean; tokens/s are those of all ranks together. Efficiency is
the time of `none` with the same kernel over the wrapper's, turn by turn, and overhead the peak
memory of a rank beyond that of `none`. Communication is the time in which gradients travel, waiting
for other ranks included, and exposed the part of it in which nothing else runs, both from a trace
of a few further steps: of a GPU's kernels, or of a CPU's operators. Loss difference: the largest
one to a single process that trains on the batches of all ranks, in the first steps. A compiled
model is compiled block by block for the wrappers that overlap, which need gradients during the
backward pass, and as a whole for the others.
"""
STANDING = """
## How flashddp stands

Targets: as fast as `torch_ddp` or faster; 15% faster than `naive` where communication is a real
share of the step; 95% efficiency for `medium` and `large`, compiled; at most 1% more memory than
one GPU. × is how many times as fast `flashddp` is, turn by turn.
"""
COLUMNS = {
    "kernel": "kernel",
    "wrapper": "wrapper",
    "status": "status",
    "tokens_per_s": "tokens/s",
    "median_ms": "ms a step",
    "iqr_ms": "IQR (ms)",
    "samples": "samples",
    "epoch_s": "s an epoch",
    "efficiency_percent": "efficiency (%)",
    "iqr_efficiency_percent": "IQR (%)",
    "peak_memory_mb": "peak memory (MB)",
    "overhead_percent": "overhead (%)",
    "communication_ms": "communication (ms)",
    "exposed_communication_ms": "exposed (ms)",
    "loss_difference": "loss difference",
}
PERCENT = {
    "scaling_efficiency": "efficiency_percent",
    "iqr_scaling_efficiency": "iqr_efficiency_percent",
    "memory_overhead": "overhead_percent",
}
# What rows of one section share, beside the sizes of the model.
SETTINGS = (
    "dtype",
    "tf32",
    "compile",
    "cuda_graph",
    "low_precision_weights",
    "tr_batch_size",
    "ranks",
    "backend",
    "bucket_size_mb",
)
# Against whom `flashddp` is to stand, in the same run.
PEERS = ("torch_ddp", "naive")


def write_report(records: Sequence[Record], output: Path) -> None:
    """Write lm_matrix_results.csv, lm_matrix_report.md and the figures: of each cell, the newest.

    The figures are lm_matrix_time.png, _memory.png, _throughput.png and _losses.png.
    """
    sections = make_sections(matrix_rows(records))
    stem = output / "lm_matrix"
    text = f"# Attention kernels and data-parallel wrappers\n\n{NOTE}"
    lines = standing(sections)
    text += f"{STANDING}\n{to_markdown(lines)}" if lines else ""
    text += "".join(map(section_report, sections))
    write_atomically(f"{stem}_report.md", text)
    lists = ("times_ms", "losses", "reference_losses")
    rows = [row for section in sections for row in section.rows]
    to_csv(
        [{k: v for k, v in row.items() if k not in lists} for row in rows], f"{stem}_results.csv"
    )
    save_time_figure(sections, f"{stem}_time.png")
    save_memory_figure(sections, f"{stem}_memory.png")
    save_throughput_figure(sections, f"{stem}_throughput.png")
    save_losses_figure(sections, f"{stem}_losses.png")


def matrix_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """A flat row for each cell, of the newest record about it."""
    newest: dict[tuple, dict[str, Any]] = {}
    for record in records:
        row = record["config"] | record["figures"]
        row |= {key: record[key] for key in ("device", "cpu", "cores", "seed", "commit", "date")}
        row["torch"] = record["versions"]["torch"]
        memory = row.get("peak_memory_bytes")
        row["peak_memory_mb"] = None if memory is None else memory / 1e6
        for name, shown in PERCENT.items():
            value = row.get(name)
            row[shown] = None if value is None else round(100 * value, 2)
        key = (*section_key(row), row["kernel"], row["wrapper"])
        # a newer one comes where it was measured, not where the old one stood
        newest.pop(key, None)
        newest[key] = row
    return list(newest.values())


def section_key(row: Mapping[str, Any]) -> tuple:
    """What rows must share to stand in one table: machine, model, settings."""
    return tuple(row[name] for name in ("device", "model", *SIZES, *SETTINGS))


def make_sections(rows: Iterable[dict[str, Any]]) -> list[Section]:
    """The rows by section, in the order in which sections and kernels were first measured."""
    found: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(section_key(row), []).append(row)
    sections = []
    for chosen in found.values():
        kernels = list(dict.fromkeys(row["kernel"] for row in chosen))
        chosen.sort(key=lambda row: kernels.index(row["kernel"]))
        sections.append(Section(section_title(chosen[0]), tuple(chosen)))
    return sections


def section_title(row: Mapping[str, Any]) -> str:
    """A section in words."""
    preset = MODEL_PRESETS.get(row["model"])
    # the context is always said
    sizes = [name for name in SIZES if name != "context_length"]
    other = [f"{name} {row[name]}" for name in sizes if row[name] != getattr(preset, name, None)]
    precision = "TF32" if row["tf32"] and row["backend"] == "nccl" else "float32"
    words = [precision if row["dtype"] == "float32" else row["dtype"]]
    words += ["compiled" if row["compile"] else "eager"]
    words += ["CUDA graph"] * row["cuda_graph"] + ["short weights"] * row["low_precision_weights"]
    words += [f"buckets of {row['bucket_size_mb']:g} MiB"] * (row["bucket_size_mb"] != 25)
    batch = f"{row['ranks']} × {row['tr_batch_size']} × {row['context_length']} tokens"
    return f"{', '.join([row['model'], *other])}: {', '.join(words)}; {batch}; {machine(row)}"


def short_titles(sections: Sequence[Section]) -> list[str]:
    """Their titles, without the machine where it is the same for all."""
    if len({section.rows[0]["device"] for section in sections}) > 1:
        return [section.title for section in sections]
    return [s.title.replace(f"; {machine(s.rows[0])}", "") for s in sections]


def machine(row: Mapping[str, Any]) -> str:
    """What the ranks ran on."""
    if row["backend"] == "gloo":
        return f"{row['ranks']} processes on one CPU"
    return f"{row['ranks']} × {row['device']}"


def section_report(section: Section) -> str:
    """A section's table, how `flashddp` stands against its peers, and what failed why."""
    rows = section.rows
    last = max(rows, key=lambda row: row["date"])
    text = f"\n## {section.title}\n\n{last['device']}, torch {last['torch']}, {last['date']}"
    text += f", {format_value(last.get('parameters'))} parameters, {last['backend']}, "
    text += f"{last['steps_per_epoch']} steps an epoch.\n"
    if last["backend"] == "gloo":
        text += (
            f"{last['ranks']} processes share the {last['cores']} cores of one CPU, and memory is "
            "their network: this shows what the wrappers do, and not how they scale.\n"
        )
    if any(row.get("is_together") is False for row in rows):
        text += "The models did not fit into memory together: each was built anew for each turn.\n"
    present = {key for row in rows for key in row if row[key] is not None}
    columns = {key: heading for key, heading in COLUMNS.items() if key in present}
    text += f"\n{to_markdown(rows, columns)}"
    compared = comparisons(rows)
    if compared:
        text += f"\n{to_markdown(compared)}"
    failed = [row for row in rows if row["status"] != "ok"]
    reasons = [f"- {r['kernel']}, {r['wrapper']}: {r['status']}: {r['reason']}\n" for r in failed]
    return text + ("\n" + "".join(reasons) if reasons else "")


def standing(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """How `flashddp` stands on GPUs: a line for each section and kernel."""
    lines = []
    on_gpus = [section for section in sections if section.rows[0]["backend"] == "nccl"]
    for setting, section in zip(short_titles(on_gpus), on_gpus):
        rows = section.rows
        against = {(c["kernel"], c["flashddp against"]): c for c in comparisons(rows)}
        for row in rows:
            if row["wrapper"] != "flashddp" or row["status"] != "ok":
                continue
            torch_ddp, naive = (against.get((row["kernel"], peer), {}) for peer in PEERS)
            lines.append(
                {
                    "setting": setting,
                    "kernel": row["kernel"],
                    "× torch_ddp": torch_ddp.get("times as fast"),
                    "IQR": torch_ddp.get("IQR"),
                    "× naive": naive.get("times as fast"),
                    "efficiency (%)": row["efficiency_percent"],
                    "memory overhead (%)": row["overhead_percent"],
                }
            )
    return lines


def comparisons(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`flashddp` against each peer that took turns with it: above 1, `flashddp` is faster."""
    found = {(row["kernel"], row["wrapper"]): row for row in rows if row["status"] == "ok"}
    lines = []
    for (kernel, wrapper), ours in found.items():
        for peer in PEERS if wrapper == "flashddp" else ():
            theirs = found.get((kernel, peer))
            if theirs is None or theirs["launch"] != ours["launch"]:
                continue
            ratios = turn_ratios(theirs["times_ms"], ours["times_ms"])
            lines.append(
                {
                    "kernel": kernel,
                    "flashddp against": peer,
                    "times as fast": median(ratios),
                    "IQR": spread(ratios),
                }
            )
    return lines


def line(record: Record) -> str:
    """What is printed of a cell once it is measured."""
    case, figures = record["config"], record["figures"]
    text = f"{case['kernel']}, {case['wrapper']}: "
    if figures["status"] != "ok":
        return f"{text}{figures['status']}, {figures['reason']}"
    text += f"{figures['median_ms']:.2f} ms ± {figures['iqr_ms'] / 2:.2f}"
    text += f", {figures['tokens_per_s']:,.0f} tokens/s"
    if figures["scaling_efficiency"] is not None:
        text += f", efficiency {figures['scaling_efficiency']:.1%}"
    if figures["peak_memory_bytes"] is not None:
        text += f", {figures['peak_memory_bytes'] / 1e6:,.1f} MB"
    return text
