"""The figure of notebook 02 that is more than a chart: what each change of the model costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from lib.core.charts import bars
from lib.core.figures import BLACK, BLUE, INK, ORANGE


def show_differences(rows: Sequence[Mapping[str, Any]]) -> None:
    """Show how much each variant adds to the loss: a dot for each seed, a bar for their mean."""
    costs = {row["variant"]: row["costs"] for row in rows}
    # where all seeds agree whether it costs or gains
    is_clear = {name: min(found) > 0 or max(found) < 0 for name, found in costs.items()}
    _, axes = plt.subplots(figsize=(7, 0.5 * len(rows) + 1.2))
    bars(
        {name: np.mean(found) for name, found in costs.items()},
        axes=axes,
        title="What each change costs, for three seeds",
        xlabel="nats per token above the model as built",
        styles={n: {"color": BLUE if is_clear[n] else ORANGE, "alpha": 0.35} for n in costs},
    )
    for place, found in enumerate(costs.values()):
        (dots,) = axes.plot(found, [place] * len(found), "o", color=INK, label="one seed")
    axes.axvline(0, color=BLACK, linewidth=1, marker="")
    meanings = {"all seeds agree on the sign": BLUE, "the sign depends on the seed": ORANGE}
    patches = [Patch(color=c, alpha=0.35, label=f"mean; {name}") for name, c in meanings.items()]
    axes.legend(handles=[dots, *patches], loc="lower right")
    plt.show()
