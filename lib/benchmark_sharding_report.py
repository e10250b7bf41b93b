"""What the sharding benchmark says: a section for each model and setting. Of records alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lib.benchmark_lm_matrix_cases import spread, turn_ratios
from lib.benchmark_lm_matrix_report import section_key, section_title, short_titles
from lib.benchmark_sharding_accounting import accounting, accounting_report, accounting_title
from lib.benchmark_sharding_cases import BASE
from lib.config_sharding import SHARDING_METHODS
from lib.files import write_atomically
from lib.plots_lm_matrix import Section
from lib.plots_sharding import save_sharding_memory_figure, save_sharding_time_figure
from lib.report import Record, to_csv, to_markdown

NOTE = """Each rank is a process with a part of the batch; in `none` each trains a model of its own
while the others do the same. `flashddp` keeps the whole optimizer on every rank, `zero1` a slice of
it, and averages gradients itself; what stands behind a + shards the optimizer behind a wrapper that
averages. `fsdp2` is PyTorch's `fully_shard`, which shards weights and gradients too. Methods took
turns, an epoch at a time; a turn is a sample, its time the ranks' mean, and the ratio to `flashddp`
the median over the turns.

Bytes are those of the rank that has most, in a training's third step and of itself alone. Weights,
gradients and state are counted from the tensors that are there when the optimizer steps; the rest
is what is allocated. Predictions are formulas (`lib.memory_accounting`) for eager mode, of which
`torch.compile` keeps fewer activations. Buckets have 25 MiB where a title says nothing else.
"""
TARGETS = """Targets for `zero1`: state · ranks within 1% of 1, at most 1.03 of the time of
`flashddp` and less than that of `torch_ddp+torch_zero`, and memory saved within 5% of what the
formulas say.
"""
TIME_COLUMNS = {
    "method": "method",
    "status": "status",
    "median_ms": "ms a step",
    "iqr_ms": "IQR (ms)",
    "samples": "samples",
    "tokens_per_s": "tokens/s",
    "step_ratio": "time / flashddp",
    "iqr_step_ratio": "IQR",
    "communication_ms": "communication (ms)",
    "exposed_communication_ms": "exposed (ms)",
    "loss_difference": "loss difference",
}
MEMORY_COLUMNS = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer_state": "state",
    "activations": "activations",
    "initialised": "initialised",
    "before_step": "before the update",
    "after_step": "after it",
    "peak": "peak",
}
PEER = "torch_ddp+torch_zero"
# Of `comparisons`, what the targets are about.
STANDING = (
    "state · ranks",
    "time / flashddp",
    "IQR",
    "time / torch_zero",
    "its IQR",
    "saved / predicted",
)


def write_report(records: Sequence[Record], output: Path) -> None:
    """Write sharding_benchmark.csv and .md, sharding_memory.png and sharding_time.png.

    Of each training the newest record counts.
    """
    sections = make_sections(sharding_rows(records))
    text = f"# Sharded optimizer: memory and time\n\n{NOTE}\n{TARGETS}"
    lines = standing(sections)
    text += f"\n## How zero1 stands\n\n{to_markdown(lines)}" if lines else ""
    text += "".join(map(section_report, sections))
    text += accounting_report(sections)
    write_atomically(output / "sharding_benchmark.md", text)
    lists = ("times_ms", "losses", "optimizer_state_by_rank")
    rows = [row for section in sections for row in section.rows]
    plain = [{key: value for key, value in row.items() if key not in lists} for row in rows]
    to_csv(plain, output / "sharding_benchmark.csv")
    title = accounting_title(sections) if sections else ""
    bars = accounting(sections)
    save_sharding_memory_figure(bars, output / "sharding_memory.png", title=title)
    save_sharding_time_figure(sections, output / "sharding_time.png")


def sharding_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """A row for each training, of the newest record about it."""
    newest: dict[tuple, dict[str, Any]] = {}
    for record in records:
        row = record["config"] | record["figures"]
        row |= {key: record[key] for key in ("device", "cpu", "cores", "seed", "commit", "date")}
        row["torch"] = record["versions"]["torch"]
        key = (*section_key(row), row["kernel"], row["method"])
        # a newer one comes where it was measured, not where the old one stood
        newest.pop(key, None)
        newest[key] = row
    return list(newest.values())


def make_sections(rows: Iterable[dict[str, Any]]) -> list[Section]:
    """The rows by section: few ranks before many, small models before large; methods as listed."""
    found: dict[tuple, list[dict[str, Any]]] = {}
    methods = list(SHARDING_METHODS)
    for row in sorted(rows, key=lambda row: methods.index(row["method"])):
        found.setdefault((*section_key(row), row["kernel"]), []).append(row)
    order = ("ranks", "num_layers", "d_model", "tr_batch_size")
    chosen = sorted(found.values(), key=lambda rows: [rows[0][name] for name in order])
    return [Section(_title(rows[0]), tuple(rows)) for rows in chosen]


def _title(row: Mapping[str, Any]) -> str:
    kernel = "" if row["kernel"] == "sdpa" else f"; {row['kernel']}"
    return section_title(row) + kernel


def section_report(section: Section) -> str:
    """A section's tables, and what failed why."""
    last = max(section.rows, key=lambda row: row["date"])
    text = f"\n## {section.title}\n\n{last['device']}, torch {last['torch']}, {last['date']}"
    text += f", {last['backend']}, {last['steps_per_epoch']} steps an epoch.\n"
    if last["backend"] == "gloo":
        text += (
            f"{last['ranks']} processes share the {last['cores']} cores of one CPU, and memory is "
            "their network: times say nothing about GPUs, and gloo's own copies are in the bytes.\n"
        )
    if any(row.get("is_together") is False for row in section.rows):
        text += "The models did not fit into memory together: each was built anew for each turn.\n"
    present = {key for row in section.rows for key in row if row[key] is not None}
    columns = {key: name for key, name in TIME_COLUMNS.items() if key in present}
    text += f"\n{to_markdown(section.rows, columns)}"
    done = [row for row in section.rows if row["status"] == "ok"]
    if done:
        text += f"\n{memory_table(done)}"
    against = comparisons(done)
    if against:
        text += f"\n{to_markdown(against)}"
    failed = [row for row in section.rows if row["status"] != "ok"]
    reasons = [f"- {row['method']}: {row['status']}: {row['reason']}\n" for row in failed]
    return text + ("\n" + "".join(reasons) if reasons else "")


