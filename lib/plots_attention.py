"""Figures of the attention benchmark: bars of speed, a map of ratios, growth with the length."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.ticker import LogLocator

from lib.plots import (
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

Row = Mapping[str, Any]

# The kernel that others are compared with: the first one that was measured.
OURS = ("flash_attention_triton", "flash_attention_torch")
# Relatives share a colour: the second of them is hatched, its line is dashed.
STYLES = {
    "flash_attention_triton": (VERMILLION, False),
    "flash_attention_torch": (VERMILLION, True),
    "scaled_dot_prod_attention": (BLACK, False),
    "vectorized_torch": (GREEN, False),
    "vectorized_torch_compiled": (GREEN, True),
    "sdpa": (BLUE, False),
    "sdpa_cudnn": (BLUE, True),
    "sdpa_flash": (SKY, False),
    "sdpa_efficient": (SKY, True),
    "sdpa_math": (ORANGE, False),
    "flex_attention": (PURPLE, False),
}
# Bars for so many lengths at most.
MOST_LENGTHS = 5


def attention_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each kernel of each record: its case, its figures, and where they come from."""
    rows = []
    for record in records:
        config, figures = record["config"], record["figures"]
        kernels = figures["kernels"]
        if figures["status"] != "ok":
            kernels = {kernel: {"status": figures["status"]} for kernel in config["kernels"]}
        frame = {key: value for key, value in config.items() if key != "kernels"}
        mask = "causal" if config["is_causal"] else "full"
        frame |= {"mask": mask, "case": case_name(config), "flops": figures["flops"]}
        for kernel, measured in kernels.items():
            memory = measured.get("peak_memory_bytes")
            row = {**frame, "kernel": kernel, "median_ms": None, **measured}
            row["peak_memory_gb"] = None if memory is None else memory / 1e9
            row |= {key: record.get(key) for key in ("device", "commit", "date")}
            rows.append(row)
    return rows


def case_name(config: Mapping[str, Any]) -> str:
    """A case in words."""
    return (
        f"{config['direction']}, {'causal' if config['is_causal'] else 'full'}, "
        f"{config['queries']:,} × {config['keys']:,}, head_dim {config['head_dim']}, "
        f"{config['dtype']}, {config['batch_size']} × {config['heads']} heads"
    )


def save_forward_figure(rows: Sequence[Row], path: str | os.PathLike) -> Path:
    """Bars of TFLOP/s forward, a panel for each width of a head and mask, for a few lengths."""
    rows = main_rows([row for row in rows if row["direction"] == "forward"])
    rows = of_those_that_run(rows)
    panels = panel_keys(rows)
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    size = {"width": 11.0, "height": 3.2 * len(panels) + 0.6}
    with house_figure(nrows=len(panels), squeeze=False, **size) as (figure, grid):
        for axes, panel in zip(grid[:, 0], panels):
            chosen = [row for row in rows if panel_key(row) == panel]
            lengths = sorted({row["queries"] for row in chosen if is_square(row)})
            lengths = lengths or sorted({row["queries"] for row in chosen})
            step = max(1, math.ceil(len(lengths) / MOST_LENGTHS))
            _draw_bars(axes, chosen, lengths[::-1][::step][::-1], kernels)
            axes.set(title=panel_title(panel), xlabel="queries × keys", ylabel="speed (TFLOP/s)")
        figure.legend(*grid[0, 0].get_legend_handles_labels(), ncols=4, loc="outside lower center")
        return save_figure(figure, path)


