"""Steps of several H200s from `artifacts/`, beside the formula, for notebook 08."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lib.core.files import ROOT
from lib.core.hardware import peak
from lib.core.records import read_records
from lib.lessons.ddp.costs import (
    BACKWARD_SHARE,
    H200_INTERFERENCE,
    H200_LINKS,
    Interference,
    ScalingPrediction,
    predict_scaling,
)
from lib.lessons.profiling.records import newest_records

RECORDS = ROOT / "artifacts/lm_matrix.jsonl"
# Efficiencies that scatter by more than this cannot test a prediction.
STEADY = 0.02
# Which wrappers send during backward.
OVERLAPS = {
    "naive": False,
    "flat": False,
    "overlap": True,
    "flashddp": True,
    "torch_ddp": True,
}
# Parameters of the models of the records, each a message of `naive` and `overlap`.
MATRICES_OF_BLOCK, OUTSIDE_BLOCKS = 6, 3


@dataclass(frozen=True)
class Step:
    """A data-parallel step on H200s, and the step of one rank alone in the same run."""

    model: str
    wrapper: str
    ranks: int
    sequences: int
    """Sequences of each rank, 256 tokens each."""

    bytes_per_gradient: int
    how: str
    """`eager`, `compiled` or `CUDA graph`."""

    alone_ms: float
    step_ms: float
    efficiency: float
    spread: float
    """Interquartile range of the efficiency."""

    gradient_bytes: int
    messages: int
    traced_ms: float
    """Communication in a traced step, with waiting for other ranks."""

    exposed_ms: float
    """The part of it in which nothing else runs."""

    overlaps: bool

    def predicted(self, interference: Interference = H200_INTERFERENCE) -> ScalingPrediction:
        """The step by formula, from the step alone and the link between these GPUs."""
        link = H200_LINKS[self.ranks]
        return predict_scaling(
            self.gradient_bytes,
            self.ranks,
            latency_us=link.latency_us,
            bandwidth_gbs=link.bandwidth_gbs,
            backward_ms=BACKWARD_SHARE * self.alone_ms,
            other_ms=(1 - BACKWARD_SHARE) * self.alone_ms,
            buckets=self.messages,
            overlap=self.overlaps,
            interference=interference,
        )

    def error(self, interference: Interference = H200_INTERFERENCE) -> float:
        """Predicted less measured efficiency, in percentage points."""
        return 100 * (self.predicted(interference).efficiency - self.efficiency)

    @property
    def name(self) -> str:
        words = f"{self.model}, {self.ranks} × {256 * self.sequences:,} tokens"
        return f"{words}, {self.bytes_per_gradient}-byte gradients, {self.how}"


def gpu_steps() -> list[Step]:
    """All data-parallel steps on record, in the order in which they were measured."""
    records = [
        record
        for record in read_records(RECORDS)
        if record["config"]["backend"] == "nccl" and record["figures"]["status"] == "ok"
    ]
    keys = ("launch", "kernel", "tr_batch_size", "low_precision_weights", "compile", "cuda_graph")
    alone = {
        tuple(record["figures"][key] for key in keys): record["figures"]["median_ms"]
        for record in records
        if record["config"]["wrapper"] == "none"
    }
    return [
        _step(record["figures"], alone[tuple(record["figures"][key] for key in keys)])
        for record in records
        if record["config"]["wrapper"] != "none"
    ]


def steady(steps: Sequence[Step]) -> list[Step]:
    """Those whose efficiency scatters by at most two percentage points."""
    return [step for step in steps if step.spread <= STEADY]


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


def _step(figures: dict, alone_ms: float) -> Step:
    size = 2 if figures["low_precision_weights"] else 4
    gradient_bytes, wrapper = size * figures["parameters"], figures["wrapper"]
    messages = 1
    if wrapper in ("flashddp", "torch_ddp"):
        messages = math.ceil(gradient_bytes / (figures["bucket_size_mb"] * 2**20))
    elif wrapper in ("naive", "overlap"):
        messages = MATRICES_OF_BLOCK * figures["num_layers"] + OUTSIDE_BLOCKS
    return Step(
        model=figures["model"],
        wrapper=wrapper,
        ranks=figures["ranks"],
        sequences=figures["tr_batch_size"],
        bytes_per_gradient=size,
        how=_how(figures),
        alone_ms=alone_ms,
        step_ms=figures["median_ms"],
        efficiency=figures["scaling_efficiency"],
        spread=figures["iqr_scaling_efficiency"],
        gradient_bytes=gradient_bytes,
        messages=messages,
        traced_ms=figures["communication_ms"],
        exposed_ms=figures["exposed_communication_ms"],
        overlaps=OVERLAPS[wrapper],
    )


def _how(figures: dict) -> str:
    if figures["cuda_graph"]:
        return "CUDA graph"
    return "compiled" if figures["compile"] else "eager"
