"""Time collectives between processes by size."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import socket
import statistics
import time
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import torch.distributed as dist
from annotated_types import Ge
from torch import Tensor

from lib.core.allocator import Function, free_memory, is_out_of_memory
from lib.core.files import make_folder
from lib.core.hardware import device_name, keep_freed_memory, local_results
from lib.core.records import Record
from lib.core.settings import NonEmpty, PositiveFloat, PositiveInt, check, require, settings
from lib.ddp.launcher import launch
from lib.ddp.process_group import (
    all_gather,
    barrier,
    check_same,
    checked_backend,
    current_device,
    gather_objects,
    init_from_environment,
    on_each_rank,
    rank,
    reduce_scatter,
    world_size,
)
from lib.profiling.collectives import bus_bandwidth_gbs
from lib.profiling.measurement import interquartile_range
from lib.tools.benchmarks.communication_report import NAMES, size_name, write_report
from lib.tools.benchmarks.sweep import records_like, run_sweep

log = logging.getLogger(__name__)
Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
# Each size is four times the one before it.
SMALLEST_BYTES = 2**10
LARGEST_BYTES = {"nccl": 2**30, "gloo": 2**26}
# A sample is as many calls as take this long, up to a limit.
MIN_SAMPLE_MS, MAX_CALLS = 5.0, 1000
# The largest value in tensors whose sums are checked: every dtype holds integers up to it exactly.
LARGEST_VALUE = 256


@settings
class CommunicationBenchmarkConfig:
    """Time collectives between processes by size, against the formula of their cost."""

    collectives: Annotated[tuple[Collective, ...], NonEmpty] = get_args(Collective)
    """Collectives to time."""

    sizes_mb: tuple[PositiveFloat, ...] = ()
    """Sizes in MiB (2²⁰ bytes); by default 1 KiB to 64 MiB, and with NCCL to 1 GiB."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the tensors."""

    ranks: Annotated[int, Ge(2)] | None = None
    """Processes; by default one per GPU, or 2 on a CPU. Under `torchrun`, as many as it started."""

    backend: Literal["nccl", "gloo"] | None = None
    """`nccl` (GPUs) or `gloo` (CPU); by default NCCL where there are enough GPUs."""

    warmup: PositiveInt = 5
    """Calls before anything is timed."""

    samples: PositiveInt = 20
    """Samples per row; fewer, but at least three, where they would take more than `max_seconds`."""

    max_seconds: PositiveFloat = 0.5
    """About how long the samples of one row may take."""

    timeout: PositiveFloat = 300.0
    """Seconds that a rank waits for the others."""

    restart: bool = False
    """Measure rows again that the records hold already."""

    output: Path = dataclasses.field(default_factory=local_results)
    """Folder for records, tables and figure."""


@dataclasses.dataclass(frozen=True)
class CommunicationCase:
    """One row of the benchmark: the config of its record."""

    collective: str
    """One of `lib.profiling.collectives.COLLECTIVES`."""

    num_bytes: int
    """Bytes of the whole tensor; see `lib.profiling.collectives`."""

    dtype: str
    ranks: int
    hosts: int
    """Machines that the ranks are on."""

    backend: str
    warmup: int
    samples: int
    max_seconds: float


