"""What collectives cost by formula, what measured times say of the link, and how training scales.

A message of m bytes takes latency + m / bandwidth (Hockney 1994, "The communication challenge for
MPP"). A collective of n ranks on a ring is a sequence of such messages (Thakur, Rabenseifner and
Gropp 2005, "Optimization of collective communication operations in MPICH", sections 3 and 4):

- reduce-scatter and all-gather: n - 1 messages of 1/n of the bytes;
- all-reduce: the one and then the other;
- broadcast: all bytes go through n - 1 links in small pieces, in all of them at the same time.

Units: microseconds for latency, GB/s (10⁹ bytes) for bandwidth, milliseconds for everything else.
The bytes of a collective are those of the whole tensor: what each rank has of an all-reduce or
broadcast, puts into a reduce-scatter, and gets from an all-gather.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from lib.config import require

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")

# GB/s that a GPU can send over NVLink, half of the sum of both directions that NVIDIA's
# architecture white papers give (V100 300, A100 600, H100 900) and H200's datasheet (900). Keys
# are as in lib.hardware.PEAKS; without a switch, some of the links go to each of the other GPUs.
NVLINK_GBS = {
    "V100-SXM2-16GB": 150.0,
    "V100-SXM2-32GB": 150.0,
    "A100-SXM4-40GB": 300.0,
    "A100-SXM4-80GB": 300.0,
    "H100 80GB HBM3": 450.0,
    "H200": 450.0,
}

# Gradients go in at most about so many buckets, and in smaller ones only below so many MiB.
MOST_BUCKETS = 32
LEAST_CAP_MB = 25.0


def default_bucket_cap_mb(gradient_bytes: int) -> float:
    """MiB (2²⁰ bytes) of gradients in a bucket, where nobody says how many: 25, or a 32nd of all.

    A message costs the host as much time whatever its size, and what is sent last, after the
    backward pass, is a bucket. With a 32nd both stay small in models of any size.
    """
    return max(LEAST_CAP_MB, float(round(gradient_bytes / MOST_BUCKETS / 2**20)))


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects the ranks of a ring."""

    latency_us: float
    """Microseconds that a message takes whatever its size."""

    bandwidth_gbs: float
    """GB/s that each rank sends."""


def messages(collective: str, ranks: int) -> int:
    """How many messages of a ring follow one another.

    Raises:
        ValueError: `collective` is unknown, or `ranks` below 1.
    """
    _check(collective, ranks)
    return (ranks - 1) * (2 if collective == "all_reduce" else 1)


def bus_factor(collective: str, ranks: int) -> float:
    """The part of a collective's bytes that the busiest rank sends, at the least.

    Times the algorithm bandwidth (bytes over time) it makes the bus bandwidth, which can be
    compared with a link's (nccl-tests, doc/PERFORMANCE.md). A switch that adds or multiplies data
    on its way needs to be sent less, so that the bus bandwidth may then be above the link's.

    Raises:
        ValueError: as in `messages`.
    """
    _check(collective, ranks)
    if collective == "broadcast":
        return 1.0 if ranks > 1 else 0.0
    return messages(collective, ranks) / ranks


def predicted_ms(
    collective: str, num_bytes: float, ranks: int, latency_us: float, bandwidth_gbs: float
) -> float:
    """Milliseconds of a collective of `num_bytes` on a ring of `ranks`.

    Raises:
        ValueError: as in `messages`; `num_bytes` or `latency_us` is below 0, or `bandwidth_gbs` not
            above 0.
    """
    require(num_bytes >= 0, f"num_bytes is {num_bytes}; right is: 0 or more")
    require(latency_us >= 0, f"latency_us is {latency_us}; right is: 0 or more")
    require(bandwidth_gbs > 0, f"bandwidth_gbs is {bandwidth_gbs}; right is: above 0")
    waiting = messages(collective, ranks) * latency_us / 1e3
    return waiting + bus_factor(collective, ranks) * num_bytes / (bandwidth_gbs * 1e6)


def bus_bandwidth_gbs(collective: str, num_bytes: float, ranks: int, milliseconds: float) -> float:
    """The bus bandwidth of a collective that took so long; see `bus_factor`."""
    return bus_factor(collective, ranks) * num_bytes / (milliseconds * 1e6)


