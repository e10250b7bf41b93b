"""What notebook 06 shows: a ring step by step, the cost of buckets, predicted and measured scaling.

As in `lib.widgets`, where nobody can move a slider a few settings are shown instead.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from lib.model_presets import model_preset
from lib.plots import INK
from lib.plots_ddp import draw_ring, draw_scaling
from lib.plots_distributed import draw_overlap
from lib.report import Record
from lib.ring import ring_all_reduce
from lib.scaling import CLUSTERS, predict_step
from lib.widgets_model import choice_slider, draw_picture, figure_slider

if TYPE_CHECKING:
    from ipywidgets import VBox

# Where curves are predicted: closely where a second host joins, and sparsely beyond.
RANKS = (*range(1, 11), 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
# One wrapper's points are enough to hold a prediction against.
MEASURED_WRAPPER = "flashddp"


def ring_stepper(values: np.ndarray) -> VBox:
    """A slider through the steps of an all-reduce of `values`, (ranks, chunks)."""
    steps = ring_all_reduce(values)
    names = {f"{number} of {len(steps) - 1}": number for number in range(len(steps))}

    def draw(figure: Figure, number: int) -> None:
        draw_ring(figure, steps, number)

    half = list(names)[len(steps) // 2]
    return figure_slider(draw, names, description="step", still=(half,), width=7.6, height=4.2)


def measured_scaling(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list]]:
    """Measured points from rows of the LM matrix (`lib.benchmark_lm_matrix_report.matrix_rows`).

    Those of `flashddp` on GPUs.

    Returns:
        For each model, what was measured -> its points, (ranks, efficiency).
    """
    found: dict[str, dict[str, list]] = {}
    for row in rows:
        efficiency = row.get("scaling_efficiency")
        is_meant = (row["wrapper"], row["backend"]) == (MEASURED_WRAPPER, "nccl")
        if not is_meant or row["status"] != "ok" or efficiency is None:
            continue
        tokens = row["tr_batch_size"] * row["context_length"]
        how = "compiled" if row["compile"] else "eager"
        device = row["device"].removeprefix("NVIDIA ")
        name = f"measured: {tokens:,} tokens, {row['dtype']}, {how}, {device}"
        points = found.setdefault(row["model"], {}).setdefault(name, [])
        # several kernels: the best, as a reader would take it
        best = max([efficiency, *(e for ranks, e in points if ranks == row["ranks"])])
        points[:] = [p for p in points if p[0] != row["ranks"]] + [(row["ranks"], best)]
    return found


@functools.cache
def scaling_curve(
    model: str, tokens: int, network: str, flops_per_s: float, *, overlap: bool = True
) -> tuple[tuple[int, float], ...]:
    """Predicted (ranks, efficiency) for `RANKS`."""
    shape, cluster = model_preset(model), CLUSTERS[network]
    options = {"flops_per_s": flops_per_s, "overlap": overlap}
    return tuple(
        (ranks, predict_step(shape, tokens, ranks, cluster, **options).efficiency)
        for ranks in RANKS
    )


def draw_scaling_setting(
    figure: Figure,
    model: str,
    tokens: int,
    network: str,
    ranks: int,
    *,
    flops_per_s: float,
    measured: Mapping[str, Sequence[tuple[int, float]]],
) -> None:
    """Efficiency by ranks, and for `ranks` of them backward and the all-reduces of its buckets.

    The axes stand in fixed places, since finding some takes longer than drawing.
    """
    left = figure.add_axes((0.065, 0.27, 0.36, 0.54))
    right = figure.add_axes((0.56, 0.27, 0.42, 0.54))
    curves = {
        name: scaling_curve(model, tokens, network, flops_per_s, overlap=overlap)
        for name, overlap in (("predicted, overlapped", True), ("predicted, after backward", False))
    }
    draw_scaling(left, curves, measured)
    left.axvline(ranks, color=INK, linewidth=0.8, linestyle=":", marker="")
    left.set_title(f"{model}, {tokens:,} tokens a rank", fontsize=11)
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, ncols=3, loc="lower left")
    shape, cluster = model_preset(model), CLUSTERS[network]
    found = predict_step(shape, tokens, ranks, cluster, flops_per_s=flops_per_s)
    draw_overlap(right, found, backward_ms=found.buckets[-1].ready_ms)
    where = "NVLink" if ranks <= cluster.gpus_per_host else network
    words = (
        f"{ranks} ranks, {where}: step {found.step_ms:.3g} ms, exposed {found.exposed_ms:.2g} ms"
    )
    text = f"{words}, efficiency {found.efficiency:.0%} (predicted)"
    figure.suptitle(text, x=0.01, y=0.98, ha="left")


def scaling_explorer(
    *,
    flops_per_s: Mapping[str, float],
    tokens: Sequence[int],
    records: Iterable[Record] = (),
    start: tuple[str, int, str, int],
) -> VBox:
    """Sliders for model, tokens of a rank, network and ranks; predicted and measured scaling.

    Args:
        flops_per_s: model preset -> what one GPU does alone.
        records: of `python -m lib benchmark lm-matrix`.
        start: model, tokens, network and ranks shown at first, and where nothing can be moved.
    """
    import ipywidgets

    from lib.benchmark_lm_matrix_report import matrix_rows

    measured = measured_scaling(matrix_rows(records))

    # with commas, as everywhere
    tokens = [(f"{count:,}", count) for count in tokens]
    choices = (list(flops_per_s), tokens, list(CLUSTERS), [2**power for power in range(7)])
    names = ("Model", "Tokens a rank", "Network", "Ranks")
    sliders = [choice_slider(*each) for each in zip(names, choices, start)]

    def picture() -> tuple[dict[str, Any]]:
        model, size, network, ranks = (each.value for each in sliders)

        def draw(figure: Figure) -> None:
            draw_scaling_setting(
                figure,
                model,
                size,
                network,
                ranks,
                flops_per_s=flops_per_s[model],
                measured=measured.get(model, {}),
            )

        return (draw_picture(draw, "Predicted scaling", 10.0, 4.2, dpi=150, layout="none"),)

    view = ipywidgets.Output(layout=ipywidgets.Layout(min_height="4.2in"))
    view.outputs = picture()

    def show(change: Mapping[str, Any]) -> None:
        view.outputs = picture()

    for each in sliders:
        each.observe(show, "value")
    return ipywidgets.VBox([*sliders, view])
