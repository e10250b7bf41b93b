"""Tables and figures of the sharding benchmark, from its records and the memory formulas alone."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from lib.core.figures import (
    BLACK,
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    PAPER,
    PURPLE,
    SKY,
    VERMILLION,
    save_figure,
)
from lib.core.records import Record, format_value
from lib.model.config import model_preset
from lib.profiling.memory_formula import SIZES, largest_preset, rank_memory
from lib.tools.benchmarks.multi_rank_report import (
    SETTING,
    Setting,
    failure_list,
    gpu_settings,
    group_rows,
    panels,
    setting_intro,
    setting_title,
    time_ratio,
    training_rows,
)
from lib.tools.benchmarks.sections import Section, Table, write_csv
from lib.tools.benchmarks.sections import write_report as write_sections
from lib.tools.benchmarks.sharding_cases import (
    BASE,
    SHARDING_METHODS,
    ShardingCase,
    predicted_bytes,
)

NOTE = """Each rank is a process with a part of the batch; in `none` each trains a model of its own
while the others do the same. `flashddp` keeps the whole optimizer on every rank, `zero1` a slice of
it, and averages gradients itself; in `wrapper+zero1` the wrapper averages them. `fsdp` and
PyTorch's `fully_shard`, `fsdp2`, shard weights and gradients too; with `+checkpoints` backward
computes every block again. Methods are interleaved, an epoch at a time; an epoch is a sample, its
time the ranks' mean, and the ratio to `flashddp` the median over the epochs.

Bytes are those of the rank that has most, in a training's third step and of itself alone. Weights,
gradients and state are counted from the tensors that are there when the optimizer steps; the rest
is what is allocated. Predictions are formulas (`lib.profiling.memory_formula`) for eager
mode, of which `torch.compile` keeps fewer activations. Buckets have 25 MiB where a title says
nothing else.
"""
TARGETS = """Targets for `zero1`: state · ranks within 1% of 1, at most 1.03 of the time of
`flashddp` and less than that of `torch_ddp+torch_zero`, and memory saved within 5% of what the
formulas say.
"""
FSDP_TARGETS = """Targets for `fsdp`: at most the time of PyTorch's `fsdp2` in the same run, and a
peak within 3% of what the formula says (today's; tables below show that of the day).
"""
GLOO_NOTE = "times say nothing about GPUs, and gloo's own copies are in the bytes."
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
    "initialized": "initialized",
    "before_step": "before the update",
    "after_step": "after it",
    "peak": "peak",
}
# PyTorch's method, which `zero1` is compared with.
PEER = "torch_ddp+torch_zero"
# Column of `comparison_table` -> whether it meets the target; other columns have none.
IS_MET = {
    "state · ranks": lambda share: abs(share - 1) <= 0.01,
    "time / flashddp": lambda ratio: ratio <= 1.03,
    "IQR": None,
    "time / torch_zero": lambda ratio: ratio < 1,
    "its IQR": None,
    "saved / predicted": lambda share: abs(share - 1) <= 0.05,
}
METHOD_COLORS = {
    "none": BLACK,
    "flashddp": VERMILLION,
    "flashddp+zero1": SKY,
    "flashddp+zero1_parameters": GREEN,
    "zero1": BLUE,
    "torch_ddp+torch_zero": ORANGE,
    "fsdp": GRAY,
    "fsdp2": PURPLE,
    "fsdp+checkpoints": GRAY,
}
# One of the two GPUs of a free notebook on Kaggle.
T4_BYTES = 16 * 10**9
RANKS = (1, 2, 4, 8)
# Method -> its stage of ZeRO. Nothing here implements the second.
STAGES = {"flashddp": 0, "zero1": 1, "ZeRO-2": 2, "fsdp2": 3}
# Settings that change a rank's bytes, named alike in a row and in `rank_memory`.
ACCOUNTING_SETTINGS = ("dtype", "low_precision_weights")
# Settings that trainings in one table of bytes share, whatever their model, method and ranks.
SHARED = ("device", "kernel", "tr_batch_size", "compile", "cuda_graph", *ACCOUNTING_SETTINGS)
# Kinds of bytes from the bottom up; what the peak has beyond them is drawn on top.
KIND_COLORS = {"parameters": BLUE, "optimizer_state": VERMILLION, "gradients": GREEN}
KIND_NAMES = {"parameters": "weights", "optimizer_state": "state", "gradients": "gradients"}
BEYOND, BEYOND_COLOR = "beyond them at the peak: activations, buffers", GRAY


def write_report(records: Iterable[Record], output: Path) -> None:
    """Write sharding_benchmark.md and .csv, sharding_memory.png and sharding_time.png.

    Each training is shown by its newest record.
    """
    settings = make_settings(sharding_rows(records))
    sections = [Section("Sharded optimizer: memory and time", [NOTE, TARGETS], level=1)]
    targets = target_table(settings)
    if targets:
        sections.append(Section("How zero1 compares", [Table(targets)]))
    against_fsdp2 = fsdp_table(settings)
    if against_fsdp2:
        sections.append(Section("How fsdp compares", [FSDP_TARGETS, Table(against_fsdp2)]))
    sections += map(_setting_section, settings)
    bars, title = accounting(settings), accounting_title(settings)
    intro = f"{title}; in brackets what was measured."
    parts: list[str | Table] = [intro, Table(accounting_table(bars)), largest_presets()]
    sections.append(Section("By formula", parts))
    write_sections(output / "sharding_benchmark.md", sections)
    rows = [row for setting in settings for row in setting.rows]
    write_csv(output / "sharding_benchmark.csv", rows)
    save_sharding_memory_figure(bars, output / "sharding_memory.png", title=title)
    save_sharding_time_figure(settings, output / "sharding_time.png")


def sharding_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """A row for each training, from its newest record."""
    return training_rows(records)


def make_settings(rows: Iterable[Mapping[str, Any]]) -> list[Setting]:
    """The rows by setting: few ranks before many, small models before large, methods as listed."""
    methods = list(SHARDING_METHODS)
    rows = sorted(rows, key=lambda row: methods.index(row["method"]))
    groups = group_rows(rows, (*SETTING, "kernel"))
    order = ("ranks", "num_layers", "d_model", "tr_batch_size")
    groups.sort(key=lambda group: [group[0][name] for name in order])
    settings = []
    for group in groups:
        kernel = group[0]["kernel"]
        title = setting_title(group[0]) + (f"; {kernel}" if kernel != "sdpa" else "")
        settings.append(Setting(title, tuple(group)))
    return settings


def _setting_section(setting: Setting) -> Section:
    """The tables of a setting, and why methods failed."""
    done = [row for row in setting.rows if row["status"] == "ok"]
    parts: list[str | Table] = [
        setting_intro(setting.rows, GLOO_NOTE),
        Table(setting.rows, TIME_COLUMNS),
        Table(memory_table(done)),
        Table(comparison_table(done)),
        failure_list(setting.rows, "method"),
    ]
    return Section(setting.title, parts)


def memory_table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The bytes of each method, measured and by formula."""
    unit, size = _unit(max((row["measured"]["peak"] for row in rows), default=0))
    return [
        {
            "method": row["method"],
            f"bytes of a rank ({unit})": source,
            **{MEMORY_COLUMNS[k]: row[source][k] / size for k in MEMORY_COLUMNS},
        }
        for row in rows
        for source in ("measured", "predicted")
    ]


def _unit(largest: float) -> tuple[str, float]:
    """The unit for values up to `largest` bytes, and its bytes."""
    return ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)


