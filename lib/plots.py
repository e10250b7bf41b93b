"""The house style of figures, and their way to disk. Figures are drawn from records alone.

The background is opaque, so that a figure reads the same on a light and on a dark page. Colours are
Okabe and Ito's (2008), told apart with any colour vision; series also differ in their markers.
"""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lib.files import write_atomically

BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK = "#E69F00", "#56B4E9", "#222222"
COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PAPER, INK, GRID, GREY = "#FBFAF7", "#222222", "#D9D6CF", "#BBB6A8"

STYLE = {
    "figure.figsize": (7.0, 4.0),
    "figure.dpi": 100,
    "figure.facecolor": PAPER,
    "figure.constrained_layout.use": True,
    # twice the size on the page, for screens with twice the pixels
    "savefig.dpi": 200,
    "savefig.facecolor": PAPER,
    "savefig.transparent": False,
    "axes.facecolor": PAPER,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    # logarithmic axes say 0.1, 1, 10 and 100 in plain digits
    "axes.formatter.min_exponent": 4,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=COLORS) + cycler(marker=MARKERS),
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 11,
    "legend.frameon": False,
    # labels stay text, and the same figure gives the same file
    "svg.fonttype": "none",
    "svg.hashsalt": "lib",
}


def use_house_style() -> None:
    """Draw every figure from here on in the house style; for a notebook's first cell."""
    plt.rcParams.update(STYLE)


@contextmanager
def house_figure(*, width: float = 7.0, height: float = 4.0, **subplots) -> Iterator[tuple]:
    """A figure in the house style, whatever the surrounding settings; closed at the end.

    Args:
        width, height: in inches.
        subplots: for `matplotlib.pyplot.subplots`, such as `ncols=2`.

    Yields:
        The figure and its axes: one, or an array of them.

    Example:
        >>> with house_figure() as (figure, axes):
        ...     axes.plot([1, 2, 4], label="tokens")
        ...     save_figure(figure, "artifacts/example.png")
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(width, height), **subplots)
        try:
            yield figure, axes
        finally:
            plt.close(figure)


def save_figure(figure: Figure, path: str | os.PathLike, *, alt: str | None = None) -> Path:
    """Write `figure` to `path` (its ending says the format: .png, .svg), whole or not at all.

    Args:
        alt: what the figure shows, for those who cannot see it; kept in the file as its
            description. By default `alt_text(figure)`.

    Raises:
        ValueError: an axis has no label, or the ending is not .png or .svg.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"path is {str(path)!r}; right: a name that ends in .png or .svg")
    for axes in _data_axes(figure):
        for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
            if axis.get_visible() and len(axis.get_ticklocs()) and not axis.get_label_text():
                title = axes.get_title(loc="left") or path.name
                raise ValueError(f"the {name} axis of {title!r} has no label; right: name (unit)")
    # without the date and the version, the same figure gives the same file
    metadata = {"Description": alt or alt_text(figure)}
    metadata |= {"Software": None} if path.suffix == ".png" else {"Date": None}
    image = io.BytesIO()
    with plt.rc_context(STYLE):
        figure.savefig(image, format=path.suffix[1:], metadata=metadata)
    write_atomically(path, image.getvalue())
    return path


def alt_text(figure: Figure) -> str:
    """What `figure` shows, in words: titles, axes and the names of the series."""
    sentences = [f"{title}."] if (title := figure.get_suptitle()) else []
    for axes in _data_axes(figure):
        title = axes.get_title(loc="left") or axes.get_title()
        series = [label for label in axes.get_legend_handles_labels()[1] if label]
        sentence = " against ".join(filter(None, (axes.get_ylabel(), axes.get_xlabel())))
        sentence = f"{title}: {sentence}" if title else sentence
        sentences.append(sentence + (f", for {', '.join(series)}." if series else "."))
    return " ".join(sentences).replace("\n", ", ")


