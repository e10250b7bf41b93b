"""Times of kernels on an H200, from `artifacts/`, for notebook 05."""

from __future__ import annotations

from lib.core.files import ROOT
from lib.core.records import read_records
from lib.lessons.profiling.records import block_on_gpu, place_of, profile_record
from lib.profiling.roofline import MeasuredOperation

KERNELS = ROOT / "artifacts/triton_kernels.jsonl"


def own_kernels() -> dict[str, float]:
    """Kernel of notebook 05, or PyTorch's -> µs of a call in a CUDA graph, on an H200."""
    found = {record["figures"]["name"]: record for record in read_records(KERNELS)}
    print(f"recorded: {place_of(*found.values())}")
    return {name: record["figures"]["median_us"] for name, record in found.items()}


def spread_of_own_kernels() -> dict[str, float]:
    """The µs between the quartiles of the samples of the same kernels."""
    found = (record["figures"] for record in read_records(KERNELS))
    return {figures["name"]: figures["iqr_us"] for figures in found}


def recorded_kernels() -> dict[str, float]:
    """Kernel -> µs of one call in a training step of gpt2-124m, 32 × 1,024 tokens, bfloat16."""
    record = profile_record("compiled")
    print(f"kernels of a training step of {record['figures']['model']}, {place_of(record)}")
    return {
        row["name"]: 1e3 * row["ms"] / row["calls"] for row in record["figures"]["kernel_times"]
    }


def recorded_points(*names: str) -> list[MeasuredOperation]:
    """Operations of a block of the same model, by PyTorch."""
    return [point for point in block_on_gpu()[1] if point.name in names]
