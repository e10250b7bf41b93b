"""The report of the attention benchmark: tables by length, targets, CSV and figures, from records.

The rows that all functions here take are those of `attention_rows`, one for each kernel of a case.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.ticker import LogLocator

from lib.core.figures import (
    BLACK,
    BLUE,
    GREEN,
    MARKERS,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    house_figure,
    save_figure,
)
from lib.core.records import Record, format_value, to_markdown
from lib.tools.benchmarks.sections import (
    SAMPLING,
    Section,
    Table,
    measured_on,
    newest,
    write_csv,
    write_report,
)

Row = Mapping[str, Any]
# The kernel to compare the others with: the first of these that was measured.
OURS = ("flash_attention_triton", "flash_attention_cuda", "flash_attention_torch")
NOTE = """TFLOP/s count 4 · batch · heads · queries · keys · head_dim forward and 2.5 times that
backward; half of it with a causal mask and as many queries as keys, and only the visible pairs with
a causal mask and unequal numbers. Memory is what a call allocates beyond its inputs; for
`backward`, what both passes allocate. Kernels were interleaved on the same inputs, except for those
measured alone: kernels that keep the scores, in the backward pass, and kernels that launch
thousands of small ones (`scaled_dot_prod_attention`, on a GPU also `flash_attention_torch`). `oom`:
out of memory. `unsupported`: PyTorch refuses it. `wrong`: rows of the output differ from the
formula's, for example because the mask is aligned differently. Ratios above 1: our kernel is
faster."""


def write_attention_report(records: Sequence[Record], output: Path) -> None:
    """Write attention_sweep_results.csv, _report.md and figures from the newest records."""
    records = newest_records(records)
    rows = attention_rows(records)
    sections = [Section("Attention", [f"{measured_on(records)}.\n{NOTE}"], level=1)]
    if targets := targets_section(rows):
        sections.append(targets)
    for direction in dict.fromkeys(row["direction"] for row in rows):
        sections += _direction_sections(direction, rows)
    if lines := remarks(rows):
        sections.append(Section("Remarks", ["\n".join(f"- {line}" for line in lines)]))
    stem = output / "attention_sweep"
    write_report(f"{stem}_report.md", sections)
    write_csv(f"{stem}_results.csv", rows)

    rows = supported_rows(rows)
    if any(row["direction"] == "forward" for row in rows):
        save_forward_figure(rows, f"{stem}_forward.png")
    if rows:
        save_heatmap_figure(rows, f"{stem}_heatmap.png")
        save_scaling_figure(rows, f"{stem}_scaling.png")


def newest_records(records: Iterable[Record]) -> list[Record]:
    """The last record of each case, whatever its kernels and number of samples."""
    return newest(records, ignore=("kernels", *SAMPLING))


def attention_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """A row for each kernel of each record: its case, its figures, and where they come from."""
    rows = []
    for record in records:
        config, figures = record["config"], record["figures"]
        kernels = figures["kernels"]
        if figures["status"] != "ok":
            kernels = {kernel: {"status": figures["status"]} for kernel in config["kernels"]}
        case = {key: value for key, value in config.items() if key != "kernels"}
        mask = "causal" if config["is_causal"] else "full"
        # records made before there was the setting lack it
        case |= {
            "mask": mask,
            "in_graph": config.get("in_graph", False),
            "case": case_name(config),
            "flops": figures["flops"],
        }
        for kernel, measured in kernels.items():
            # a graph's replay, which allocates nothing, was once measured as 0
            memory = measured.get("peak_memory_bytes") or None
            row = {**case, "kernel": kernel, "median_ms": None, **measured}
            row |= {"peak_memory_bytes": memory, "peak_memory_gb": memory and memory / 1e9}
            row |= {key: record.get(key) for key in ("device", "commit", "date")}
            rows.append(row)
    return rows


def case_name(config: Mapping[str, Any]) -> str:
    """Describe a case in words."""
    return (
        f"{config['direction']}, {'causal' if config['is_causal'] else 'full'}, "
        f"{config['queries']:,} × {config['keys']:,}, head_dim {config['head_dim']}, "
        f"{config['dtype']}, {config['batch_size']} × {config['heads']} heads"
        f"{', in a CUDA graph' if config.get('in_graph') else ''}"
    )


def case_line(record: Record) -> str:
    """Describe a finished case in one line, for the log."""
    rows = attention_rows([record])
    words = [format_value(r["median_ms"]) if r["status"] == "ok" else r["status"] for r in rows]
    found = ", ".join(f"{row['kernel']} {word}" for row, word in zip(rows, words))
    return f"{case_name(record['config'])}: {found or record['figures']['status']} (ms)"


def summary(records: Iterable[Record]) -> str:
    """The fastest kernel of each case, beside PyTorch's choice, as a table for the terminal."""
    lines = []
    for record in records:
        rows = attention_rows([record])
        times = {row["kernel"]: row["median_ms"] for row in rows if row["status"] == "ok"}
        line = {"case": case_name(record["config"]), "sdpa (ms)": times.get("sdpa")}
        best = min(times, key=times.__getitem__, default=None)
        line |= {"fastest": best, "ms": times.get(best)}
        lines.append(line | {"TFLOP/s": best and record["figures"]["flops"] / times[best] / 1e9})
    return to_markdown(lines)