def describe_figures(formatter: Any) -> None:
    """Let `formatter`, which is IPython's of image/png, add `alt_text` to each figure it shows."""
    draw = formatter.lookup_by_type(Figure)

    def described(figure: Figure) -> tuple | None:
        picture = draw(figure)
        if picture is None:
            return None
        data, metadata = picture if isinstance(picture, tuple) else (picture, {})
        return data, metadata | {"alt": alt_text(figure)}

    formatter.for_type(Figure, described)


def _data_axes(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_visible() and axes.axison]


TOKENIZER_TASKS = {"train": "Training, all cores", "encode": "Encoding, one core"}


def save_tokenizer_figure(records: Sequence[Mapping[str, Any]], path: str | os.PathLike) -> Path:
    """Bars of MB/s from records of `python -m lib benchmark tokenizer`, a panel for each text."""
    rows = [record["figures"] for record in records]
    rows = [row for row in rows if row["task"] in TOKENIZER_TASKS]
    first_size = min(row["vocab_size"] for row in rows)
    rows = [row for row in rows if row["vocab_size"] == first_size]
    texts = list(dict.fromkeys(row["text"] for row in rows))
    size = {"width": 5.2 * len(texts), "height": 6.4}
    with house_figure(nrows=2, ncols=len(texts), squeeze=False, sharex="row", **size) as (
        figure,
        grid,
    ):
        for axes_of_task, (task, title) in zip(grid, TOKENIZER_TASKS.items()):
            for axes, text in zip(axes_of_task, texts):
                chosen = [row for row in rows if (row["task"], row["text"]) == (task, text)]
                chosen.sort(key=lambda row: row["MB_per_s"])
                is_ours = [row["candidate"] in ("numba", "python") for row in chosen]
                bars = axes.barh(
                    [row["candidate"] for row in chosen],
                    [row["MB_per_s"] for row in chosen],
                    color=[BLUE if ours else ORANGE for ours in is_ours],
                )
                axes.bar_label(bars, fmt="%.3g", padding=3)
                axes.set(title=f"{title}\n{text}", xlabel="throughput (MB/s)")
                axes.set_ylabel("candidate")
                axes.grid(visible=False, axis="y")
                axes.margins(x=0.15)
        return save_figure(figure, path)


def save_training_figure(records: Sequence[Mapping[str, Any]], path: str | os.PathLike) -> Path:
    """Bars of tokens/s from records of `python -m lib benchmark training`, a panel a model."""
    rows = [record["figures"] for record in records]
    models = list(dict.fromkeys(row["model"] for row in rows))
    size = {"width": 8.0, "height": 2.6 * len(models)}
    with house_figure(nrows=len(models), squeeze=False, **size) as (figure, grid):
        for axes, name in zip(grid[:, 0], models):
            chosen = [row for row in rows if row["model"] == name][::-1]
            colors = {"all": BLUE, "nanoGPT-style": ORANGE}
            bars = axes.barh(
                [row["candidate"] for row in chosen],
                [row["tokens_per_s"] / 1e3 for row in chosen],
                color=[colors.get(row["candidate"], SKY) for row in chosen],
            )
            axes.bar_label(bars, fmt="{:,.0f}", padding=3)
            axes.set(title=name, xlabel="training speed (1,000 tokens/s)", ylabel="candidate")
            axes.grid(visible=False, axis="y")
            axes.margins(x=0.12)
        return save_figure(figure, path)


STEP_MODES = {"forward": "forward", "forward_backward": "with backward", "full_step": "with update"}


