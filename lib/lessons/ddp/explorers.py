"""Explorers of notebook 08: a ring step by step, and a step on any network."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from lib.core.figures import VERMILLION
from lib.ddp.launcher import launch
from lib.lessons.ddp.costs import predict_scaling
from lib.lessons.ddp.figures import draw_ring_step, draw_timeline, explain_chunks
from lib.lessons.ddp.ring import ring_all_reduce
from lib.lessons.ddp.stack import Layers, time_steps
from lib.lessons.explorer import explorer, picture
from lib.lessons.simulated_network import Network
from lib.profiling.collectives import Link, bus_factor, messages

if TYPE_CHECKING:
    from ipywidgets import VBox


def ring_stepper(values: np.ndarray) -> VBox:
    """A slider through the steps of an all-reduce of `values`, (ranks, chunks)."""
    steps = ring_all_reduce(values)
    words = {
        "start": "Each rank has numbers of its own, in as many chunks as there are ranks",
        "reduce-scatter": "What arrives is added to one's own",
        "all-gather": "What arrives is whole, and replaces one's own",
    }

    def draw(figure: Figure, step: int) -> None:
        found, ranks = steps[step], len(values)
        whole = int((found.added == ranks).sum())
        count = f"{step} of {len(steps) - 1}: {found.phase}. " if step else ""
        title = f"{count}{words[found.phase]}; whole: {whole} of {ranks**2}"
        axes = figure.subplots()
        # longer than the axes are wide
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        draw_ring_step(axes, found, title="")
        explain_chunks(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))
        # from each rank that sends to the next; from the last to the first around the right
        for rank, chunk in enumerate(found.sent):
            style = {"arrowstyle": "-|>", "color": VERMILLION, "linewidth": 2}
            axes.annotate("", (rank + 0.68, chunk), (rank + 0.32, chunk), arrowprops=style)
            if rank == ranks - 1:
                axes.annotate("", (-0.32, chunk), (-0.68, chunk), arrowprops=style)
        axes.set_xlim(-0.75, ranks - 0.25)

    show = picture(draw, width=7.6, height=4.2)
    return explorer(show, step=range(len(steps)), still=[(len(steps) // 2,)])


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
        title = f"predicted {predicted.step_ms:.4g} ms, simulated"
        draw_timeline(figure.subplots(), step, title=title, legend="below")

    return explorer(
        picture(draw, width=9.5, height=2.7),
        busy=f"{ranks} ranks are running",
        min_height="17em",
        bandwidth={f"takes {s:g} × backward": s for s in SHARES},
        latency={f"{ms:g} ms a message": ms for ms in LATENCIES_MS},
        buckets=[n for n in range(1, count + 1) if count % n == 0],
        start={"bandwidth": 0.5, "latency": 0.2, "buckets": count},
        still=[(0.5, 3.0, count), (0.5, 3.0, 1)],
    )
