"""`explorer`: sliders above an output that follows them, with stills for pages without Python.

In a running notebook the output is redrawn whenever a slider moves. Committed notebooks and reports
have no Python behind them: there `lib.tools.publish.cells` shows the output of the last setting and
the `still` ones, which are hidden while the sliders work.
"""

from __future__ import annotations

import base64
import functools
import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib import pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lib.core.figures import STYLE, alt_text

if TYPE_CHECKING:
    from ipywidgets import DOMWidget, VBox

    Output = dict[str, Any]


def explorer(
    show: Callable[..., Output],
    *,
    start: Mapping[str, Any] | None = None,
    still: Sequence[tuple] = (),
    busy: str = "",
    min_height: str = "20em",
    **controls: Any,
) -> VBox:
    """Controls above the output of `show`, which is called again whenever one of them changes.

    Args:
        show: called with the controls' values by name; returns a notebook output, as `picture` and
            `markup` make it.
        start: values shown first, by name; by default the first option of each control.
        still: further settings, one value for each control in order, shown where nobody can move
            the sliders.
        busy: text beside the controls while `show` runs, if it takes long.
        min_height: of the output, so that the page does not jump while it changes.
        controls: name, which is also the label -> the options of a slider (a sequence, or a mapping
            from label to value), or any ipywidget with a value.

    Raises:
        ValueError: a control has no options.
    """
    import ipywidgets

    is_alone = len(controls) == 1
    widgets = {
        name: given if isinstance(given, ipywidgets.DOMWidget) else _slider(name, given, is_alone)
        for name, given in controls.items()
    }
    for name, value in (start or {}).items():
        widgets[name].value = value

    def setting() -> tuple:
        return tuple(widget.value for widget in widgets.values())

    def output(values: Sequence[Any]) -> Output:
        return show(**dict(zip(widgets, values, strict=True)))

    note, view = ipywidgets.Label(), ipywidgets.Output(layout={"min_height": min_height})

    def update(change: Any = None) -> None:
        note.value = busy
        view.outputs = (output(setting()),)
        note.value = ""

    stills = ipywidgets.Output(layout={"display": "none"})
    stills.outputs = tuple(output(values) for values in still if values != setting())
    update()
    for widget in widgets.values():
        widget.observe(update, "value")
    return ipywidgets.VBox([*widgets.values(), *([note] if busy else []), view, stills])


def _slider(name: str, options: Any, is_alone: bool) -> DOMWidget:
    """A slider over `options`; one of several reports its value only once it is let go."""
    import ipywidgets

    options = list(options.items()) if isinstance(options, Mapping) else list(options)
    if not options:
        raise ValueError(f"{name} must have at least one option, got none")
    return ipywidgets.SelectionSlider(
        options=options,
        description=name,
        continuous_update=is_alone,
        style={"description_width": "initial" if is_alone else "7em"},
        layout={"width": "min(100%, 40rem)"},
    )


def picture(
    draw: Callable[..., None],
    *,
    width: float = 7.0,
    height: float = 3.0,
    words: Callable[..., str] | None = None,
) -> Callable[..., Output]:
    """A `show` for `explorer` that draws each setting once.

    Args:
        draw: called as `draw(figure, **values)` with an empty figure in the house style.
        width, height: in inches.
        words: called as `words(**values)`: what the picture shows, for readers who cannot see it
            (default: the values, and `lib.core.figures.alt_text`).
    """

    @functools.lru_cache(maxsize=128)
    def show(**values: Any) -> Output:
        # faster than a figure from pyplot
        with plt.rc_context(STYLE):
            figure = Figure(figsize=(width, height))
            draw(figure, **values)
            reading = ", ".join(f"{name} {x}" for name, x in values.items())
            alt = words(**values) if words else f"{reading}. {alt_text(figure)}"
            return figure_output(figure, alt)

    return show


def figure_output(figure: Figure, words: str) -> Output:
    """The figure as a notebook output, with `words` as its alternative text.

    JupyterLab shows a PNG without alternative text, so the output also has HTML with it, which
    `lib.tools.publish.cells` leaves out of what is stored.
    """
    # 1.6 times the pixels that it has on the page, as in saved figures
    figure.set_dpi(160)
    image = io.BytesIO()
    # `savefig` would draw it twice; compressed lightly, since it follows a slider
    FigureCanvasAgg(figure).print_png(image, pil_kwargs={"compress_level": 1})
    width, height = (int(100 * inches) for inches in figure.get_size_inches())
    encoded = base64.b64encode(image.getvalue()).decode()
    size = f'width="{width}" height="{height}" style="max-width:100%;height:auto"'
    tag = f'<img alt="{html.escape(words)}" {size} src="data:image/png;base64,{encoded}">'
    return {
        "output_type": "display_data",
        "data": {"image/png": encoded, "text/html": tag, "text/plain": words},
        "metadata": {"image/png": {"width": width, "height": height, "alt": words}},
    }


def markup(html_text: str, words: str) -> Output:
    """HTML as a notebook output, with `words` for programs that show only plain text."""
    data = {"text/html": html_text, "text/plain": words}
    return {"output_type": "display_data", "data": data, "metadata": {}}