def main_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of the sweep: of the most common dtype, tokens × heads × head_dim, and launch."""

    def size(row: Row) -> tuple:
        longest = max(row["queries"], row["keys"])
        size = row["batch_size"] * row["heads"] * row["head_dim"] * longest
        return row["dtype"], size, row.get("in_graph", False)

    (most, _), *_ = Counter(map(size, rows)).most_common(1)
    return [row for row in rows if size(row) == most]


def supported_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of kernels that are supported in at least one case."""
    kernels = {row["kernel"] for row in rows if row["status"] != "unsupported"}
    return [row for row in rows if row["kernel"] in kernels]


def _direction_sections(direction: str, rows: Sequence[Row]) -> list[Section]:
    """Tables of one direction, a row for each case: TFLOP/s and ratios, milliseconds, memory."""
    rows = supported_rows([row for row in rows if row["direction"] == direction])
    if not rows:
        return [Section(direction.capitalize(), ["None of these kernels runs here."])]
    frame = pd.DataFrame(rows)
    is_ok = frame["status"] == "ok"
    frame["queries × keys"] = [f"{row['queries']:,} × {row['keys']:,}" for row in rows]
    frame["batch × heads"] = [f"{row['batch_size']} × {row['heads']}" for row in rows]
    case = ["head_dim", "mask", "dtype", "queries × keys", "batch × heads"]
    if any(row["in_graph"] for row in rows):
        frame["launched by"] = ["a CUDA graph" if row["in_graph"] else "Python" for row in rows]
        case.append("launched by")

    def spread(values: pd.Series) -> pd.DataFrame:
        """A row for each case and a column for each kernel, both in the order of the records."""
        return _spread(frame.assign(value=values), "value", case, list(frame["kernel"].unique()))

    # times of the fastest peers over ours
    times = spread(frame["median_ms"].where(is_ok)).astype(float)
    ours = times[[kernel for kernel in OURS if kernel in times]].bfill(axis=1)
    flex, sdpa = times.filter(regex="^flex_"), times.filter(regex="^sdpa")
    fa4 = times.filter(regex="^fa4")
    sections = [Section(direction.capitalize())]
    tables = {"TFLOP/s": "tflops", "Time (ms)": "median_ms", "Peak memory (GB)": "peak_memory_gb"}
    for title, figure in tables.items():
        table = spread(frame[figure].where(is_ok, frame["status"]))
        if figure == "tflops" and ours.shape[1]:
            table["ours / Flex"] = flex.min(axis=1) / ours.iloc[:, 0]
            table["ours / best SDPA"] = sdpa.min(axis=1) / ours.iloc[:, 0]
            if fa4.shape[1]:
                table["ours / FA4"] = fa4.min(axis=1) / ours.iloc[:, 0]
        sections.append(Section(title, [Table(table.reset_index())], level=3))
    return sections