def comparison_table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The sharded methods against `flashddp` and PyTorch's, where interleaved with them."""
    found = {row["method"]: row for row in rows}
    table = []
    for method, row in found.items():
        ratio, iqr = time_ratio(row, found.get(BASE))
        if method in ("none", BASE) or ratio is None:
            continue
        line = {"method": method, "state · ranks": row["state_share"] * row["ranks"]}
        line |= {"time / flashddp": ratio, "IQR": iqr}
        line["time / torch_zero"], line["its IQR"] = time_ratio(row, found.get(PEER))
        saved, predicted = row["saved_measured_bytes"], row["saved_predicted_bytes"]
        line |= {"saved (MB)": saved / 1e6, "predicted (MB)": predicted / 1e6}
        line["saved / predicted"] = saved / predicted if predicted else None
        table.append(line)
    return table


def target_table(settings: Iterable[Setting]) -> list[dict[str, Any]]:
    """How `zero1` compares on GPUs: a row for each setting that has it, even where it failed."""
    table = []
    for title, setting in gpu_settings(settings).items():
        row = next((row for row in setting.rows if row["method"] == "zero1"), None)
        if row is None:
            continue
        lines = comparison_table(setting.rows)
        found = next((line for line in lines if line["method"] == "zero1"), {})
        line = {"setting": title} | {name: found.get(name) for name in IS_MET}
        line["status"] = "not compared" if row["status"] == "ok" and not found else row["status"]
        known = [name for name in IS_MET if IS_MET[name] and found.get(name) is not None]
        met = sum(IS_MET[name](found[name]) for name in known)
        table.append(line | {"targets met": f"{met} of {len(known)}" if known else None})
    return table


