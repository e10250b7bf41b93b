"""Figures of notebook 11: the schedules of a pipeline, and what the ranks of a ring compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from matplotlib import pyplot as plt

from lib.core.charts import gantt
from lib.core.figures import BLUE, GRAY, ORANGE


def show_schedules(steps: Mapping[str, Iterable[tuple[int, str, int, float, float]]]) -> None:
    """Draw steps above one another; a box is an event, its number the micro-batch.

    Args:
        steps: name -> (stage, kind, micro-batch, start, end) of each event, in milliseconds.
    """
    panels: dict[str, dict[str, list]] = {}
    for name, spans in steps.items():
        lanes = panels[name] = {}
        for stage, kind, number, start, end in sorted(spans, key=lambda span: (span[0], span[3])):
            lanes.setdefault(f"stage {stage}", []).append((start, end, kind, number))
    _show(panels, "time from the start of the step (ms)", {"forward": GRAY, "backward": BLUE})


def show_work(pairs: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Draw what each rank of a ring computes; a box is a step, its number that of the step.

    Args:
        pairs: name -> the visible pairs of each step, and in it of each rank.
    """
    panels = {}
    for name, steps in pairs.items():
        equal, lanes = sum(map(sum, steps)) / len(steps[0]), {}
        for rank, counts in enumerate(zip(*steps)):
            ends = [sum(counts[: step + 1]) / equal for step in range(len(counts))]
            kinds = ["own keys", *["keys of others"] * (len(counts) - 1)]
            lanes[f"rank {rank}"] = [*zip([0.0, *ends], ends, kinds, range(len(counts)))]
        most = max(lane[-1][1] for lane in lanes.values())
        panels[f"{name}: the busiest rank has {most:.2f} equal shares"] = lanes
    colors = {"own keys": ORANGE, "keys of others": BLUE}
    _show(panels, "visible pairs, in equal shares; a box is a step of the ring", colors)


def _show(panels: Mapping[str, Mapping], xlabel: str, colors: Mapping[str, str]) -> None:
    """Draw lanes of boxes for each title, over a common axis."""
    end = max(box[1] for lanes in panels.values() for lane in lanes.values() for box in lane)
    rows = sum(0.8 + 0.32 * len(lanes) for lanes in panels.values())
    _, grid = plt.subplots(nrows=len(panels), sharex=True, squeeze=False, figsize=(9.5, rows + 0.5))
    styles = {kind: {"color": color} for kind, color in colors.items()}
    for (title, lanes), axes in zip(panels.items(), grid[:, 0]):
        is_last = axes is grid[-1, 0]
        label, legend = (xlabel, "below") if is_last else ("", "none")
        common: dict = {"axes": axes, "span": (0, 1.01 * end), "styles": styles}
        gantt(lanes, title=title, xlabel=label, legend=legend, **common)
    plt.show()