def _spread(
    frame: pd.DataFrame, figure: str, case: Sequence[str], kernels: Sequence[str]
) -> pd.DataFrame:
    """A figure with a row for each case, in the order of `frame`, and a column for each kernel."""
    # with sort=False, older versions of pandas put numbers beside the wrong cases
    wide = frame.groupby([*case, "kernel"])[figure].last().unstack()
    cases = pd.MultiIndex.from_frame(frame[[*case]].drop_duplicates())
    return wide.reindex(index=cases, columns=kernels)


def remarks(rows: Sequence[Row]) -> list[str]:
    """List what the compiler replaced, which cases were refused and why, and wrong results."""
    lines = []
    compiled = [row for row in rows if row.get("became_sdpa") is not None]
    if compiled:
        replaced = [row["case"] for row in compiled if row["became_sdpa"]]
        lines.append(
            f"`vectorized_torch_compiled` became PyTorch's own attention in {len(replaced)} of "
            f"{len(compiled)} cases, and is naive attention, fused, in the others."
            + (f" Replaced: {'; '.join(replaced)}." if replaced else "")
        )
    refused = Counter(
        (row["kernel"], row["reason"]) for row in rows if row["status"] == "unsupported"
    )
    lines += [f"`{k}` refused {count} cases: {why}" for (k, why), count in refused.items()]
    wrong = [f"`{row['kernel']}`: {row['case']}" for row in rows if row["status"] == "wrong"]
    return lines + ([f"Wrong: {'; '.join(wrong)}."] if wrong else [])


@dataclass(frozen=True)
class Target:
    """The speed that our kernel must reach in every case to which the target applies."""

    words: str
    """The peers and the cases."""

    ratio: float
    """The least time of the fastest peer over ours."""

    peers: tuple[str, ...]
    """Kernels to compare with."""

    applies_to: Callable[[Row], bool]
    """Whether a case counts."""


def _is_square_16_bit(row: Row, least: int) -> bool:
    """Whether a case has a 16-bit dtype and as many queries as keys, at least `least`."""
    return row["queries"] == row["keys"] >= least and row["dtype"] != "float32"


def _is_one_of_twelve_heads(row: Row, length: int) -> bool:
    """Whether a case is one sequence of `length` tokens with 12 heads of 64, in 16 bits."""
    shape = [row[key] for key in ("batch_size", "heads", "head_dim", "queries", "keys")]
    return shape == [1, 12, 64, length, length] and row["dtype"] != "float32"


TARGETS = (
    Target(
        "FlexAttention, N ≥ 1,024",
        1.0,
        ("flex_attention",),
        lambda row: _is_square_16_bit(row, 1024),
    ),
    Target(
        "the best SDPA backend, N ≥ 4,096",
        0.9,
        ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient"),
        lambda row: _is_square_16_bit(row, 4096),
    ),
    Target(
        "vectorized_torch, 12 heads, N = 8,192, forward",
        10.0,
        ("vectorized_torch",),
        lambda row: _is_one_of_twelve_heads(row, 8192) and row["direction"] == "forward",
    ),
    Target(
        "vectorized_torch in float32, N ≥ 1,024",
        1.0,
        ("vectorized_torch",),
        lambda row: row["dtype"] == "float32" and row["queries"] == row["keys"] >= 1024,
    ),
)
# The target for the longest sequence, and its largest ratio of memory to a quarter of the length.
LONG, LINEAR = "N = 1,048,576 on one card, memory linear in N", 4.2


