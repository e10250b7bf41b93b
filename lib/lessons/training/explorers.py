"""The figure of notebook 03 that grows during a run: its loss."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lib.core import figures
from lib.core.charts import lines

if TYPE_CHECKING:
    from IPython.display import Image, Markdown


# A drawing takes a tenth of a second or two, a small share of these.
SECONDS_APART = 5.0
# Key of a line of metrics -> its name and style in a figure.
SERIES = {
    "loss": ("training", {"marker": "", "color": figures.BLUE}),
    "validation_loss": ("validation", {"linestyle": "--", "color": figures.VERMILLION}),
}


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
    ) -> None:
        self.steps, self.records, self.references = steps, list(records), references or {}

    def __enter__(self) -> LossCurve:
        from IPython.display import display

        self.handle = display(self.picture(), display_id=True)
        self.drawn = -math.inf
        return self

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Add a line of metrics; draw if the last drawing is SECONDS_APART old."""
        # a resumed run repeats the steps after its checkpoint
        kept = [
            old
            for old in self.records
            if old["step"] < record["step"] or old.keys() != record.keys()
        ]
        self.records = [*kept, record]
        if time.perf_counter() - self.drawn >= SECONDS_APART:
            self._show()
            self.drawn = time.perf_counter()

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
