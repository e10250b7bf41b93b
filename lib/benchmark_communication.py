"""Collectives between processes: time and bandwidth by size, against the formula of their cost."""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lib.allocations import Function, free_memory, is_out_of_memory
from lib.benchmark import interquartile_range, run_sweep
from lib.benchmark_communication_report import write_report
from lib.communication_costs import bus_bandwidth_gbs
from lib.config import require
from lib.config_distributed import CommunicationBenchmarkConfig
from lib.distributed import (
    barrier,
    check_same,
    current_device,
    init_from_environment,
    launch,
    rank,
    world_size,
)
from lib.distributed_group import checked_backend
from lib.files import make_folder
from lib.hardware import device_name, keep_freed_memory
from lib.plots_distributed import NAMES, size_name
from lib.report import Record, read_records

# Each size is four times the one before it.
SMALLEST_BYTES = 2**10
LARGEST_BYTES = {"nccl": 2**30, "gloo": 2**26}
# A sample is as many calls as take so long, up to a limit.
MIN_SAMPLE_MS, MAX_CALLS = 5.0, 1000
# The largest value in tensors whose sums are checked: every dtype holds whole numbers up to it.
LARGEST_VALUE = 256


@dataclasses.dataclass(frozen=True)
class CommunicationCase:
    """What one row measures."""

    collective: str
    """One of `lib.communication_costs.COLLECTIVES`."""

    num_bytes: int
    """Of the whole tensor; see `lib.communication_costs`."""

    dtype: str
    """Of its elements."""

    ranks: int
    """Processes of the group."""

    hosts: int
    """Machines that they are on."""

    backend: str
    """`nccl` or `gloo`."""

    warmup: int
    """Calls before anything counts."""

    samples: int
    """The most samples that are taken."""

    max_seconds: float
    """About how long they may take."""


def benchmark_communication(config: CommunicationBenchmarkConfig) -> list[Record]:
    """Measure what `config` names, unless its records are there; write tables and figure.

    Under torchrun, and in a process that is a rank already, with the ranks that are there; else in
    new processes. The folder `output` gets communication_benchmark.jsonl, and .csv, .md and .png of
    all its records of this device and these versions.

    Returns:
        The records of the rows that `config` names; none on ranks other than 0.

    Raises:
        ValueError: `ranks`, `sizes_mb` or `backend` do not fit this machine or one another.
        OSError: the folder cannot be made or written.
    """
    if dist.is_initialized() or "RANK" in os.environ:
        with init_from_environment(config.backend, timeout=config.timeout):
            records = _sweep(config)
    else:
        gpus = 0 if config.backend == "gloo" else torch.cuda.device_count()
        ranks = config.ranks or (gpus if gpus > 1 else 2)
        backend = checked_backend(config.backend, ranks)
        # what is wrong is found out here, before processes start
        communication_cases(config, ranks, backend)
        make_folder(config.output)
        job = (_sweep, ranks, config)
        records = launch(*job, backend=backend, timeout=config.timeout)[0]
    if records:
        same = ("device", "versions")
        every = read_records(_record_file(config))
        write_report(
            [r for r in every if all(r.get(key) == records[0][key] for key in same)], config.output
        )
    return records