def targets_section(rows: Sequence[Row]) -> Section | None:
    """How many cases meet each target and the closest one, then every case; None without cases."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["kernel"]] = row
    summary, details = [], []
    for target in TARGETS:
        compared = [line for case in cases.values() if (line := _comparison(target, case))]
        if not compared:
            continue
        details += compared
        timed = [line for line in compared if line["ratio"] is not None]
        closest = min(timed, key=lambda line: line["ratio"], default={"ratio": None, "case": None})
        summary.append(
            {
                "against": target.words,
                "at least": target.ratio,
                "met": f"{sum(line['met'] for line in compared)} of {len(compared)}",
                "least ratio": closest["ratio"],
                "in": closest["case"],
            }
        )
    longest = _longest_lines(rows)
    if not details + longest:
        return None
    met = sum(line["met"] for line in longest)
    sentence = f"{LONG}: met in {met} of {len(longest)} passes." if longest else ""
    return Section("Targets", [Table(summary), sentence, Table(details + longest)])


def _comparison(target: Target, case: Mapping[str, Row]) -> dict[str, Any] | None:
    """The line of a case in the table of targets; None if the target does not apply to it."""
    ours = case.get("flash_attention_triton")
    peers = [case[kernel] for kernel in target.peers if kernel in case]
    timed = [row for row in peers if row["status"] == "ok"]
    is_oom = any(row["status"] == "oom" for row in peers)
    if ours is None or not target.applies_to(ours) or not (timed or is_oom):
        return None
    best = min(timed, key=lambda row: row["median_ms"], default={"kernel": "oom"})
    is_timed = ours["status"] == "ok" and timed
    ratio = best["median_ms"] / ours["median_ms"] if is_timed else None
    # a peer that runs out of memory is beaten
    is_met = ours["status"] == "ok" and (ratio is None or ratio >= target.ratio)
    return _line(f"{target.ratio:g} × {target.words}", ours, best, ratio, is_met)


def _longest_lines(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A line for each pass over the longest sequence; its ratio is that of memory to a quarter."""
    ours = [row for row in rows if row["kernel"] == "flash_attention_triton"]
    longest, quarter = (
        {row["direction"]: row for row in ours if _is_one_of_twelve_heads(row, length)}
        for length in (2**20, 2**18)
    )
    lines = []
    for direction, row in longest.items():
        memory = row.get("peak_memory_bytes")
        of_quarter = quarter.get(direction, {}).get("peak_memory_bytes")
        ratio = memory / of_quarter if memory and of_quarter else None
        is_met = row["status"] == "ok" and ratio is not None and ratio <= LINEAR
        lines.append(_line(LONG, row, {"kernel": "memory at N = 262,144"}, ratio, is_met))
    return lines


def _line(target: str, ours: Row, peer: Row, ratio: float | None, is_met: bool) -> dict[str, Any]:
    """A line of the table of all cases of targets."""
    return {
        "target": target,
        "case": ours["case"],
        "ours (ms)": ours.get("median_ms"),
        "peer": peer["kernel"],
        "peer (ms)": peer.get("median_ms"),
        "ratio": ratio,
        "peak memory (GB)": ours.get("peak_memory_gb"),
        "met": is_met,
    }


GRAY = "#888888"
# Related kernels share a color: the second of them is hatched, or its line dashed.
STYLES = {
    "flash_attention_triton": (VERMILLION, False),
    "flash_attention_triton_unordered": (GRAY, False),
    "flash_attention_torch": (VERMILLION, True),
    "flash_attention_cuda": (BLACK, True),
    "scaled_dot_prod_attention": (BLACK, False),
    "vectorized_torch": (GREEN, False),
    "vectorized_torch_compiled": (GREEN, True),
    "sdpa": (BLUE, False),
    "sdpa_cudnn": (BLUE, True),
    "sdpa_flash": (SKY, False),
    "sdpa_efficient": (SKY, True),
    "sdpa_math": (ORANGE, False),
    "flex_attention": (PURPLE, False),
    "fa4": (PURPLE, True),
    "fa4_deterministic": (ORANGE, True),
}
# Most lengths that the bars of one panel show.
MOST_LENGTHS = 5
NUMBERS = ("tflops", "median_ms", "peak_memory_gb")


