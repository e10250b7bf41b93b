"""Pictures that a slider moves, and those of the model notebook: RoPE, the width of a head.

As in `lib.widgets`, some further pictures are hidden while the slider is alive and are shown where
nobody can move it.
"""

from __future__ import annotations

import base64
import functools
import html
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from lib.plots import BLACK, BLUE, GRID, PAPER, STYLE, VERMILLION, alt_text

if TYPE_CHECKING:
    from ipywidgets import SelectionSlider, VBox

# From the paper of the page to the house's blue, getting darker all the way.
SHADES = LinearSegmentedColormap.from_list("shades", [PAPER, "#8FC1E3", BLUE, "#00304D"])


def figure_slider(
    draw: Callable[[Figure, Any], None],
    values: Mapping[str, Any],
    *,
    description: str,
    still: Sequence[str] = (),
    width: float = 7.0,
    height: float = 3.0,
) -> VBox:
    """A slider above the figure of the value it points to; arrow keys move it.

    Args:
        draw: fills an empty figure for one of the values.
        values: what the slider reads -> what `draw` gets; the first comes first.
        still: the readings that are also shown where nobody can move the slider.
        width, height: of the figure, in inches.

    Raises:
        ValueError: there are no values, or `still` has a reading that is none of them.
    """

    def picture(name: str) -> dict[str, Any]:
        reading = f"{description} {name}"
        return draw_picture(lambda figure: draw(figure, values[name]), reading, width, height)

    return picture_slider(picture, list(values), description=description, still=still)


def picture_slider(
    picture: Callable[[str], dict[str, Any]],
    names: Sequence[str],
    *,
    description: str,
    still: Sequence[str] = (),
) -> VBox:
    """A slider over `names` above the picture of the one it points to; see `figure_slider`.

    Args:
        picture: name -> a notebook's output, from `picture_output`; asked for once.

    Raises:
        ValueError: there are no names, or `still` has one that is none of them.
    """
    import ipywidgets

    unknown = [name for name in still if name not in names]
    if not names or unknown:
        raise ValueError(f"still has {unknown}; right are some of: {', '.join(names)}")
    picture = functools.cache(picture)
    first = picture(names[0])
    slider = ipywidgets.SelectionSlider(
        options=list(names),
        description=description,
        style={"description_width": "initial"},
        layout=ipywidgets.Layout(width="min(100%, 40rem)"),
    )
    # as tall as the picture, so that what follows does not jump
    height = first["metadata"]["image/png"]["height"]
    view = ipywidgets.Output(layout=ipywidgets.Layout(min_height=f"{height}px"))
    view.outputs = (first,)

    def show(change: Mapping[str, Any]) -> None:
        view.outputs = (picture(change["new"]),)

    slider.observe(show, "value")
    others = ipywidgets.Output(layout=ipywidgets.Layout(display="none"))
    others.outputs = tuple(picture(name) for name in still if name != names[0])
    return ipywidgets.VBox([slider, view, others])


def choice_slider(description: str, options: Sequence[Any], value: Any) -> SelectionSlider:
    """A slider over `options`, for figures with several: it speaks once it is let go."""
    import ipywidgets

    return ipywidgets.SelectionSlider(
        options=list(options),
        value=value,
        description=description,
        continuous_update=False,
        style={"description_width": "7em"},
        layout=ipywidgets.Layout(width="min(100%, 34rem)"),
    )


def draw_picture(
    draw: Callable[[Figure], None],
    reading: str,
    width: float,
    height: float,
    *,
    dpi: int = 200,
    layout: str | None = None,
) -> dict[str, Any]:
    """What `draw` puts into an empty figure of the house style, as `picture_of` gives it.

    Args:
        width, height: in inches.
        layout: as for `matplotlib.figure.Figure`; "none" where axes stand in fixed places.
    """
    # by itself a figure is ready sooner than with axes to be taken away again
    with plt.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout=layout)
        draw(figure)
        return picture_of(figure, reading, dpi=dpi)


def picture_of(figure: Figure, reading: str, *, dpi: int = 200) -> dict[str, Any]:
    """The figure as a notebook's output, by default with twice the pixels of its size on the page.

    It follows a slider, and is hardly compressed. Its words begin with `reading`, where the slider
    stands.
    """
    figure.set_dpi(dpi)
    image = io.BytesIO()
    # `savefig` would draw it twice
    FigureCanvasAgg(figure).print_png(image, pil_kwargs={"compress_level": 1})
    size = (int(100 * inches) for inches in figure.get_size_inches())
    return picture_output(image.getvalue(), f"{reading}. {alt_text(figure)}", *size)


def picture_output(png: bytes, words: str, width: int, height: int) -> dict[str, Any]:
    """A picture as a notebook's output, with `words` for those who cannot see it.

    JupyterLab shows a PNG without its words, so it gets HTML that has them. What is stored does
    without (`lib.notebook_cells`).

    Args:
        width, height: on the page, in pixels.
    """
    encoded = base64.b64encode(png).decode()
    size = f'width="{width}" height="{height}" style="max-width:100%;height:auto"'
    markup = f'<img alt="{html.escape(words)}" {size} src="data:image/png;base64,{encoded}">'
    return {
        "output_type": "display_data",
        "data": {"image/png": encoded, "text/html": markup, "text/plain": words},
        "metadata": {"image/png": {"width": width, "height": height, "alt": words}},
    }


