"""Time collectives between processes by size, and compare with the formula of their cost."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import pandas as pd
import torch
import torch.distributed as dist
from annotated_types import Ge
from torch import Tensor

from lib.core.allocator import Function, synchronize
from lib.core.hardware import GPUS
from lib.core.records import Record, to_frame
from lib.core.settings import NonEmpty, PositiveFloat, PositiveInt, require, settings
from lib.ddp.process_group import (
    all_gather,
    barrier,
    current_device,
    gather_objects,
    on_each_rank,
    rank,
    reduce_scatter,
)
from lib.profiling.collectives import (
    COLLECTIVES,
    Collective,
    Link,
    bus_bandwidth_gbs,
    fit_link,
    predicted_ms,
)
from lib.profiling.measurement import start_sample, time_figures
from lib.tools.benchmarks.harness import Benchmark, RanksConfig, grid, sampling
from lib.tools.benchmarks.sections import Report, newest, table
from lib.tools.benchmarks.sweep import Case

# Each size is four times the one before it.
SMALLEST_BYTES = 2**10
LARGEST_BYTES = {"nccl": 2**30, "gloo": 2**26}
# A sample is as many calls as take this long, up to a limit.
MIN_SAMPLE_MS, MAX_CALLS = 5.0, 1000
# The largest value in tensors whose sums are checked: every dtype holds integers up to it exactly.
LARGEST_VALUE = 256
NOTE = """\
Each sample is that of the slowest rank: the mean of calls that follow one another, including what
the host needs to start them. Size: all-reduce and broadcast, the tensor on each rank;
reduce-scatter, the input; all-gather, the output. Algorithm bandwidth is size over time; bus
bandwidth is that times 2(n-1)/n for all-reduce, (n-1)/n for reduce-scatter and all-gather and 1 for
broadcast, with n ranks (nccl-tests). The result of each row was checked on all ranks. The formula
is a ring's: (n-1) messages one after another, for all-reduce twice as many, each of which takes a
latency and its bytes over the bandwidth. Both are fitted to the rows (least squares of the
logarithm of formula / measured).
"""
GLOO_NOTE = """
gloo's reduce-scatter is an all-reduce of which each rank keeps a part, so its bus bandwidth comes
out at half or less. Processes of one host exchange data through its memory and share its cores:
that says nothing of a network.
"""
COLUMNS = {
    "collective": "collective",
    "size": "size",
    "status": "status",
    "median_ms": "median (ms)",
    "iqr_ms": "IQR (ms)",
    "samples": "samples",
    "algorithm_bandwidth_gbs": "algorithm bandwidth (GB/s)",
    "bus_bandwidth_gbs": "bus bandwidth (GB/s)",
    "predicted_ms": "by formula (ms)",
    "formula_over_measured": "formula / measured",
}


@settings
class CommunicationBenchmarkConfig(RanksConfig):
    """Time collectives between processes by size, against the formula of their cost."""

    collectives: Annotated[tuple[Collective, ...], NonEmpty] = get_args(Collective)
    """Collectives to time."""

    sizes_mb: tuple[PositiveFloat, ...] = ()
    """Sizes in MiB (2²⁰ bytes); by default 1 KiB to 64 MiB, and with NCCL to 1 GiB."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the tensors."""

    ranks: Annotated[int, Ge(2)] | None = None
    """Processes; by default one per GPU, or 2 on a CPU. Under `torchrun`, as many as it started."""

    warmup: PositiveInt = 5
    """Calls before anything is timed."""

    samples: PositiveInt = 20
    """Samples per row; fewer, but at least three, where they would take more than `max_seconds`."""

    max_seconds: PositiveFloat = 0.5
    """About how long the samples of one row may take."""


