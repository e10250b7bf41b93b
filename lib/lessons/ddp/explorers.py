"""Explorers of notebook 07: a ring step by step, the cost of buckets, scaling and its prediction.

As in `lib.lessons.show`, where nobody can move a slider a few settings are shown instead.

The size of gradient buckets against overlap: a slider through what `lib.ddp.costs` predicts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lib.core.figures import BLUE, INK, VERMILLION
from lib.core.records import Record, format_value
from lib.ddp.costs import CLUSTERS, GRADIENT_BYTES, ScalingPrediction, predict_step
from lib.ddp.ring import ring_all_reduce
from lib.lessons.ddp.figures import draw_overlap, draw_ring, draw_scaling
from lib.lessons.explorer import explorer, picture
from lib.model.config import ModelConfig, model_preset
from lib.model.costs import num_parameters

if TYPE_CHECKING:
    from ipywidgets import VBox


# Where curves are predicted: closely where a second host joins, and sparsely beyond.
RANKS = (*range(1, 11), 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
# One wrapper's points are enough to hold a prediction against.
MEASURED_WRAPPER = "flashddp"


def ring_stepper(values: np.ndarray) -> VBox:
    """A slider through the steps of an all-reduce of `values`, (ranks, chunks)."""
    steps = ring_all_reduce(values)

    def draw(figure: Figure, step: int) -> None:
        draw_ring(figure, steps, step)

    show = picture(draw, width=7.6, height=4.2)
    return explorer(show, step=range(len(steps)), still=[(len(steps) // 2,)])


def measured_scaling(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list]]:
    """Measured points from rows of the LM matrix (`lib.benchmarks.lm_matrix_report.matrix_rows`).

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
    options: dict = {"flops_per_s": flops_per_s, "overlap": overlap}
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
    step, exposed = _milliseconds(found.step_ms), _milliseconds(found.exposed_ms)
    count = f"{ranks} rank{'s' * (ranks > 1)}"
    words = f"{count}, {where}: step {step}, exposed {exposed}"
    text = f"{words}, efficiency {found.efficiency:.0%} (predicted)"
    figure.suptitle(text, x=0.01, y=0.98, ha="left")


def _milliseconds(value: float) -> str:
    """`value` with three digits or commas: 0.0123, 4.56, 71,823; what rounding left over is 0."""
    return f"{format_value(value if value > 1e-6 else 0.0)} ms"


def scaling_explorer(
    *,
    flops_per_s: Mapping[str, float],
    tokens: Sequence[int],
    records: Iterable[Record] = (),
    start: tuple[str, int, str, int],
) -> VBox:
    """Sliders for model, tokens per rank, network and ranks; predicted and measured scaling.

    Args:
        flops_per_s: model preset -> FLOP/s that one GPU reaches alone.
        records: of `python -m lib benchmark lm-matrix`.
        start: model, tokens, network and ranks shown at first.
    """
    from lib.benchmarks.lm_matrix_report import matrix_rows

    measured = measured_scaling(matrix_rows(records))

    def draw(figure: Figure, model: str, tokens: int, network: str, ranks: int) -> None:
        setting: dict = {"flops_per_s": flops_per_s[model], "measured": measured.get(model, {})}
        draw_scaling_setting(figure, model, tokens, network, ranks, **setting)

    controls: dict = {
        "model": list(flops_per_s),
        "tokens": {f"{count:,}": count for count in tokens},
        "network": list(CLUSTERS),
        "ranks": [2**power for power in range(7)],
    }
    show = picture(draw, width=10.0, height=4.2, dpi=150, layout="none")
    return explorer(show, start=dict(zip(controls, start)), **controls)


MIB = 2**20


def bucket_caps(shape: ModelConfig) -> list[int]:
    """MiB in a bucket, doubling from 1 on; with the last one, all gradients are in one bucket."""
    whole = GRADIENT_BYTES * num_parameters(shape) / MIB
    return [2**power for power in range(math.ceil(math.log2(whole)) + 1)]