def fit_link(collective: str, ranks: int, times: Iterable[tuple[float, float]]) -> Link | None:
    """The link that explains measured `times`, pairs of bytes and milliseconds, best.

    Least squares of log(formula / measured), so that short times count as much as long ones and
    twice as much as half as much. None where there are fewer than two sizes, or where the largest
    takes less than a tenth more than the latency.

    Raises:
        ValueError: as in `messages`, `ranks` is 1, or bytes or a time are not above 0.
    """
    times = list(times)
    require(messages(collective, ranks) > 0, f"ranks is {ranks}; right is: at least 2")
    for pair in times:
        require(min(pair) > 0, f"times has {pair}; right is: bytes and milliseconds above 0")
    sizes = [num_bytes for num_bytes, _ in times]
    if len(set(sizes)) < 2:
        return None

    def fit(half: float) -> tuple[float, float]:
        """Squared error and milliseconds a byte, if `half` bytes take as long as the latency."""
        logs = [math.log(ms / (half + num_bytes)) for num_bytes, ms in times]
        mean = sum(logs) / len(logs)
        return sum((value - mean) ** 2 for value in logs), math.exp(mean)

    # Hockney's n_1/2: searched between where latency is nothing and where it is everything
    low, high = min(sizes) / 1e4, max(sizes) * 1e2
    for _ in range(5):
        grid = [low * (high / low) ** (step / 64) for step in range(65)]
        best = min(range(65), key=lambda step: fit(grid[step])[0])
        low, high = grid[max(0, best - 1)], grid[min(64, best + 1)]
    half = grid[best] if grid[best] > min(sizes) / 1e3 else 0.0
    if half > 10 * max(sizes):
        return None
    per_byte = fit(half)[1]
    latency = half * per_byte * 1e3 / messages(collective, ranks)
    return Link(latency, bus_factor(collective, ranks) / (per_byte * 1e6))


@dataclasses.dataclass(frozen=True)
class BucketTimes:
    """When a bucket of gradients is averaged, in milliseconds from the start of backward."""

    ready_ms: float
    """Its gradients are all there."""

    start_ms: float
    """Its all-reduce starts."""

    end_ms: float
    """Its all-reduce ends."""


@dataclasses.dataclass(frozen=True)
class ScalingPrediction:
    """A data-parallel step by formula."""

    step_ms: float
    """The whole step."""

    exposed_ms: float
    """The part of it in which there is communication alone."""

    communication_ms: float
    """All communication, hidden or not."""

    efficiency: float
    """Speed of each rank over that of one rank alone."""

    buckets: tuple[BucketTimes, ...]
    """In the order in which they are averaged."""


def predict_scaling(
    gradient_bytes: float,
    ranks: int,
    *,
    latency_us: float,
    bandwidth_gbs: float,
    backward_ms: float,
    other_ms: float = 0.0,
    buckets: int = 1,
    overlap: bool = True,
) -> ScalingPrediction:
    """A data-parallel step in which each of `ranks` computes as long as one rank alone.

    Gradients arrive evenly over backward, in `buckets` of equal size. A bucket's all-reduce starts
    when it is full and the one before it has ended; exposed is what is left after backward. Not
    counted: that communication slows down computation, since both need memory and processors.

    Args:
        latency_us, bandwidth_gbs: of the link; see `Link`.
        backward_ms: of one rank alone.
        other_ms: of one rank alone, the rest of a step: forward pass and optimizer.
        overlap: if False, all-reduces start after backward.

    Raises:
        ValueError: as in `predicted_ms`; `buckets` is below 1, a time below 0, or both are 0.
    """
    require(gradient_bytes >= 0, f"gradient_bytes is {gradient_bytes}; right is: 0 or more")
    require(buckets >= 1, f"buckets is {buckets}; right is: at least 1")
    alone = backward_ms + other_ms
    require(
        min(backward_ms, other_ms) >= 0 and alone > 0,
        f"backward_ms is {backward_ms} and other_ms {other_ms}; right is: 0 or more, not both 0",
    )
    one = predicted_ms("all_reduce", gradient_bytes / buckets, ranks, latency_us, bandwidth_gbs)
    times: list[BucketTimes] = []
    end = 0.0
    for number in range(1, buckets + 1):
        ready = backward_ms * number / buckets
        start = max(ready if overlap else backward_ms, end)
        end = start + one
        times.append(BucketTimes(ready, start, end))
    exposed = end - backward_ms
    step = alone + exposed
    return ScalingPrediction(step, exposed, buckets * one, alone / step, tuple(times))


def _check(collective: str, ranks: int) -> None:
    known = ", ".join(COLLECTIVES)
    require(collective in COLLECTIVES, f"collective is {collective!r}; right is one of: {known}")
    require(ranks >= 1, f"ranks is {ranks}; right is: at least 1")