def rope_slider(*, distance: int = 5, head_dim: int = 8, theta: float = 100.0) -> VBox:
    """A key and a query some tokens later walk through a text; the slider says where they are.

    Each pair of coordinates turns at its own speed, and the angle between the two stays.
    """
    draw = functools.partial(draw_rotation, distance=distance, head_dim=head_dim, theta=theta)
    values = {str(position): position for position in range(33)}
    return figure_slider(
        draw, values, description="position of the key", still=("3", "20"), width=8.4, height=3.5
    )


def draw_rotation(
    figure: Figure, position: int, *, distance: int = 5, head_dim: int = 8, theta: float = 100.0
) -> None:
    """A circle for each pair of coordinates, with the key at `position` and the query behind it.

    Both start from the same random unit vector in each pair, so that all that parts them is how far
    they are turned.
    """
    num_pairs = head_dim // 2
    starts = np.random.default_rng(2).uniform(0, 2 * math.pi, num_pairs)
    all_axes = figure.subplots(ncols=num_pairs)
    scores = np.cos(distance * theta ** (-np.arange(num_pairs) / num_pairs))
    figure.suptitle(
        f"θ = {theta:g}, key at {position}, query at {position + distance}: "
        f"score {scores.sum():.3f}, whatever the position",
        x=0.01,
        ha="left",
        weight="bold",
    )
    for pair, axes in enumerate(all_axes):
        speed = theta ** (-pair / num_pairs)
        axes.add_patch(_circle())
        for name, place, color in (
            ("key", position, VERMILLION),
            ("query", position + distance, BLUE),
        ):
            angle = starts[pair] + place * speed
            tip = (math.cos(angle), math.sin(angle))
            style = {"arrowstyle": "-|>", "color": color, "linewidth": 2.2, "shrinkA": 0}
            axes.annotate("", tip, (0, 0), arrowprops=style | {"shrinkB": 0})
            axes.plot([], [], color=color, marker="", label=name)
        axes.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal", xticks=[], yticks=[])
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.set_title(f"pair {pair}", fontsize=11, loc="center")
        axes.set_xlabel(f"{speed:.3g} rad a token\npart of score {scores[pair]:.3f}", fontsize=10)
    names = all_axes[0].get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=2)


def _circle() -> Any:
    from matplotlib.patches import Circle

    return Circle((0, 0), 1, fill=False, color=GRID, linewidth=1.2)


def scale_slider(*, num_keys: int = 16) -> VBox:
    """What softmax makes of random scores, as heads get wider, with and without the scale."""
    values = {str(4**power): 4**power for power in range(1, 6)}
    draw = functools.partial(draw_scale, num_keys=num_keys)
    still = ("64", "1024")
    return figure_slider(draw, values, description="head_dim", still=still, height=2.9)


def draw_scale(figure: Figure, head_dim: int, *, num_keys: int = 16) -> None:
    """Bars of the attention that one random query pays to random keys of width `head_dim`."""
    generator = np.random.default_rng(0)
    query = generator.standard_normal(head_dim)
    scores = generator.standard_normal((num_keys, head_dim)) @ query
    all_axes = figure.subplots(ncols=2, sharey=True)
    titles = {"q · k": 1.0, "q · k / √head_dim": 1 / math.sqrt(head_dim)}
    for axes, color, (title, scale) in zip(all_axes, (VERMILLION, BLUE), titles.items()):
        exponentials = np.exp(scale * (scores - scores.max()))
        weights = np.sort(exponentials / exponentials.sum())[::-1]
        axes.bar(range(1, num_keys + 1), weights, color=color)
        axes.set(ylim=(0, 1.02), xlabel="key, largest weight first")
        axes.set_title(f"softmax of {title}", fontsize=11)
        text = f"head_dim {head_dim}\nlargest weight {weights[0]:.2f}"
        axes.text(0.97, 0.95, text, transform=axes.transAxes, ha="right", va="top", color=BLACK)
        axes.grid(visible=False, axis="x")
    all_axes[0].set_ylabel("attention weight")


def draw_pattern(axes: Axes, weights: np.ndarray, tokens: Sequence[str]) -> None:
    """Attention weights, (queries, keys), as a grid: each row says where a token looks."""
    image = axes.imshow(weights, cmap=SHADES, vmin=0, vmax=1)
    places = range(len(tokens))
    axes.set_xticks(places, tokens, rotation=90, family="monospace", fontsize=9)
    axes.set_yticks(places, tokens, family="monospace", fontsize=9)
    axes.set(xlabel="key: what is looked at", ylabel="query: who looks")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.6)
    bar.set_label("attention weight")
    bar.outline.set_visible(False)
