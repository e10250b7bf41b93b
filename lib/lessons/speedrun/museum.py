"""A museum of broken runs: a small model on two ranks, trained with one fault at a time.

`python -m lib lessons museum` trains them and records their symptoms in artifacts/museum.jsonl.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lib.core.files import ROOT
from lib.core.records import append_record, new_record, read_records
from lib.lessons.training import faults
from lib.lessons.training.faults import EVAL_INTERVAL, HEALTHY

RECORDS = ROOT / "artifacts/museum.jsonl"
RANKS = 2
# Number of the exhibit -> what is wrong with it.
FAULTS = {
    1: "no causal mask",
    2: "gradients added, not averaged",
    3: "same batch",
    4: "last tile of queries never written",
    5: "schedule over too early",
    6: "gradients not exchanged",
    7: "targets two ahead",
    8: "scores not scaled",
    9: "both ranks read the same batches",
    10: "gradients not cleared",
    11: "embedding starts too large",
    12: "learning rate too high",
    13: "different initial weights",
    14: "targets not shifted",
}


def record_museum(path: Path = RECORDS) -> Path:
    """Train the healthy run and every broken one, and write their symptoms as records."""
    stories = faults.story_tokens()
    path.unlink(missing_ok=True)
    for fault in (HEALTHY, *FAULTS.values()):
        history = faults.train_with(fault, *stories, ranks=RANKS, held_out_seed=9)
        figures: dict[str, Any] = {"run": fault}
        figures |= {name: [round(value, 4) for value in values] for name, values in history.items()}
        settings: dict = {"steps": faults.STEPS, "ranks": RANKS}
        settings |= {"batch_size": faults.BATCH_SIZE // RANKS}
        settings |= {"learning_rate": faults.LEARNING_RATE} | faults.SHAPE
        append_record(path, new_record(figures, config=settings, seed=0))
    return path


def read_museum(path: Path = RECORDS) -> dict[int | str, dict[str, Any]]:
    """The symptoms of the healthy run and of each exhibit, by number."""
    runs = {record["figures"]["run"]: record["figures"] for record in read_records(path)}
    return {number: runs[fault] for number, fault in ({HEALTHY: HEALTHY} | FAULTS).items()}


def symptoms(runs: Mapping[int | str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The symptoms of runs as rows of a table."""
    rows = []
    for number, run in runs.items():
        others = zip(run["loss"], run["loss_of_rank_1"])
        by_position = run["loss_by_position"]
        rows.append(
            {
                "run": number,
                "first loss": run["loss"][0],
                "last loss": float(np.mean(run["loss"][-5:])),
                "held out": run["held_out_loss"][-1],
                "held out, last eighth of a sequence": by_position[-1],
                "median norm": float(np.median(run["grad_norm"])),
                "largest norm": max(run["grad_norm"]),
                "attention to one token": f"{run['attention_peak'][0]:.0%}",
                "ranks' losses differ by": float(np.mean([abs(a - b) for a, b in others])),
                "ranks' weights differ by": run["weight_gap"][-1],
            }
        )
    return rows


def show_museum(runs: Mapping[int | str, Mapping[str, Any]]) -> None:
    """Show the losses of every exhibit, with the healthy run in gray."""
    import matplotlib.pyplot as plt

    from lib.core.charts import lines
    from lib.core.figures import BLUE, GRAY, VERMILLION

    healthy = runs[HEALTHY]
    styles = {
        "healthy run": {"color": GRAY, "linewidth": 1},
        "training": {"color": BLUE, "linewidth": 1},
        "held out": {"color": VERMILLION, "linestyle": "--", "marker": ""},
    }
    figure, panels = plt.subplots(nrows=3, ncols=5, figsize=(10, 6), sharex=True, sharey=True)
    exhibits = {number: run for number, run in runs.items() if number != HEALTHY}
    for axes, (number, run) in zip(panels.flat, exhibits.items()):
        held_out = enumerate(run["held_out_loss"], start=1)
        losses = {"healthy run": healthy["loss"], "training": run["loss"]}
        losses["held out"] = {EVAL_INTERVAL * count: loss for count, loss in held_out}
        how: dict = {"xlabel": "step", "ylabel": "loss (nats)", "styles": styles, "legend": "none"}
        lines(losses, axes=axes, title=f"Exhibit {number}", ylim=(-0.3, 11), **how)
        axes.label_outer()
    for axes in panels.flat[len(exhibits) :]:
        axes.axis("off")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    plt.show()