def fsdp_table(settings: Iterable[Setting]) -> list[dict[str, Any]]:
    """How `fsdp` compares with PyTorch's on GPUs: a row for each setting and way to train."""
    table = []
    for title, setting in gpu_settings(settings).items():
        found = {row["method"]: row for row in setting.rows if row["status"] == "ok"}
        for method in ("fsdp", "fsdp+checkpoints"):
            row = found.get(method)
            if row is None:
                continue
            ratio, iqr = time_ratio(row, found.get("fsdp2"))
            peak = row["measured"]["peak"]
            line = {"setting": title, "method": method, "ms a step": row["median_ms"]}
            line |= {"time / fsdp2": ratio, "IQR": iqr, "peak (GB)": peak / 1e9}
            table.append(line | {"peak / formula": peak / _case(row).predicted.peak})
    return table


def _case(row: Mapping[str, Any]) -> ShardingCase:
    """The training of a row, whose memory the formulas of today predict."""
    return ShardingCase(**{field.name: row[field.name] for field in fields(ShardingCase)})


@dataclass(frozen=True)
class RankBar:
    """The memory of one rank: bytes of each of `KIND_COLORS`, and of `peak`."""

    group: str
    """Bars of one group are drawn together, such as those of as many ranks."""

    name: str
    """Such as how the optimizer is sharded."""

    predicted: Mapping[str, int]
    """By formula; drawn hatched."""

    measured: Mapping[str, int] | None = None


def accounting(settings: Sequence[Setting]) -> dict[str, list[RankBar]]:
    """Model -> a rank's memory on 1 to 8 ranks, with the settings that most trainings have.

    The presets `small` to `2.7b`, after other models that were measured with these settings.
    """
    usual = _usual_row(settings)
    measured = {}
    for row in (row for setting in settings for row in setting.rows):
        is_whole = row["context_length"] == model_preset(row["model"]).context_length
        if row["status"] == "ok" and is_whole and _shared(row) == _shared(usual):
            # a rank of `none` trains alone, however many others do the same
            alone = row["method"] == "none"
            key = (row["model"], BASE, 1) if alone else (row["model"], row["method"], row["ranks"])
            measured[key] = row["measured"]
    others = dict.fromkeys(model for model, _, _ in measured if model not in SIZES)
    bars: dict[str, list[RankBar]] = {model: [] for model in (*others, *SIZES)}
    for model, ranks, method in itertools.product(bars, RANKS, STAGES):
        if ranks == 1 and method != BASE:
            continue
        stage = STAGES[method]
        predicted = rank_memory(
            model_preset(model),
            ranks=ranks,
            stage=stage,
            batch_size=usual["tr_batch_size"],
            ddp_wrapper="none" if stage else "flashddp",
            cuda=usual["backend"] == "nccl",
            **{name: usual[name] for name in ACCOUNTING_SETTINGS},
        )
        group, found = f"{ranks} rank" + "s" * (ranks > 1), measured.get((model, method, ranks))
        bars[model].append(RankBar(group, method, predicted_bytes(predicted), found))
    return bars


def _usual_row(settings: Iterable[Setting]) -> Mapping[str, Any]:
    """The newest row of those with the settings that most trainings have."""
    rows = [row for setting in settings for row in setting.rows]
    counts = Counter(map(_shared, rows))
    return max(rows, key=lambda row: (counts[_shared(row)], row["date"]))


def _shared(row: Mapping[str, Any]) -> tuple:
    return tuple(row[name] for name in SHARED)


def accounting_title(settings: Iterable[Setting]) -> str:
    """The settings of `accounting` in words."""
    row = _usual_row(settings)
    words = [row["dtype"], *[f"{row['dtype']} parameters"] * row["low_precision_weights"]]
    where = "CPUs" if row["backend"] == "gloo" else row["device"]
    return f"{', '.join(words)}, {row['tr_batch_size']} sequences a rank; {where}"


def accounting_table(found: Mapping[str, Sequence[RankBar]]) -> list[dict[str, Any]]:
    """Peak GB of a rank by model and stage, a column for each number of ranks."""
    table = []
    for model, bars in found.items():
        for method in STAGES:
            line: dict[str, Any] = {"model": model, "peak of a rank (GB)": method}
            for bar in bars:
                if bar.name == method:
                    line[bar.group] = format_value(bar.predicted["peak"] / 1e9)
                    if bar.measured:
                        line[bar.group] += f" ({format_value(bar.measured['peak'] / 1e9)})"
            table.append(line)
    return table


def largest_presets() -> str:
    """The largest preset that 16 GB can train, alone and with ZeRO-1 on two ranks, in words."""
    words = []
    for is_short in (False, True):
        options: dict = {"batch_size": 1, "dtype": "float16", "low_precision_weights": is_short}
        alone = largest_preset(T4_BYTES, **options)
        on_two = largest_preset(T4_BYTES, 2, stage=1, ddp_wrapper="none", **options)
        held = "float16 parameters" if is_short else "autocast"
        words.append(f"{held}: `{alone}` on one, `{on_two}` on two with `zero1`")
    return (
        "The largest preset that fits into a T4's 16 GB with one sequence at a time and matmuls in "
        f"float16, by formula and with 1 GB kept free: {'; '.join(words)}.\n"
    )


