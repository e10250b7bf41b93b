"""The size of gradient buckets against overlap: a slider through what `lib.scaling` predicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lib.communication_costs import ScalingPrediction
from lib.config_training import ModelConfig
from lib.model_costs import num_parameters
from lib.model_presets import model_preset
from lib.plots import BLUE, INK, VERMILLION
from lib.plots_distributed import draw_overlap
from lib.scaling import CLUSTERS, GRADIENT_BYTES, predict_step
from lib.widgets_model import draw_picture

if TYPE_CHECKING:
    from ipywidgets import VBox

MIB = 2**20


def bucket_caps(shape: ModelConfig) -> list[int]:
    """MiB in a bucket, doubling from 1 on; with the last one, all gradients are in one bucket."""
    whole = GRADIENT_BYTES * num_parameters(shape) / MIB
    return [2**power for power in range(math.ceil(math.log2(whole)) + 1)]


def bucket_predictions(
    shape: ModelConfig, tokens: int, ranks: int, network: str, flops_per_s: float
) -> dict[int, ScalingPrediction]:
    """MiB in a bucket -> the step with buckets of that size, by `lib.scaling.predict_step`."""
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
    _draw_exposed(figure.add_axes((0.07, 0.19, 0.36, 0.55)), predictions, cap)
    lanes = figure.add_axes((0.57, 0.19, 0.41, 0.55))
    draw_overlap(lanes, found, backward_ms=found.buckets[-1].ready_ms)
    count = len(found.buckets)
    words = f"{count:,} bucket{'s' * (count > 1)} of {cap:,} MiB: exposed {found.exposed_ms:.3g} ms"
    share = f"of {found.communication_ms:.3g} ms communication, step {found.step_ms:.3g} ms"
    figure.suptitle(f"{words} {share} (predicted)", x=0.01, y=0.97, ha="left", fontsize=11)


def _draw_exposed(axes: Axes, predictions: dict[int, ScalingPrediction], cap: int) -> None:
    exposed = {size: found.exposed_ms for size, found in predictions.items()}
    axes.plot(*zip(*exposed.items()), color=BLUE)
    axes.plot([cap], [exposed[cap]], color=VERMILLION, marker="o", markersize=9, clip_on=False)
    axes.axvline(cap, color=INK, linewidth=0.8, linestyle=":", marker="")
    axes.set(xscale="log", ylim=(0, 1.1 * max(exposed.values())))
    axes.set(xlabel="bucket size (MiB)", ylabel="exposed (ms)")
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
    """Sliders for the size of buckets and the network; what of an all-reduce hides behind backward.

    Args:
        model: a preset of `lib.model_presets`.
        tokens: of each rank in a step.
        flops_per_s: what one GPU does alone.
        still: sizes, in MiB, that are also shown where nobody can move the slider.

    Raises:
        ValueError: `still` has a size that is not on the slider.
    """
    import ipywidgets

    shape = model_preset(model)
    caps = bucket_caps(shape)
    if unknown := [cap for cap in still if cap not in caps]:
        raise ValueError(f"still has {unknown}; right are some of: {', '.join(map(str, caps))}")

    def slider(description: str, options: Sequence[Any], value: Any) -> Any:
        look = {"layout": ipywidgets.Layout(width="min(100%, 34rem)")}
        look["style"] = {"description_width": "7.5em"}
        return ipywidgets.SelectionSlider(
            options=options, value=value, description=description, **look
        )

    names = [(f"{cap:,}", cap) for cap in caps]
    sizes = slider("Bucket (MiB)", names, min(caps, key=lambda cap: abs(cap - 25)))
    networks = slider("Network", list(CLUSTERS), network)

    # all at once: some take longer than a picture
    predictions = {
        name: bucket_predictions(shape, tokens, ranks, name, flops_per_s) for name in CLUSTERS
    }

    def picture(cap: int) -> dict[str, Any]:
        def draw(figure: Figure) -> None:
            draw_buckets(figure, predictions[networks.value], cap)

        reading = f"{networks.value}, {ranks} ranks"
        return draw_picture(draw, reading, 9.6, 3.2, dpi=150, layout="none")

    view = ipywidgets.Output(layout=ipywidgets.Layout(min_height="3.2in"))
    others = ipywidgets.Output(layout=ipywidgets.Layout(display="none"))

    def show(change: Any = None) -> None:
        view.outputs = (picture(sizes.value),)

    for each in (sizes, networks):
        each.observe(show, "value")
    show()
    others.outputs = tuple(picture(cap) for cap in still)
    return ipywidgets.VBox([sizes, networks, view, others])