def memory_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What each method holds, measured and by formula."""
    largest = max(row["measured"]["peak"] for row in rows)
    unit, size = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)
    lines = [
        {
            "method": row["method"],
            f"bytes of a rank ({unit})": source,
            **{MEMORY_COLUMNS[k]: row[source][k] / size for k in MEMORY_COLUMNS},
        }
        for row in rows
        for source in ("measured", "predicted")
    ]
    return to_markdown(lines)


def comparisons(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The sharded methods against `flashddp` and the peer that took turns with them."""
    found = {row["method"]: row for row in rows}
    lines = []
    for method, row in found.items():
        base, peer = found.get(BASE), found.get(PEER)
        if method in ("none", BASE) or base is None or base["launch"] != row["launch"]:
            continue
        line = {
            "method": method,
            "state · ranks": row["state_share"] * row["ranks"],
            "time / flashddp": row["step_ratio"],
            "IQR": row["iqr_step_ratio"],
        }
        if peer is not None and peer["launch"] == row["launch"]:
            ratios = turn_ratios(row["times_ms"], peer["times_ms"])
            line |= {"time / torch_zero": median(ratios), "its IQR": spread(ratios)}
        saved, predicted = row["saved_measured_bytes"], row["saved_predicted_bytes"]
        line |= {"saved (MB)": saved / 1e6, "predicted (MB)": predicted / 1e6}
        line["saved / predicted"] = saved / predicted if predicted else None
        lines.append(line)
    return lines


def standing(sections: Iterable[Section]) -> list[dict[str, Any]]:
    """How `zero1` stands on GPUs: a line for each section that has it, also where it failed."""
    lines = []
    on_gpus = [section for section in sections if section.rows[0]["backend"] == "nccl"]
    for setting, section in zip(short_titles(on_gpus), on_gpus):
        row = next((row for row in section.rows if row["method"] == "zero1"), None)
        if row is None:
            continue
        done = [other for other in section.rows if other["status"] == "ok"]
        found = next((c for c in comparisons(done) if c["method"] == "zero1"), {})
        line = {"setting": setting} | {name: found.get(name) for name in STANDING}
        status = "ok" if found else row["status"] if row["status"] != "ok" else "not compared"
        lines.append(line | {"status": status, "targets met": _meets_targets(found)})
    return lines


def _meets_targets(compared: Mapping[str, Any]) -> str | None:
    """Of what `TARGETS` say how much a line of `comparisons` has; None where it is empty."""
    targets = {
        "state · ranks": lambda share: abs(share - 1) <= 0.01,
        "time / flashddp": lambda ratio: ratio <= 1.03,
        "time / torch_zero": lambda ratio: ratio < 1,
        "saved / predicted": lambda share: abs(share - 1) <= 0.05,
    }
    known = {name for name in targets if compared.get(name) is not None}
    met = sum(targets[name](compared[name]) for name in known)
    return f"{met} of {len(known)}" if known else None


def line(record: Record) -> str:
    """What is printed of a training once it is measured."""
    case, figures = record["config"], record["figures"]
    text = f"{case['model']}, {case['method']}: "
    if figures["status"] != "ok":
        return f"{text}{figures['status']}, {figures['reason']}"
    text += f"{figures['median_ms']:.2f} ms ± {figures['iqr_ms'] / 2:.2f}"
    if figures["step_ratio"] is not None:
        text += f", {figures['step_ratio']:.3f} of flashddp"
    for kind in ("optimizer_state", "peak"):
        measured, predicted = (figures[source][kind] for source in ("measured", "predicted"))
        name = kind.replace("_", " ")
        text += f", {name} {measured / 1e6:,.1f} MB (predicted {predicted / 1e6:,.1f})"
    return text