def _draw_bars(
    axes: Axes, rows: Sequence[Row], lengths: Sequence[int], kernels: Sequence[str]
) -> None:
    """Groups of bars, one for each kernel; a word where there is no time."""
    tiers = [
        tier
        for tier in dict.fromkeys((row["queries"], row["keys"]) for row in rows)
        if tier[0] in lengths and (tier[0] == tier[1] or not any(map(is_square, rows)))
    ]
    width = 0.85 / len(kernels)
    for place, kernel in enumerate(kernels):
        found = {(row["queries"], row["keys"]): row for row in rows if row["kernel"] == kernel}
        x = [i + (place - (len(kernels) - 1) / 2) * width for i in range(len(tiers))]
        speeds = [found.get(tier, {}).get("tflops") or 0 for tier in tiers]
        color, is_second = STYLES[kernel]
        style = {"color": color, "hatch": "///" * is_second, "edgecolor": "white"}
        axes.bar(x, speeds, width, label=kernel, linewidth=0.3, **style)
        for at, tier in zip(x, tiers):
            status = found.get(tier, {}).get("status", "ok")
            if status != "ok":
                axes.text(at, 0, f" {status}", rotation=90, ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(tiers)), [f"{q:,} × {k:,}" for q, k in tiers])
    axes.grid(visible=False, axis="x")


def save_heatmap_figure(rows: Sequence[Row], path: str | os.PathLike) -> Path:
    """How many times faster our kernel is than each other one, by length; a panel a setting."""
    rows = of_those_that_run(main_rows(rows))
    ours = next((k for k in OURS if any(row["kernel"] == k for row in rows)), rows[0]["kernel"])
    panels = list(dict.fromkeys((row["direction"], *panel_key(row)) for row in rows))
    tiers = list(dict.fromkeys((row["queries"], row["keys"]) for row in rows))
    peers = list(dict.fromkeys(row["kernel"] for row in rows if row["kernel"] != ours)) or [ours]
    columns = min(2, len(panels))
    height = (0.36 * len(peers) + 1.7) * math.ceil(len(panels) / columns)
    size = {"width": 0.5 * len(tiers) * columns + 2.4, "height": height}
    grid_shape = {"nrows": math.ceil(len(panels) / columns), "ncols": columns, "sharey": True}
    with house_figure(squeeze=False, **grid_shape, **size) as (figure, grid):
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, panel in zip(grid.flat, panels):
            chosen = [row for row in rows if (row["direction"], *panel_key(row)) == panel]
            _draw_map(axes, chosen, ours, peers, tiers)
            axes.set_title(f"{panel[0]}, {panel_title(panel[1:])}")
            axes.set(xlabel="queries × keys", ylabel=f"time over that of\n{ours}")
            # the first of a row speaks for the others
            axes.yaxis.label.set_visible(axes.get_subplotspec().is_first_col())
        return save_figure(figure, path)


def _draw_map(
    axes: Axes, rows: Sequence[Row], ours: str, peers: Sequence[str], tiers: Sequence[tuple]
) -> None:
    """A cell for each peer and length: the ratio, or why there is none."""
    found = {(row["kernel"], row["queries"], row["keys"]): row for row in rows}
    colors, words = [], []
    for peer in peers:
        colors.append([])
        words.append([])
        for tier in tiers:
            row, own = found.get((peer, *tier), {}), found.get((ours, *tier), {})
            has_ratio = row.get("median_ms") and own.get("median_ms")
            ratio = row["median_ms"] / own["median_ms"] if has_ratio else math.nan
            colors[-1].append(math.log2(ratio) if has_ratio else math.nan)
            status = {"unsupported": "–", None: ""}.get(row.get("status"), row.get("status"))
            # near 1 the second decimal says who is ahead
            digits = ".2f" if ratio < 2 else ".2g" if ratio < 100 else ".0f"
            words[-1].append(f"{ratio:{digits}}")
            if not has_ratio:
                words[-1][-1] = "" if status == "ok" else status
    # orange: the peer is faster; purple: ours is; beyond eight times as fast no darker
    norm = TwoSlopeNorm(0, -1, 3)
    axes.imshow(colors, cmap="PuOr", norm=norm, aspect="auto")
    for y, line in enumerate(words):
        for x, word in enumerate(line):
            value = colors[y][x]
            is_dark = math.isfinite(value) and (value > 1.6 or value < -0.7)
            style = {"ha": "center", "va": "center", "fontsize": 9.5}
            axes.text(x, y, word, color="white" if is_dark else "#222222", **style)
    names = [f"{q:,}" if q == k else f"{q:,} × {k:,}" for q, k in tiers]
    axes.set_xticks(range(len(tiers)), names, rotation=45, ha="right", fontsize=9.5)
    axes.set_yticks(range(len(peers)), peers, fontsize=9.5)
    axes.grid(visible=False)


