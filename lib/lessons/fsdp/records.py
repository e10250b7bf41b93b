"""Steps of FSDP on GPUs, from `artifacts/`, for notebook 10."""

from __future__ import annotations

from typing import Any

from lib.core.files import ROOT
from lib.core.records import Record, read_records
from lib.lessons.profiling.records import block_on_gpu
from lib.tools.benchmarks.sharding import comparisons, sharding_frame

RECORDS = ROOT / "artifacts/sharding_benchmark.jsonl"
SCALING = ROOT / "artifacts/scaling.jsonl"


def flops_per_s() -> float:
    """The speed that an H200 reached in a large bfloat16 matmul."""
    return block_on_gpu()[0].flops_per_s


def _on_gpus(device: str) -> list[Record]:
    """The trainings on GPUs of this name."""
    return [
        record
        for record in read_records(RECORDS)
        if record["config"]["backend"] == "nccl"
        and record["figures"]["status"] == "ok"
        and device in record["device"]
    ]


def steps_on_two_h100s() -> list[dict[str, Any]]:
    """Milliseconds a step by model and how its kernels start; None for what was not run."""
    rows: dict[Any, dict[str, Any]] = {}
    for record in _on_gpus("H100"):
        config, figures = record["config"], record["figures"]
        if config["model"] != "8b":
            way = "as a CUDA graph" if config["cuda_graph"] else "one by one"
            key = config["model"], config["tr_batch_size"], way
            rows.setdefault(key, {})[config["method"]] = figures["median_ms"]
    names = ("flashddp", "fsdp", "fsdp2")
    return [
        {"model": model, "sequences a rank": sequences, "kernels start": way}
        | {name: found.get(name) for name in names}
        for (model, sequences, way), found in rows.items()
    ]


def block_ms(method: str) -> list[float]:
    """Milliseconds of a step by block, of each model on two H200s."""
    return [
        record["figures"]["median_ms"] / record["config"]["num_layers"]
        for record in read_records(SCALING)
        if record["config"].get("method") == method
        and (record["config"]["what"], record["config"]["ranks"]) == ("step", 2)
        and record["figures"]["status"] == "ok"
    ]


def step_of_8b() -> dict[str, Any]:
    """The newest step of `8b` on two H100s: seconds, messages in ms, and the peak in GB."""
    records = [record for record in _on_gpus("H100") if record["config"]["model"] == "8b"]
    figures = records[-1]["figures"]
    [line] = comparisons(sharding_frame(records))
    return {
        "seconds": figures["median_ms"] / 1e3,
        "messages (ms)": figures["communication_ms"],
        "not hidden (ms)": figures["exposed_communication_ms"],
        "peak (GB)": line["peak (GB)"],
        "by formula (GB)": line["peak (GB)"] / line["peak / formula"],
    }