def bucket_predictions(
    shape: ModelConfig, tokens: int, ranks: int, network: str, flops_per_s: float
) -> dict[int, ScalingPrediction]:
    """MiB in a bucket -> the step with buckets of that size, by `lib.ddp.costs.predict_step`."""
    settings = (shape, tokens, ranks, CLUSTERS[network])
    return {
        cap: predict_step(*settings, flops_per_s=flops_per_s, bucket_caps_mb=(cap,))
        for cap in bucket_caps(shape)
    }


def draw_buckets(figure: Figure, predictions: dict[int, ScalingPrediction], cap: int) -> None:
    """Exposed communication by the size of buckets, and backward with buckets of `cap` MiB.

    The axes stand in fixed places, since finding some takes longer than drawing.
    """
    found = predictions[cap]
    _draw_exposed(figure.add_axes((0.08, 0.19, 0.35, 0.55)), predictions, cap)
    lanes = figure.add_axes((0.57, 0.19, 0.41, 0.55))
    draw_overlap(lanes, found, backward_ms=found.buckets[-1].ready_ms)
    count = len(found.buckets)
    exposed, sent = _milliseconds(found.exposed_ms), _milliseconds(found.communication_ms)
    words = f"{count:,} bucket{'s' * (count > 1)} of {cap:,} MiB: exposed {exposed}"
    share = f"of {sent} communication, step {_milliseconds(found.step_ms)}"
    figure.suptitle(f"{words} {share} (predicted)", x=0.01, y=0.97, ha="left", fontsize=11)


def _draw_exposed(axes: Axes, predictions: dict[int, ScalingPrediction], cap: int) -> None:
    exposed = {size: found.exposed_ms for size, found in predictions.items()}
    axes.plot(*zip(*exposed.items()), color=BLUE)
    axes.plot([cap], [exposed[cap]], color=VERMILLION, marker="o", markersize=9, clip_on=False)
    axes.axvline(cap, color=INK, linewidth=0.8, linestyle=":", marker="")
    axes.set(xscale="log", ylim=(0, 1.1 * max(exposed.values())))
    axes.set(xlabel="bucket size (MiB)", ylabel="exposed (ms)")
    axes.yaxis.set_major_formatter("{x:,.10g}")
    caps = list(exposed)[::3]
    axes.set_xticks(caps, [f"{size:,}" for size in caps])
    axes.minorticks_off()
    axes.set_title("Exposed communication", fontsize=11)


def bucket_slider(
    *,
    model: str = "medium",
    tokens: int = 4096,
    ranks: int = 16,
    network: str = "8 × 400 Gbit/s",
    flops_per_s: float,
    still: Sequence[int] = (1, 1024),
) -> VBox:
    """Sliders for bucket size and network; how much of an all-reduce hides behind backward.

    Args:
        model: a preset of `lib.model.config`.
        tokens: per rank and step.
        flops_per_s: what one GPU reaches alone.
        still: bucket sizes, in MiB, that are also shown where nobody can move the slider.

    Raises:
        ValueError: `still` has a size that is not on the slider.
    """
    shape = model_preset(model)
    caps = bucket_caps(shape)
    # all at once: some take longer than a figure
    predictions = {
        name: bucket_predictions(shape, tokens, ranks, name, flops_per_s) for name in CLUSTERS
    }

    def draw(figure: Figure, bucket_mib: int, network: str) -> None:
        draw_buckets(figure, predictions[network], bucket_mib)

    return explorer(
        picture(draw, width=9.6, height=3.2, dpi=150, layout="none"),
        bucket_mib={f"{cap:,}": cap for cap in caps},
        network=list(CLUSTERS),
        start={"bucket_mib": min(caps, key=lambda cap: abs(cap - 25)), "network": network},
        still=[(cap, network) for cap in still],
    )