def communication_cases(config: CommunicationBenchmarkConfig, device: torch.device) -> list[Case]:
    """The rows that `config` asks for; sizes are rounded down to whole elements for each rank.

    Raises:
        ValueError: a size has no element for each rank.
    """
    ranks, largest = config.ranks, LARGEST_BYTES[config.backend]
    steps = range(int(math.log(largest // SMALLEST_BYTES, 4)) + 1)
    sizes = [size * 2**20 for size in config.sizes_mb] or [SMALLEST_BYTES * 4**i for i in steps]
    row_bytes = ranks * getattr(torch, config.dtype).itemsize
    require(
        min(sizes) >= row_bytes,
        f"sizes_mb must be at least {row_bytes / 2**20:g}, one {config.dtype} for each of {ranks} "
        f"ranks, got {min(sizes) / 2**20:g}",
    )
    hosts = set(gather_objects(socket.gethostname())) if dist.is_initialized() else {""}
    return grid(
        collective=config.collectives,
        num_bytes=tuple(int(size // row_bytes) * row_bytes for size in sorted(sizes)),
        dtype=config.dtype,
        ranks=ranks,
        hosts=len(hosts),
        backend=config.backend,
        **sampling(config),
    )


def measure_collective(case: Case, config: RanksConfig, device: torch.device) -> dict[str, Any]:
    """Measure one row; all ranks call this together and return the same times and status.

    `status` is `ok` or `wrong result`. Where one rank runs out of memory, all raise.
    """
    # the first call, whose result is checked on every rank
    call, result, expected = on_each_rank(lambda: _prepare(case, device))
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
    figures |= time_figures(times) | {"calls_per_sample": calls}
    median_ms = figures["median_ms"]
    speed = bus_bandwidth_gbs(case.collective, case.num_bytes, case.ranks, median_ms)
    bandwidth = case.num_bytes / (median_ms * 1e6)
    return figures | {"algorithm_bandwidth_gbs": bandwidth, "bus_bandwidth_gbs": speed}


def _prepare(case: Case, device: torch.device) -> tuple[Function, Tensor, Tensor]:
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


def _slowest_times(call: Function, case: Case) -> tuple[list[float], int]:
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
    device = current_device()
    read_ms = start_sample(call, calls, device)
    synchronize(device)
    return read_ms()


def _slowest(times: list[float]) -> list[float]:
    """The largest of the ranks' times, sample by sample."""
    slowest = torch.tensor(times, dtype=torch.float64, device=current_device())
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def _version(backend: str) -> str:
    if backend == "nccl":
        return ".".join(map(str, torch.cuda.nccl.version()))
    return f"of torch {torch.__version__}"


def size_name(num_bytes: int) -> str:
    """Bytes as `64 KiB`, to three digits."""
    power = min(3, max(0, math.floor(math.log2(num_bytes) / 10)))
    return f"{num_bytes / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def group_name(row: Mapping[str, Any]) -> str:
    """The ranks of a row in words, such as `2 × NVIDIA H200, NCCL, float32`."""
    ranks, hosts = row["ranks"], row["hosts"]
    if row["backend"] == "nccl":
        where = f"{ranks} × {row['device']}" + (f" on {hosts} hosts" if hosts > 1 else "")
        return f"{where}, NCCL, {row['dtype']}"
    where = f"on {hosts} hosts' CPUs" if hosts > 1 else "on one host's CPU"
    return f"{ranks} processes {where} over gloo, {row['dtype']}"


def communication_frame(records: Sequence[Record]) -> pd.DataFrame:
    """The newest records, small sizes first, beside the time of the formula that fits them."""
    frame = to_frame(newest(records))
    # those that no record has, too
    frame = frame.reindex(columns=list(dict.fromkeys([*frame.columns, *COLUMNS])))
    frame["group"] = [group_name(row) for _, row in frame.iterrows()]
    frame["size"] = frame["num_bytes"].map(size_name)
    frame["place"] = frame["collective"].map(COLLECTIVES.index)
    frame = frame.sort_values(["group", "place", "num_bytes"]).drop(columns="place")
    for _, rows in frame.groupby(["group", "collective"], sort=False):
        link = fitted_link(rows)
        if link is None:
            continue
        for index, row in rows[rows["status"] == "ok"].iterrows():
            cost = (row["collective"], row["num_bytes"], row["ranks"])
            predicted = predicted_ms(*cost, link.latency_us, link.bandwidth_gbs)
            frame.loc[index, "predicted_ms"] = predicted
            frame.loc[index, "formula_over_measured"] = predicted / row["median_ms"]
    return frame.where(frame.notna(), None)


def fitted_link(rows: pd.DataFrame) -> Link | None:
    """The link that explains the times of one collective best."""
    done = rows[rows["status"] == "ok"]
    if not len(done):
        return None
    first = done.iloc[0]
    points = list(zip(done["num_bytes"], done["median_ms"]))
    return fit_link(first["collective"], first["ranks"], points)


def link_table(rows: pd.DataFrame) -> list[str]:
    """Latency and bandwidth of each fit, and how far its formula is off."""
    lines = []
    for name, fitted in rows.groupby("collective", sort=False):
        if (link := fitted_link(fitted)) is not None:
            ratios = fitted["formula_over_measured"].dropna()
            line = {"fitted": name, "latency a message (µs)": link.latency_us}
            line |= {"bandwidth (GB/s)": link.bandwidth_gbs}
            lines.append(line | {"formula / measured, least": min(ratios), "most": max(ratios)})
    parts = [table(lines) or "One size alone gives no fit."]
    if (link_gbs := datasheet_gbs(rows.iloc[0])) is not None:
        parts.append(f"The datasheet's bandwidth of a GPU, one direction: {link_gbs:.0f} GB/s.")
    return parts + [GLOO_NOTE] * (rows["backend"].iloc[0] == "gloo")


def datasheet_gbs(row: Mapping[str, Any]) -> float | None:
    """GB/s that a GPU sends to those of its host; None where it is unknown or not used."""
    if row["backend"] != "nccl" or row["hosts"] > 1:
        return None
    links = {f"NVIDIA {gpu.name}": gpu.link_gbs for gpu in GPUS.values()}
    return links.get(row["device"])


REPORT = Report(
    "communication_benchmark",
    "Communication",
    COLUMNS,
    note=NOTE,
    by=("group",),
    rows=communication_frame,
    further=link_table,
)
benchmark_communication = Benchmark(REPORT, communication_cases, measure_collective)