def benchmark_communication(config: CommunicationBenchmarkConfig) -> list[Record]:
    """Measure what `config` names, unless its records are there; write tables and figure.

    Runs on the ranks that there are under `torchrun` and in a process that is a rank already, and
    otherwise in new processes. The folder `output` gets communication_benchmark.jsonl, and .csv,
    .md and .png of all its records of this device and these versions.

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
        # refuse bad settings here, before processes start
        communication_cases(config, ranks, backend)
        make_folder(config.output)
        log.info("starting %d ranks", ranks)
        [records, *_] = launch(_sweep, ranks, config, backend=backend, timeout=config.timeout)
    if records:
        write_report(records_like(_record_file(config), records[0]), config.output)
    return records


def communication_cases(
    config: CommunicationBenchmarkConfig, ranks: int, backend: str, hosts: int = 1
) -> list[CommunicationCase]:
    """The rows that `config` asks for; sizes are rounded down to whole elements for each rank.

    Raises:
        ValueError: there are fewer than two ranks, or a size has no element for each of them.
    """
    require(ranks >= 2, f"ranks must be at least 2, got a group of {ranks}")
    for field, actual in (("ranks", ranks), ("backend", backend)):
        is_right = getattr(config, field) in (None, actual)
        check(config, field, is_right, f"None or the group's {actual!r}")
    largest = LARGEST_BYTES[backend]
    steps = range(int(math.log(largest // SMALLEST_BYTES, 4)) + 1)
    sizes = [size * 2**20 for size in config.sizes_mb] or [SMALLEST_BYTES * 4**i for i in steps]
    row_bytes = ranks * getattr(torch, config.dtype).itemsize
    require(
        min(sizes) >= row_bytes,
        f"sizes_mb must be at least {row_bytes / 2**20:g}, one {config.dtype} for each of {ranks} "
        f"ranks, got {min(sizes) / 2**20:g}",
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
    hosts = len(set(gather_objects(socket.gethostname())))
    cases = communication_cases(config, world_size(), dist.get_backend(), hosts)
    if rank() > 0:
        while (case := _broadcast_case()) is not None:
            try:
                measure_collective(case)
            except (RuntimeError, MemoryError) as error:
                # raised on all ranks; rank 0 records it
                if not is_out_of_memory(error):
                    raise
                free_memory(error)
        return []

    def run_one(case: CommunicationCase) -> dict[str, Any]:
        _broadcast_case(case)
        return measure_collective(case)

    path, restart = _record_file(config), config.restart
    records = run_sweep(path, cases, run_one, show=_format_row, device=device, restart=restart)
    _broadcast_case(None)
    return records


def _broadcast_case(case: CommunicationCase | None = None) -> CommunicationCase | None:
    """The case that rank 0 measures next; None at the end."""
    box = [case]
    dist.broadcast_object_list(box, src=0, device=current_device())
    return box[0]


def measure_collective(case: CommunicationCase) -> dict[str, Any]:
    """Measure one row; all ranks call this together and return the same times and status.

    `status` is `ok` or `wrong result`. Where one rank runs out of memory, all raise.
    """
    # the first call, whose result is checked on every rank
    call, result, expected = on_each_rank(lambda: _prepare(case, current_device()))
    on_each_rank(call)
    is_correct = all(gather_objects(torch.equal(result, expected)))
    figures = {
        "bytes": case.num_bytes,
        "backend_version": _version(case.backend),
        "status": "ok" if is_correct else "wrong result",
        "is_correct": is_correct,
    }
    if not is_correct:
        return figures
    del expected
    # time further calls, on zeros: repeated all-reduces in place would overflow
    result.zero_()
    times, calls = _slowest_times(call, case)
    median_ms = statistics.median(times)
    speed = bus_bandwidth_gbs(case.collective, case.num_bytes, case.ranks, median_ms)
    return figures | {
        "median_ms": median_ms,
        "iqr_ms": interquartile_range(times),
        "samples": len(times),
        "calls_per_sample": calls,
        "algorithm_bandwidth_gbs": case.num_bytes / (median_ms * 1e6),
        "bus_bandwidth_gbs": speed,
        "times_ms": times,
    }


def _prepare(case: CommunicationCase, device: torch.device) -> tuple[Function, Tensor, Tensor]:
    """The call to be timed, the tensor it writes, and the right result of the first call.

    Element i of a rank's tensor is (i + rank) modulo an odd number, so that an element at the wrong
    index or from the wrong rank has another value.
    """
    dtype = getattr(torch, case.dtype)
    count = case.num_bytes // dtype.itemsize
    part, ranks, here = count // case.ranks, range(case.ranks), rank()
    is_sum = case.collective in ("all_reduce", "reduce_scatter")
    modulus = max(2, LARGEST_VALUE // (case.ranks if is_sum else 1)) | 1

    def values(source: int, start: int, length: int) -> Tensor:
        numbers = torch.arange(start, start + length, dtype=torch.int32, device=device)
        return numbers.add_(source).remainder_(modulus).to(dtype)

    def total(start: int, length: int) -> Tensor:
        added = values(0, start, length)
        for source in ranks[1:]:
            added += values(source, start, length)
        return added

    x = values(here, 0, count)
    if case.collective == "all_reduce":
        return lambda: dist.all_reduce(x), x, total(0, count)
    if case.collective == "broadcast":
        return lambda: dist.broadcast(x, 0), x, values(0, 0, count)
    if case.collective == "reduce_scatter":
        out = torch.empty(part, dtype=dtype, device=device)
        return lambda: reduce_scatter(out, x), out, total(here * part, part)
    out, x = torch.empty_like(x), values(here, here * part, part)
    expected = torch.cat([values(source, source * part, part) for source in ranks])
    return lambda: all_gather(out, x), out, expected


def _slowest_times(call: Function, case: CommunicationCase) -> tuple[list[float], int]:
    """Milliseconds per call on the slowest rank, for each sample, and the calls in a sample."""
    for _ in range(case.warmup):
        call()
    calls = 1
    # three rounds, since a sample of few calls is mostly ranks that wait for one another
    for _ in range(3):
        [milliseconds] = _slowest([_sample(call, calls)])
        calls = min(MAX_CALLS, max(1, math.ceil(MIN_SAMPLE_MS / milliseconds)))
    affordable = case.max_seconds * 1e3 / (milliseconds * calls)
    samples = int(min(case.samples, max(3, affordable)))
    return _slowest([_sample(call, calls) for _ in range(samples)]), calls


def _sample(call: Function, calls: int) -> float:
    """Milliseconds per call on this rank, of `calls` that all ranks start together."""
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


def _format_row(record: Record) -> str:
    """The line printed once a row is measured."""
    config, figures = record["config"], record["figures"]
    text = f"{NAMES[config['collective']]} {size_name(config['num_bytes'])}: "
    if figures["status"] != "ok":
        return text + figures["status"]
    time_ms = f"{figures['median_ms']:.3g} ms ± {figures['iqr_ms'] / 2:.2g}"
    return f"{text}{time_ms}, bus bandwidth {figures['bus_bandwidth_gbs']:.3g} GB/s"
