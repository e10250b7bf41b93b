"""Times of kernels on an H200, from `artifacts/`, for notebook 05."""

from __future__ import annotations

import json

from lib.lessons.profiling.records import PROFILES, block_on_gpu, place_of, sizes_on_gpu
from lib.profiling.roofline import Limits, MeasuredOperation

PROFILE = "compiled"


def recorded_limits() -> Limits:
    """Return what the recorded GPU reaches in a large bfloat16 matmul and in a large copy."""
    return block_on_gpu()[0]


def recorded_kernels() -> dict[str, float]:
    """Kernel -> µs of one call in a training step of gpt2-124m, 32 × 1,024 tokens, bfloat16."""
    record = json.loads((PROFILES / PROFILE / "summary.json").read_text(encoding="utf-8"))
    print(f"kernels of a training step of {record['figures']['model']}, {place_of(record)}")
    return {
        row["name"]: 1e3 * row["ms"] / row["calls"] for row in record["figures"]["kernel_times"]
    }


def recorded_points(*names: str) -> list[MeasuredOperation]:
    """Operations of a block of the same model, by PyTorch."""
    return [point for point in block_on_gpu()[1] if point.name in names]


def recorded_additions() -> dict[int, float]:
    """Numbers in a float32 tensor -> µs of adding 1 to it in place."""
    return sizes_on_gpu()