def save_step_figure(records: Sequence[Mapping[str, Any]], path: str | os.PathLike) -> Path:
    """Time and memory from records of `python -m lib benchmark step`, a column for each precision.

    Above, milliseconds a step by model and mode at the longest context; below, the peak memory of
    the most complete mode against the context, with the prediction as a dotted line. Of several
    batch sizes, the one measured last.
    """
    newest = max(records, key=lambda record: record["date"])["config"]
    records = [r for r in records if r["config"]["batch_size"] == newest["batch_size"]]
    variants = list(dict.fromkeys(_step_variant(record) for record in records))
    models = list(dict.fromkeys(record["config"]["model"] for record in records))
    present = {record["config"]["mode"] for record in records}
    modes = [mode for mode in STEP_MODES if mode in present]
    longest = max(record["config"]["seq_len"] for record in records)
    size = {"width": 3.6 * len(variants) + 0.6, "height": 7.4}
    with house_figure(nrows=2, ncols=len(variants), squeeze=False, sharey="row", **size) as (
        figure,
        grid,
    ):
        for column, variant in enumerate(variants):
            chosen = [record for record in records if _step_variant(record) == variant]
            at_longest = [r for r in chosen if r["config"]["seq_len"] == longest]
            _draw_step_times(grid[0, column], at_longest, models, modes)
            grid[0, column].set(title=variant, xlabel=f"model, {longest:,} tokens")
            of_mode = [r for r in chosen if r["config"]["mode"] == modes[-1]]
            _draw_step_memory(grid[1, column], of_mode, models)
            title = f"memory, {modes[-1].replace('_', ' ')}"
            grid[1, column].set(title=title, xlabel="context length (tokens)")
            grid[0, column].set_ylabel("time a step (ms)")
            grid[1, column].set_ylabel("peak memory (GB)")
        # not before all lines are there: the axis would not grow with the later ones
        grid[1, 0].set_ylim(bottom=0)
        for row in grid:
            # a column may lack what the others have
            fullest = max(row, key=lambda axes: len(axes.get_legend_handles_labels()[1]))
            if fullest.get_legend_handles_labels()[1]:
                fullest.legend(fontsize="small")
        return save_figure(figure, path)


def step_precision(config: Mapping[str, Any]) -> str:
    """The type that the matrix products of a step were in."""
    is_tf32 = config["tf32"] and config["dtype"] == "float32"
    return "TF32" if is_tf32 else config["dtype"]


def _step_variant(record: Mapping[str, Any]) -> str:
    config = record["config"]
    how = "compiled" if config["compile"] else "eager"
    return f"{step_precision(config)}, {how}\n{config['attention_kernel']}"


def _draw_step_times(axes: Axes, records: Sequence, models: Sequence, modes: Sequence) -> None:
    """A point for each model and mode; `oom` where memory ran out."""
    axes.set(yscale="log", xlim=(-0.6, len(models) - 0.4))
    for place, mode in enumerate(modes):
        rows = {r["config"]["model"]: r["figures"] for r in records if r["config"]["mode"] == mode}
        offset = (place - (len(modes) - 1) / 2) * 0.25
        points = [(x + offset, rows.get(name, {})) for x, name in enumerate(models)]
        timed = [(x, row["median_ms"]) for x, row in points if row.get("median_ms")]
        style = {"color": COLORS[place], "marker": MARKERS[place]}
        axes.plot(
            *(zip(*timed) if timed else ([], [])), linestyle="", label=STEP_MODES[mode], **style
        )
        for x, row in points:
            if row.get("status") == "oom":
                where = {"transform": axes.get_xaxis_transform(), "ha": "center", "rotation": 90}
                axes.text(x, 0.02, "oom", color=COLORS[place], fontsize="small", **where)
    axes.set_xticks(range(len(models)), models)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(visible=False, axis="x")


def _draw_step_memory(axes: Axes, records: Sequence, models: Sequence) -> None:
    """A line for each model, and dotted what was predicted."""
    for place, name in enumerate(models):
        rows = sorted(
            (r["config"]["seq_len"], r["figures"]) for r in records if r["config"]["model"] == name
        )
        style = {"color": COLORS[place % len(COLORS)], "marker": MARKERS[place % len(MARKERS)]}
        for key, line in (("peak_memory_gb", "-"), ("predicted_memory_gb", ":")):
            points = [(x, row[key]) for x, row in rows if row.get(key) is not None]
            if points:
                axes.plot(*zip(*points), line, label=name, **style)
                style |= {"marker": "", "alpha": 0.8}
                name = None
    axes.set_xscale("log")
    lengths = sorted({r["config"]["seq_len"] for r in records})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
