"""Explorers of notebook 07: a ring step by step, a step on any network, scaling.

As in `lib.lessons.show`, where nobody can move a slider a few settings are shown instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from lib.core.figures import INK
from lib.core.records import format_value
from lib.ddp.launcher import launch
from lib.lessons.ddp.costs import (
    CLUSTERS,
    H200_INTERFERENCE,
    Interference,
    predict_scaling,
    predict_step,
)
from lib.lessons.ddp.figures import draw_overlap, draw_ring, draw_scaling, draw_timelines
from lib.lessons.ddp.records import gpu_steps, steady
from lib.lessons.ddp.ring import ring_all_reduce
from lib.lessons.ddp.stack import Layers, time_steps
from lib.lessons.explorer import explorer, picture
from lib.lessons.simulated_network import Network
from lib.model.config import model_preset
from lib.profiling.collectives import Link, bus_factor, messages

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


def measured_scaling(model: str, tokens: int) -> dict[str, list[tuple[int, float]]]:
    """The steady records of `flashddp` with float32 gradients: how -> (ranks, efficiency)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for step in steady(gpu_steps()):
        asked = step.model, 256 * step.sequences, step.wrapper, step.bytes_per_gradient
        if asked == (model, tokens, MEASURED_WRAPPER, 4):
            points = found.setdefault(f"measured on H200s, {step.how}", [])
            points.append((step.ranks, step.efficiency))
    return found


@functools.cache
def scaling_curve(
    model: str,
    tokens: int,
    network: str,
    flops_per_s: float,
    *,
    overlap: bool = True,
    interference: Interference = H200_INTERFERENCE,
) -> tuple[tuple[int, float], ...]:
    """Predicted (ranks, efficiency) for `RANKS`."""
    shape, cluster = model_preset(model), CLUSTERS[network]
    options: dict = {"flops_per_s": flops_per_s, "overlap": overlap, "interference": interference}
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
    draw_scaling(left, curves, measured_scaling(model, tokens))
    left.axvline(ranks, color=INK, linewidth=0.8, linestyle=":", marker="")
    left.set_title(f"{model}, {tokens:,} tokens a rank", fontsize=11)
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, ncols=3, loc="lower left")
    shape, cluster = model_preset(model), CLUSTERS[network]
    found = predict_step(
        shape, tokens, ranks, cluster, flops_per_s=flops_per_s, interference=H200_INTERFERENCE
    )
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
    start: tuple[str, int, str, int],
) -> VBox:
    """Sliders for model, tokens per rank, network and ranks; predicted and measured scaling.

    Args:
        flops_per_s: model preset -> FLOP/s that one GPU reaches alone.
        start: model, tokens, network and ranks shown at first.
    """

    def draw(figure: Figure, model: str, tokens: int, network: str, ranks: int) -> None:
        speed = flops_per_s[model]
        draw_scaling_setting(figure, model, tokens, network, ranks, flops_per_s=speed)

    controls: dict = {
        "model": list(flops_per_s),
        "tokens": {f"{count:,}": count for count in tokens},
        "network": list(CLUSTERS),
        "ranks": [2**power for power in range(7)],
    }
    show = picture(draw, width=10.0, height=4.2, dpi=150, layout="none")
    return explorer(show, start=dict(zip(controls, start)), **controls)


# Settings of `network_explorer`: an all-reduce of everything against backward, and latency.
SHARES = (0.25, 0.5, 1.0, 2.0)
LATENCIES_MS = (0.0, 0.2, 1.0, 3.0)


def network_explorer(make: Callable[[int], Callable], layers: Layers, ranks: int = 2) -> VBox:
    """Sliders for bandwidth, latency and buckets; each setting is a step on ranks.

    Args:
        make: weights in a bucket -> a maker for `lib.lessons.ddp.stack.time_steps`.
        layers: all of one size, which compute by a virtual clock.
    """
    size, count = layers.sizes[0], len(layers.sizes)
    backward_ms = count * layers.backward

    def draw(figure: Figure, bandwidth: float, latency: float, buckets: int) -> None:
        sending_ms = bandwidth * backward_ms
        gbs = bus_factor("all_reduce", ranks) * layers.gradient_bytes / (sending_ms * 1e6)
        link = Link(1e3 * latency / messages("all_reduce", ranks), gbs)
        maker, network = make(count // buckets * size), Network(link, clock="virtual")
        steps = launch(time_steps, ranks, {"": maker}, {"": network}, layers, backend="gloo")
        step = steps[0]["", ""]
        predicted = predict_scaling(
            layers.gradient_bytes,
            ranks,
            latency_us=link.latency_us,
            bandwidth_gbs=link.bandwidth_gbs,
            backward_ms=backward_ms,
            other_ms=count * layers.forward,
            buckets=buckets,
        )
        draw_timelines(figure, {f"predicted {predicted.step_ms:.4g} ms, simulated": step})

    return explorer(
        picture(draw, width=9.5, height=2.7, dpi=150, layout="constrained"),
        busy=f"{ranks} ranks are running",
        min_height="17em",
        bandwidth={f"takes {s:g} × backward": s for s in SHARES},
        latency={f"{ms:g} ms a message": ms for ms in LATENCIES_MS},
        buckets=[n for n in range(1, count + 1) if count % n == 0],
        start={"bandwidth": 0.5, "latency": 0.2, "buckets": count},
        still=[(0.5, 3.0, count), (0.5, 3.0, 1)],
    )