def save_sharding_memory_figure(
    bars_of: Mapping[str, Sequence[RankBar]], path: str | os.PathLike, *, title: str = ""
) -> Path:
    """Stacked bars of bytes, a panel per model: measured, and hatched by formula."""
    with panels(len(bars_of), columns=3, width=4.6, height=3.8) as (figure, grid):
        for axes, (model, bars) in zip(grid, bars_of.items()):
            draw_rank_bars(axes, bars)
            axes.set_title(model)
        handles = [Patch(color=KIND_COLORS[kind], label=KIND_NAMES[kind]) for kind in KIND_COLORS]
        handles.append(Patch(color=BEYOND_COLOR, label=BEYOND))
        hatched = {"facecolor": PAPER, "edgecolor": BLACK, "hatch": "////", "linewidth": 0}
        handles.append(Patch(label="by formula", **hatched))
        figure.legend(handles=handles, ncols=3, loc="outside lower center", fontsize="small")
        if title:
            figure.suptitle(title, fontsize="medium")
        return save_figure(figure, path)


def draw_rank_bars(axes: Axes, bars: Sequence[RankBar]) -> None:
    """Draw what was measured and beside it what is predicted, with gaps between groups."""
    largest = max(held["peak"] for bar in bars for held in (bar.predicted, bar.measured) if held)
    unit, size = _unit(largest)
    x, centers = 0.0, []
    for group, members in itertools.groupby(bars, key=lambda bar: bar.group):
        first = x
        for bar in members:
            if bar.measured is None:
                _draw_stack(axes, x, 0.81, bar.predicted, size, is_hatched=True)
            else:
                _draw_stack(axes, x - 0.215, 0.4, bar.measured, size, is_hatched=False)
                _draw_stack(axes, x + 0.215, 0.4, bar.predicted, size, is_hatched=True)
            centers.append(x)
            x += 1
        # the group's name above its bars, in data coordinates across and axes' upwards
        above = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top"}
        axes.text((first + x - 1) / 2, 1.0, group, fontsize=8, **above)
        x += 0.7
    names = [bar.name for bar in bars]
    axes.set_xticks(centers, names, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set(xlabel="method", ylabel=f"peak memory of a rank ({unit})")
    axes.set_ylim(top=1.12 * largest / size)
    axes.grid(visible=False, axis="x")


def _draw_stack(
    axes: Axes, x: float, width: float, held: Mapping[str, int], size: float, *, is_hatched: bool
) -> None:
    style = {"hatch": "////", "edgecolor": PAPER, "linewidth": 0} if is_hatched else {}
    parts = [(color, held[kind]) for kind, color in KIND_COLORS.items()]
    parts.append((BEYOND_COLOR, max(0, held["peak"] - sum(num_bytes for _, num_bytes in parts))))
    bottom = 0.0
    for color, num_bytes in parts:
        axes.bar(x, num_bytes / size, width, bottom=bottom, color=color, **style)
        bottom += num_bytes / size


def save_sharding_time_figure(settings: Sequence[Setting], path: str | os.PathLike) -> Path:
    """Milliseconds per step by method, half the IQR to each side, and the ratio to `flashddp`."""
    height = 0.42 * max(len(setting.rows) for setting in settings) + 1.2
    with panels(len(settings), columns=2, width=8.5, height=height) as (figure, grid):
        for axes, setting in zip(grid, settings):
            _draw_times(axes, setting)
        figure.align_ylabels()
        return save_figure(figure, path)


def _draw_times(axes: Axes, setting: Setting) -> None:
    rows = setting.rows[::-1]
    for y, row in enumerate(rows):
        if row["status"] != "ok":
            axes.text(0, y, f" {row['status']}", va="center", fontsize=10)
            continue
        half_iqr = (row["iqr_ms"] or 0) / 2
        color = METHOD_COLORS[row["method"]]
        axes.barh(y, row["median_ms"], 0.7, color=color, xerr=half_iqr, ecolor=BLACK)
        text = f"{row['median_ms']:.3g} ms"
        if row["step_ratio"] is not None:
            text += f", {row['step_ratio']:.3f}"
        right = (row["median_ms"] + half_iqr, y)
        style = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 10}
        axes.annotate(text, right, **style)
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.margins(x=0.22)
    axes.set_xlim(left=0)
    axes.set(xlabel="time a step (ms), and its ratio to flashddp", ylabel="method")
    axes.set_title(setting.title.replace("; ", "\n", 1), fontsize="medium")
    axes.grid(visible=False, axis="y")
