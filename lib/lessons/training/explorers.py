"""Figures of notebook 03: a loss curve that grows during a run, sliders for sampling."""

from __future__ import annotations

import html
import io
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lib.core import figures
from lib.core.charts import lines
from lib.lessons.explorer import explorer, markup
from lib.lessons.show import visible
from lib.training.generation import next_token_probabilities

if TYPE_CHECKING:
    from IPython.display import Image, Markdown
    from ipywidgets import VBox

    from lib.tokenizer.bpe import Tokenizer


# Drawing takes at most this share of the time, and there is at most one figure per second.
DRAWING_SHARE = 0.03
SECONDS_APART = 1.0
# Key of a line of metrics -> its name and style in a figure.
SERIES = {
    "loss": ("training", {"marker": "", "color": figures.BLUE}),
    "validation_loss": ("validation", {"linestyle": "--", "color": figures.VERMILLION}),
}
COLUMNS = "grid-template-columns:6.5em minmax(4em,12em) 4em"  # narrower bars on a phone
ROW = f"display:grid;{COLUMNS};align-items:center;gap:.5em;height:1.45em"
TOKEN = "text-align:right;font:13px ui-monospace,monospace;white-space:pre;overflow:hidden"
BAR = f"height:.95em;box-sizing:border-box;border:1px solid {figures.BLUE};min-width:1px;width:"
# Temperature and top-p shown where nobody can move the sliders. The last two
# cut within the few bars that fit, so that some are hollow.
STILL_SETTINGS = ((0.0, 1.0), (2.0, 1.0), (1.0, 0.9), (1.0, 0.65), (2.0, 0.1))


class LossCurve:
    """A figure of the losses, redrawn in place during a run.

    Before the first loss there is a line of text. The last drawing stays, also in a stored notebook
    and when the run is stopped.

    Args:
        steps: of the whole run.
        records: lines of metrics of an earlier part of the run.
        references: name -> a loss to compare with, drawn as a horizontal line.

    Example:
        with LossCurve(config.steps) as curve:
            train(config, on_metrics=curve)
    """

    def __init__(
        self,
        steps: int,
        *,
        records: Iterable[Mapping[str, Any]] = (),
        references: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.steps, self.records, self.references = steps, list(records), references or {}
        self.clock = clock

    def __enter__(self) -> LossCurve:
        from IPython.display import display

        self.handle = display(self.picture(), display_id=True)
        self.next_drawing = self.clock()
        return self

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Add a line of metrics; draw if the last drawing is old enough."""
        # a resumed run repeats the steps after its checkpoint
        kept = [
            old
            for old in self.records
            if old["step"] < record["step"] or old.keys() != record.keys()
        ]
        self.records = [*kept, record]
        started = self.clock()
        if started >= self.next_drawing:
            self._show()
            now = self.clock()
            self.next_drawing = now + max(SECONDS_APART, (now - started) / DRAWING_SHARE)

    def __exit__(self, *error: object) -> None:
        self._show()

    def _show(self) -> None:
        if self.handle is not None:
            self.handle.update(self.picture())

    def picture(self) -> Image | Markdown:
        """The current figure; a line of text before the first loss."""
        from IPython.display import Image, Markdown

        if not any(key in record for record in self.records for key in SERIES):
            return Markdown("*No loss yet.*")
        file = io.BytesIO()
        with figures.house_figure(width=7.0, height=3.6) as (figure, axes):
            draw_losses(axes, self.records, self.steps, self.references)
            figure.savefig(file, format="png")
            alt = figures.alt_text(figure)
        return Image(file.getvalue(), format="png", retina=True, alt=alt)


def draw_losses(
    axes: Any,
    records: Iterable[Mapping[str, Any]],
    steps: int,
    references: Mapping[str, float] | None = None,
) -> None:
    """Training and validation loss of metrics `records` against steps, on matplotlib's `axes`."""
    records = list(records)
    found = {
        name: {record["step"]: record[key] for record in records if key in record}
        for key, (name, _) in SERIES.items()
    }
    lines(
        {name: points for name, points in found.items() if points},
        axes=axes,
        title="Loss",
        xlabel="step",
        ylabel="loss (nats per token)",
        levels=references,
        styles=dict(SERIES.values()),
        legend="upper right",
    )
    axes.set_xlim(0, steps)


def sampling_bars(
    logits: Tensor, tokenizer: Tokenizer, temperature: float, top_p: float, *, num_bars: int = 12
) -> str:
    """HTML bars of the likeliest next tokens' probabilities, hollow where top-p cuts.

    Args:
        logits: (vocab,).
        num_bars: tokens shown.
    """
    before = next_token_probabilities(logits, temperature)
    after = next_token_probabilities(logits, temperature, top_p=top_p)
    # by the logits, since at low temperatures many probabilities are 0 alike
    ids = logits.topk(min(num_bars, len(logits))).indices
    rows = []
    for token_id, probability in zip(ids.tolist(), before[ids].tolist()):
        kept = after[token_id].item()
        # ids beyond the tokenizer's only pad the embedding
        token = tokenizer.vocab.get(token_id, b"")
        fill = f";background:{figures.BLUE}" if kept else ""
        rows.append(
            f'<div style="{ROW}"><span style="{TOKEN}">{html.escape(visible(token))}</span>'
            f'<span style="{BAR}{100 * (kept or probability):.2f}%{fill}"></span>'
            f"<span>{f'{kept:.1%}' if kept else 'cut'}</span></div>"
        )
    count = int((after > 0).sum())
    caption = f"Temperature {temperature:g}, top-p {top_p:g}: {count:,} of {len(before):,} tokens"
    return f'<div style="margin:0 0 1em"><div>{caption}</div>{"".join(rows)}</div>'


def sampling_sliders(logits: Tensor, tokenizer: Tokenizer) -> VBox:
    """Sliders for temperature and top-p above the bars of `sampling_bars`."""
    import ipywidgets

    logits = logits.detach().float().cpu()
    look = {"step": 0.05, "readout_format": ".2f", "layout": {"width": "min(100%, 30rem)"}}
    look["style"] = {"description_width": "7em"}

    def show(temperature: float, top_p: float) -> dict[str, Any]:
        bars = sampling_bars(logits, tokenizer, temperature, top_p)
        return markup(bars, "probabilities as bars")

    return explorer(
        show,
        temperature=ipywidgets.FloatSlider(1.0, min=0, max=2, description="temperature", **look),
        top_p=ipywidgets.FloatSlider(1.0, min=0.05, max=1.0, description="top-p", **look),
        still=STILL_SETTINGS,
    )
