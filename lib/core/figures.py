"""The house style of figures: drawing in it, and saving with a description.

The background is opaque, so that a figure reads the same on light and dark pages. The colors are
those of Okabe and Ito (2008), distinct under any color vision; series also differ by marker.
"""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.figure import Figure

from lib.core.files import write_atomically
from lib.core.png import in_palette

BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK = "#E69F00", "#56B4E9", "#222222"
COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PAPER, INK, GRID, GRAY = "#FBFAF7", "#222222", "#D9D6CF", "#BBB6A8"
STYLE = {
    "figure.figsize": (7.0, 4.0),
    "figure.dpi": 100,
    "figure.facecolor": PAPER,
    "figure.constrained_layout.use": True,
    # 1.5 times the size shown: sharp on high-density screens, and small
    "savefig.dpi": 150,
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
    # logarithmic axes show 0.1, 1, 10 and 100 in plain digits
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
    # labels stay text, and the same figure gives the same bytes
    "svg.fonttype": "none",
    "svg.hashsalt": "lib",
}


def use_house_style() -> None:
    """Draw all further figures in the house style; for a notebook's first cell."""
    plt.rcParams.update(STYLE)


@contextmanager
def house_figure(*, width: float = 7.0, height: float = 4.0, **subplots) -> Iterator[tuple]:
    """Yield a figure in the house style and its axes (one or an array); close it at the end.

    Args:
        width, height: in inches.
        subplots: for `matplotlib.pyplot.subplots`, such as `ncols=2`.

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


def save_figure(figure: Figure, path: str | os.PathLike) -> Path:
    """Write `figure` with its `alt_text` to a .png or .svg file, whole or not at all.

    Raises:
        ValueError: `path` does not end in .png or .svg.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"path must end in .png or .svg, got {str(path)!r}")
    # without date and version, the same figure gives the same bytes
    metadata = {"Description": alt_text(figure)}
    metadata |= {"Software": None} if path.suffix == ".png" else {"Date": None}
    image = io.BytesIO()
    with plt.rc_context(STYLE):
        figure.savefig(image, format=path.suffix[1:], metadata=metadata)
    content = image.getvalue()
    write_atomically(path, in_palette(content) if path.suffix == ".png" else content)
    return path


def alt_text(figure: Figure) -> str:
    """Describe `figure` in words: titles, axes and the names of the series."""
    sentences = [f"{title}."] if (title := figure.get_suptitle()) else []
    for axes in (axes for axes in figure.axes if axes.get_visible() and axes.axison):
        title = axes.get_title(loc="left") or axes.get_title()
        series = [label for label in axes.get_legend_handles_labels()[1] if label]
        if not series and axes.get_legend():
            series = [text.get_text() for text in axes.get_legend().get_texts()]
        words = [" against ".join(filter(None, (axes.get_ylabel(), axes.get_xlabel())))]
        words.append(f"for {', '.join(series)}" if series else "")
        sentence = ", ".join(filter(None, words))
        sentences.append(": ".join(filter(None, (title, sentence))) + ".")
    return " ".join(sentences).replace("\n", ", ")


def describe_figures(formatter: Any) -> None:
    """Make `formatter`, IPython's for image/png, add `alt_text` to each figure it shows."""
    draw = formatter.lookup_by_type(Figure)

    def draw_with_alt(figure: Figure) -> tuple | None:
        image = draw(figure)
        if image is None:
            return None
        data, metadata = image if isinstance(image, tuple) else (image, {})
        return data, metadata | {"alt": alt_text(figure)}

    formatter.for_type(Figure, draw_with_alt)