def save_scaling_figure(rows: Sequence[Row], path: str | os.PathLike) -> Path:
    """Time and memory against the length on logarithmic axes, for one width of a head and mask."""
    rows = of_those_that_run(main_rows(rows))
    squares = [row for row in rows if is_square(row)] or rows
    panel = panel_keys(squares)[0]
    rows = [row for row in squares if panel_key(row) == panel]
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    size = {"width": 10.0, "height": 3.6 * len(directions) + 0.8}
    with house_figure(nrows=len(directions), ncols=2, squeeze=False, **size) as (figure, grid):
        for pair, direction in zip(grid, directions):
            chosen = [row for row in rows if row["direction"] == direction]
            figures = (("median_ms", "time (ms)"), ("peak_memory_gb", "peak memory (GB)"))
            for axes, (key, label) in zip(pair, figures):
                _draw_growth(axes, chosen, kernels, key)
                axes.set(xlabel="queries and keys, with tokens × heads the same", ylabel=label)
                axes.set_title(f"{direction}, {panel_title(panel)}")
        figure.legend(*grid[0, 0].get_legend_handles_labels(), ncols=4, loc="outside lower center")
        return save_figure(figure, path)


def _draw_growth(axes: Axes, rows: Sequence[Row], kernels: Sequence[str], key: str) -> None:
    """A line for each kernel that has the figure `key`."""
    axes.set(xscale="log", yscale="log")
    for kernel in kernels:
        chosen = [row for row in rows if row["kernel"] == kernel and row.get(key)]
        points = sorted((row["queries"], row[key]) for row in chosen)
        color, is_second = STYLES[kernel]
        # ours lies on top of those that are as fast
        style = {"color": color, "zorder": 3 if kernel in OURS else 2}
        style["marker"] = MARKERS[list(STYLES).index(kernel) % len(MARKERS)]
        line = "--" if is_second else "-"
        axes.plot(*(zip(*points) if points else ([], [])), line, label=kernel, **style)
    lengths = sorted({row["queries"] for row in rows})
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=30, ha="right", fontsize=9)
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.yaxis.set_major_formatter("{x:g}")


def main_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of the sweep: of the dtype and of tokens × heads that most of them have."""
    common = {}
    for row in rows:
        common[sweep_key(row)] = common.get(sweep_key(row), 0) + 1
    most = max(common, key=common.get)
    return [row for row in rows if sweep_key(row) == most]


def of_those_that_run(rows: Sequence[Row]) -> list[Row]:
    """Without the kernels that are unsupported wherever they were tried."""
    kernels = {row["kernel"] for row in rows if row["status"] != "unsupported"}
    return [row for row in rows if row["kernel"] in kernels]


def sweep_key(row: Row) -> tuple:
    """What all cases of a sweep share: dtype, and tokens × heads × head_dim."""
    longest = max(row["queries"], row["keys"])
    return row["dtype"], row["batch_size"] * row["heads"] * row["head_dim"] * longest


def panel_key(row: Row) -> tuple[int, str]:
    """What a panel is about."""
    return row["head_dim"], row["mask"]


def panel_keys(rows: Sequence[Row]) -> list[tuple[int, str]]:
    """The panels, in the order measured."""
    return list(dict.fromkeys(map(panel_key, rows)))


def panel_title(panel: Sequence[Any]) -> str:
    """Its words."""
    return f"head_dim {panel[0]}, {panel[1]}"


def is_square(row: Row) -> bool:
    """Whether there are as many queries as keys."""
    return row["queries"] == row["keys"]
