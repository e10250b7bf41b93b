"""What the tests of benchmarks on several ranks share: small settings, and planted records."""

from pathlib import Path
from typing import Any

from lib.core.records import append_record, new_record
from lib.core.settings import to_dict

SIZES = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 61}
SMALL = {
    **SIZES,
    "context_length": 16,
    "tr_batch_size": 2,
    "epochs": 3,
    "timed_epochs": 2,
    "steps_per_epoch": 2,
    "trace_steps": 1,
    "timeout": 60.0,
}


def flags(**settings: Any) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def plant(
    path: Path, case: Any, milliseconds: float | None, *, date: str = "", **figures: Any
) -> None:
    """Add the record of a training with three timed epochs, or without a time of a failed one."""
    planted: dict[str, Any] = {"status": "oom", "reason": "memory is full"}
    if milliseconds is not None:
        planted = {
            "status": "ok",
            "launch": "first",
            "tokens_per_s": 64 / milliseconds * 1e3,
            "median_ms": milliseconds,
            "iqr_ms": 0.2,
            "samples": 3,
            "times_ms": [milliseconds] * 3,
        }
    record = new_record(planted | figures, config=to_dict(case), seed=0, device="cpu")
    append_record(path, record | ({"date": date} if date else {}))