def communication_cases(
    config: CommunicationBenchmarkConfig, ranks: int, backend: str, hosts: int = 1
) -> list[CommunicationCase]:
    """The rows that `config` asks for, on so many ranks; sizes are rounded down to whole parts.

    Raises:
        ValueError: there are fewer than two ranks, or a size has no element for each of them.
    """
    require(ranks >= 2, f"the group has {ranks} rank; right is: at least 2")
    right = config.ranks in (None, ranks)
    require(right, f"ranks is {config.ranks}, but the group has {ranks}; right is: {ranks} or none")
    right = config.backend in (None, backend)
    require(
        right,
        f"backend is {config.backend!r}, but the group's is {backend!r}; right is: {backend!r} or "
        "none",
    )
    largest = LARGEST_BYTES[backend]
    steps = range(int(math.log(largest // SMALLEST_BYTES, 4)) + 1)
    sizes = [size * 2**20 for size in config.sizes_mb] or [SMALLEST_BYTES * 4**i for i in steps]
    row_bytes = ranks * getattr(torch, config.dtype).itemsize
    require(
        min(sizes) >= row_bytes,
        f"sizes_mb has {min(sizes) / 2**20:g}; right for {ranks} ranks and {config.dtype} is: at "
        f"least {row_bytes / 2**20:g}, one element for each rank",
    )
    return [
        CommunicationCase(
            collective=collective,
            num_bytes=int(size // row_bytes) * row_bytes,
            dtype=config.dtype,
            ranks=ranks,
            hosts=hosts,
            backend=backend,
            warmup=config.warmup,
            samples=config.samples,
            max_seconds=config.max_seconds,
        )
        for collective in config.collectives
        for size in sorted(sizes)
    ]


def _record_file(config: CommunicationBenchmarkConfig) -> Path:
    return config.output / "communication_benchmark.jsonl"


def _sweep(config: CommunicationBenchmarkConfig) -> list[Record]:
    """Measure on all ranks; rank 0 decides what, and writes and returns the records."""
    device = current_device()
    if device.type == "cpu":
        # as training does
        keep_freed_memory()
    check_same({"device": device_name(device)})
    hosts = len(set(_gathered(socket.gethostname())))
    cases = communication_cases(config, world_size(), dist.get_backend(), hosts)
    if rank() > 0:
        while (case := _told()) is not None:
            measure_collective(case)
        return []

    def run_one(case: CommunicationCase) -> dict[str, Any]:
        _told(case)
        return measure_collective(case)

    path, restart = _record_file(config), config.restart
    records = run_sweep(path, cases, run_one, show=_line, device=device, restart=restart)
    _told(None)
    return records


def _told(case: CommunicationCase | None = None) -> CommunicationCase | None:
    """What rank 0 says that is measured next; None is the end."""
    box = [case]
    dist.broadcast_object_list(box, src=0, device=current_device())
    return box[0]


def _gathered(value: Any) -> list[Any]:
    """Each rank's `value`."""
    values = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def measure_collective(case: CommunicationCase) -> dict[str, Any]:
    """The figures of a row; all ranks call this together, and get the same times and status.

    `status` is `ok`, `oom`, `unsupported` (then `reason` says what PyTorch said) or `wrong result`.
    """
    figures: dict[str, Any] = {"bytes": case.num_bytes, "backend_version": _version(case.backend)}
    failure, prepared = _tried(lambda: _prepare(case, current_device()))
    if failure is None:
        call, result, expected = prepared
        failure, _ = _tried(call)
    if failure is not None:
        return figures | failure
    is_correct = all(_gathered(torch.equal(result, expected)))
    figures |= {"status": "ok" if is_correct else "wrong result", "is_correct": is_correct}
    if not is_correct:
        return figures
    del expected, prepared
    # all-reduces in place would add up to infinity
    result.zero_()
    times, calls = _slowest_times(call, case)
    median = statistics.median(times)
    return figures | {
        "median_ms": median,
        "iqr_ms": interquartile_range(times),
        "samples": len(times),
        "calls_per_sample": calls,
        "algorithm_bandwidth_gbs": case.num_bytes / (median * 1e6),
        "bus_bandwidth_gbs": bus_bandwidth_gbs(case.collective, case.num_bytes, case.ranks, median),
        "times_ms": times,
    }


def _tried(fn: Callable[[], Any]) -> tuple[dict[str, Any] | None, Any]:
    """How `fn()` failed on any rank, if it did, and what it returned here."""
    failure, value = None, None
    try:
        value = fn()
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            failure = {"status": "oom"}
        elif isinstance(error, NotImplementedError) or "support" in str(error):
            failure = {"status": "unsupported", "reason": str(error).split("\n")[0]}
        else:
            raise
        free_memory(error)
    return next(filter(None, _gathered(failure)), None), value


def _prepare(case: CommunicationCase, device: torch.device) -> tuple[Function, Tensor, Tensor]:
    """The call to be timed, the tensor it writes, and what that must be after the first call.

    Element i of the whole tensor is (i + rank) modulo an odd number, so that what is in the wrong
    place or from the wrong rank is another number.
    """
    dtype = getattr(torch, case.dtype)
    count = case.num_bytes // dtype.itemsize
    part, ranks, here = count // case.ranks, range(case.ranks), rank()
    adds_up = case.collective in ("all_reduce", "reduce_scatter")
    modulus = max(2, LARGEST_VALUE // (case.ranks if adds_up else 1)) | 1

    def values(source: int, start: int, length: int) -> Tensor:
        numbers = torch.arange(start, start + length, dtype=torch.int32, device=device)
        return numbers.add_(source).remainder_(modulus).to(dtype)

    def total(start: int, length: int) -> Tensor:
        added = values(0, start, length)
        for source in ranks[1:]:
            added += values(source, start, length)
        return added

    if case.collective == "all_reduce":
        x = values(here, 0, count)
        return lambda: dist.all_reduce(x), x, total(0, count)
    if case.collective == "broadcast":
        x = values(here, 0, count)
        return lambda: dist.broadcast(x, 0), x, values(0, 0, count)
    if case.collective == "reduce_scatter":
        # as `lib.distributed.reduce_scatter`, looked up once: it is timed
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        x, out = values(here, 0, count), torch.empty(part, dtype=dtype, device=device)
        return lambda: scatter(out, x), out, total(here * part, part)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    x, out = values(here, here * part, part), torch.empty(count, dtype=dtype, device=device)
    expected = torch.cat([values(source, source * part, part) for source in ranks])
    return lambda: gather(out, x), out, expected


def _slowest_times(call: Function, case: CommunicationCase) -> tuple[list[float], int]:
    """Milliseconds a call of the slowest rank, for each sample, and how many calls make one."""
    for _ in range(case.warmup):
        call()
    calls = 1
    # again, since a sample of few calls is mostly ranks that wait for one another
    for _ in range(3):
        [milliseconds] = _slowest([_sample(call, calls)])
        calls = min(MAX_CALLS, max(1, math.ceil(MIN_SAMPLE_MS / milliseconds)))
    affordable = case.max_seconds * 1e3 / (milliseconds * calls)
    samples = int(min(case.samples, max(3, affordable)))
    return _slowest([_sample(call, calls) for _ in range(samples)]), calls


def _sample(call: Function, calls: int) -> float:
    """Milliseconds a call on this rank, of `calls` that all ranks start together."""
    barrier()
    if current_device().type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls
    start_ns = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - start_ns) / 1e6 / calls


def _slowest(times: list[float]) -> list[float]:
    """The largest of the ranks' times, sample by sample."""
    slowest = torch.tensor(times, dtype=torch.float64, device=current_device())
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def _version(backend: str) -> str:
    if backend == "nccl":
        return ".".join(map(str, torch.cuda.nccl.version()))
    return f"of torch {torch.__version__}"


def _line(record: Record) -> str:
    config, figures = record["config"], record["figures"]
    text = f"{NAMES[config['collective']]} {size_name(config['num_bytes'])}: "
    if figures["status"] != "ok":
        return text + figures["status"]
    spread = f"{figures['median_ms']:.3g} ms ± {figures['iqr_ms'] / 2:.2g}"
    return f"{text}{spread}, bus bandwidth {figures['bus_bandwidth_gbs']:.3g} GB/s"