def _sweep_frame(rows: Sequence[Row]) -> pd.DataFrame:
    """The supported rows of the sweep, with NaN for missing numbers."""
    frame = pd.DataFrame(supported_rows(main_rows(rows)))
    frame["panel"] = [f"head_dim {d}, {m}" for d, m in zip(frame["head_dim"], frame["mask"])]
    frame = frame.reindex(columns=list(dict.fromkeys([*frame.columns, *NUMBERS])))
    return frame.astype(dict.fromkeys(NUMBERS, float))


def _by_tier(rows: pd.DataFrame, figure: str, kernels: Sequence[str]) -> pd.DataFrame:
    """A figure by (queries, keys) and kernel, in the order of the rows."""
    return _spread(rows, figure, ["queries", "keys"], kernels)


def _squares(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with as many queries as keys, or all rows if there is none."""
    squares = rows[rows["queries"] == rows["keys"]]
    return squares if len(squares) else rows


def save_forward_figure(rows: Sequence[Row], path: str | os.PathLike) -> Path:
    """Draw bars of forward TFLOP/s for a few lengths, a panel for each head_dim and mask."""
    frame = _sweep_frame([row for row in rows if row["direction"] == "forward"])
    panels = frame.groupby("panel", sort=False)
    size = {"width": 11.0, "height": 3.2 * len(panels) + 0.6}
    with house_figure(nrows=len(panels), squeeze=False, **size) as (figure, grid):
        for axes, (title, panel) in zip(grid[:, 0], panels):
            _draw_bars(axes, _squares(panel), frame["kernel"].unique())
            axes.set(title=title, xlabel="queries × keys", ylabel="speed (TFLOP/s)")
        figure.legend(*grid[0, 0].get_legend_handles_labels(), ncols=4, loc="outside lower center")
        return save_figure(figure, path)


def _draw_bars(axes: Axes, rows: pd.DataFrame, kernels: Sequence[str]) -> None:
    """Draw a group of bars for each length, a bar for each kernel; its status if it has no time."""
    lengths = sorted(rows["queries"].unique(), reverse=True)
    shown = lengths[:: max(1, math.ceil(len(lengths) / MOST_LENGTHS))]
    rows = rows[rows["queries"].isin(shown)]
    speeds, statuses = _by_tier(rows, "tflops", kernels), _by_tier(rows, "status", kernels)
    width = 0.85 / len(kernels)
    for index, kernel in enumerate(kernels):
        x = np.arange(len(speeds)) + (index - (len(kernels) - 1) / 2) * width
        color, is_second = STYLES[kernel]
        style: dict = {"color": color, "hatch": "///" * is_second, "edgecolor": "white"}
        axes.bar(x, speeds[kernel].fillna(0), width, label=kernel, linewidth=0.3, **style)
        for center, status in zip(x, statuses[kernel].fillna("ok")):
            if status != "ok":
                style = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 9}
                axes.text(center, 0, f" {status}", **style)
    axes.set_xticks(range(len(speeds)), [f"{q:,} × {k:,}" for q, k in speeds.index])
    axes.grid(visible=False, axis="x")


def save_heatmap_figure(rows: Sequence[Row], path: str | os.PathLike) -> Path:
    """Draw how many times faster our kernel is than each other, a panel for each setting."""
    frame = _sweep_frame(rows)
    kernels = list(frame["kernel"].unique())
    ours = next((kernel for kernel in OURS if kernel in kernels), kernels[0])
    peers = [kernel for kernel in kernels if kernel != ours] or [ours]
    tiers = _by_tier(frame, "status", kernels).index
    panels = frame.groupby(["direction", "panel"], sort=False)
    ncols = min(2, len(panels))
    nrows = math.ceil(len(panels) / ncols)
    # a panel is at least as large as its title and labels
    width, height = max(2.8, 0.5 * len(tiers)), max(2.5, 0.36 * len(peers) + 1.7)
    size = {"width": width * ncols + 2.4, "height": height * nrows}
    shape = {"nrows": nrows, "ncols": ncols, "sharey": True}
    with house_figure(squeeze=False, **shape, **size) as (figure, grid):
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (titles, panel) in zip(grid.flat, panels):
            times = _by_tier(panel, "median_ms", kernels).reindex(tiers)
            ratios = times[peers].div(times[ours], axis=0)
            _draw_map(axes, ratios.T, _by_tier(panel, "status", peers).reindex(tiers).T)
            axes.set_title(", ".join(titles))
            axes.set(xlabel="queries × keys", ylabel=f"time over that of\n{ours}")
            # one label per row of panels
            axes.yaxis.label.set_visible(axes.get_subplotspec().is_first_col())
        return save_figure(figure, path)


def _draw_map(axes: Axes, ratios: pd.DataFrame, statuses: pd.DataFrame) -> None:
    """Draw a cell for each peer and length: the ratio of times, or why there is none."""
    # orange: the peer is faster; purple: ours is, at full strength from eight times on
    colors = np.log2(ratios.to_numpy())
    axes.imshow(colors, cmap="PuOr", norm=TwoSlopeNorm(0, -1, 3), aspect="auto")
    for (y, x), ratio in np.ndenumerate(ratios):
        # near 1 the second decimal says who is ahead
        digits = ".2f" if ratio < 2 else ".2g" if ratio < 100 else ".0f"
        status = statuses.fillna("").iloc[y, x]
        word = {"unsupported": "–", "ok": ""}.get(status, status)
        word = f"{ratio:{digits}}" if math.isfinite(ratio) else word
        is_dark = colors[y, x] > 1.6 or colors[y, x] < -0.7
        style = {"ha": "center", "va": "center", "fontsize": 9.5}
        axes.text(x, y, word, color="white" if is_dark else "#222222", **style)
    names = [f"{q:,}" if q == k else f"{q:,} × {k:,}" for q, k in ratios.columns]
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=9.5)
    axes.set_yticks(range(len(ratios)), ratios.index, fontsize=9.5)
    axes.grid(visible=False)


def save_scaling_figure(rows: Sequence[Row], path: str | os.PathLike) -> Path:
    """Draw time and memory against the length on log axes, for the first head_dim and mask."""
    frame = _squares(_sweep_frame(rows))
    frame = frame[frame["panel"] == frame["panel"].iloc[0]]
    kernels = frame["kernel"].unique()
    directions = frame.groupby("direction", sort=False)
    size = {"width": 10.0, "height": 3.6 * len(directions) + 0.8}
    with house_figure(nrows=len(directions), ncols=2, squeeze=False, **size) as (figure, grid):
        for pair, (direction, chosen) in zip(grid, directions):
            figures = (("median_ms", "time (ms)"), ("peak_memory_gb", "peak memory (GB)"))
            for axes, (key, label) in zip(pair, figures):
                _draw_growth(axes, _by_tier(chosen, key, kernels).sort_index())
                axes.set(xlabel="queries and keys, with tokens × heads the same", ylabel=label)
                axes.set_title(f"{direction}, {chosen['panel'].iloc[0]}")
        figure.legend(*grid[0, 0].get_legend_handles_labels(), ncols=4, loc="outside lower center")
        return save_figure(figure, path)


def _draw_growth(axes: Axes, figures: pd.DataFrame) -> None:
    """Draw a line for each column of figures by (queries, keys)."""
    axes.set(xscale="log", yscale="log")
    lengths = figures.index.get_level_values("queries")
    for kernel in figures:
        found = figures[kernel].notna().to_numpy()
        color, is_second = STYLES[kernel]
        # ours on top of the kernels that are as fast
        style: dict = {"color": color, "zorder": 3 if kernel in OURS else 2}
        style["marker"] = MARKERS[list(STYLES).index(kernel) % len(MARKERS)]
        line = "--" if is_second else "-"
        axes.plot(lengths[found], figures[kernel][found], line, label=kernel, **style)
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=30, ha="right", fontsize=9)
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.yaxis.set_major_formatter("{x:g}")
