"""The broken runs of notebook 03: a small model, trained with one fault at a time.

`python -m lib lessons broken-runs` records them in artifacts/broken_runs.jsonl, some 35 KB in all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.core.files import ROOT
from lib.core.records import append_record, new_record, read_records
from lib.lessons.training import faults
from lib.lessons.training.faults import HEALTHY, NO_WARM_UP

RECORDS = ROOT / "artifacts/broken_runs.jsonl"
# Letter in the notebook -> what is wrong; "healthy" is shown beside all.
FAULTS = {
    "A": "same batch",
    "B": "schedule over too early",
    "C": "learning rate too high",
    "D": "targets not shifted",
    "E": "gradients not cleared",
    "F": "scores not scaled",
}
# What the notebook shows of a run.
SHOWN = ("loss", "grad_norm", "held_out_loss", "attention_peak")


def record_broken_runs() -> Path:
    """Train each broken run on generated stories, and write their records."""
    stories = faults.story_tokens()
    RECORDS.unlink(missing_ok=True)
    for fault in (HEALTHY, NO_WARM_UP, *FAULTS.values()):
        history = faults.train_with(fault, *stories)
        figures: dict[str, Any] = {"run": fault}
        figures |= {name: [round(value, 4) for value in history[name]] for name in SHOWN}
        settings: dict = {"steps": faults.STEPS, "batch_size": faults.BATCH_SIZE}
        settings |= {"learning_rate": faults.LEARNING_RATE} | faults.SHAPE
        append_record(RECORDS, new_record(figures, config=settings, seed=0))
    return RECORDS


def read_run(fault: str) -> dict[str, Any]:
    """Return the figures of the run with `fault`, a value of FAULTS, HEALTHY or NO_WARM_UP."""
    (found,) = (r["figures"] for r in read_records(RECORDS) if r["figures"]["run"] == fault)
    return found


def read_broken_runs() -> dict[str, dict[str, Any]]:
    """Return the figures of the runs that the notebook shows: HEALTHY, then a letter for each."""
    return {name: read_run(fault) for name, fault in ({HEALTHY: HEALTHY} | FAULTS).items()}
