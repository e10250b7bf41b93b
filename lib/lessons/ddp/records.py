"""Times and speeds of H200s, from `artifacts/`, for notebook 08."""

from __future__ import annotations

from lib.core.files import ROOT
from lib.core.hardware import peak
from lib.lessons.profiling.records import newest_records


def all_reduces(ranks: int) -> dict[int, float]:
    """Bytes -> milliseconds of NCCL's all-reduce between `ranks` H200s of a host."""
    return {
        record["config"]["num_bytes"]: record["figures"]["median_ms"]
        for record in newest_records(ROOT / "artifacts/communication_benchmark.jsonl")
        if [record["config"][key] for key in ("backend", "collective", "ranks")]
        == ["nccl", "all_reduce", ranks]
    }


def compiled_speeds() -> dict[str, float]:
    """Model -> FLOP/s of compiled steps with 1,024 tokens a sequence on one H200."""
    asked = ("mode", "dtype", "compile", "seq_len", "attention_kernel")
    return {
        record["config"]["model"]: record["figures"]["mfu"] * peak("NVIDIA H200").bfloat16
        for record in newest_records(ROOT / "artifacts/step_benchmark.jsonl")
        if [record["config"][key] for key in asked] == ["full_step", "bfloat16", True, 1024, "sdpa"]
        and record["figures"]["status"] == "ok"
    }
