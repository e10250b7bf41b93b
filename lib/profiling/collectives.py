"""Time of a collective by formula, and the link that explains measured times.

A message of m bytes takes latency + m / bandwidth (Hockney 1994, "The communication challenge for
MPP"). A collective of n ranks on a ring is a sequence of messages (Thakur, Rabenseifner and Gropp
2005, "Optimization of collective communication operations in MPICH", sections 3 and 4):

- reduce-scatter, all-gather: n - 1 messages of 1/n of the bytes;
- all-reduce: a reduce-scatter, then an all-gather;
- broadcast: all bytes pass through n - 1 links in small pieces, through all links at once.

Units: microseconds for latency, GB/s (10⁹ bytes) for bandwidth, milliseconds for everything else.
The bytes of a collective are those of the whole tensor: what each rank holds in an all-reduce or
broadcast, puts into a reduce-scatter, and gets from an all-gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, get_args

from lib.core.settings import NonNegativeFloat, PositiveFloat, require, settings

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
COLLECTIVES: tuple[str, ...] = get_args(Collective)


@settings
class Link:
    """The connection between neighbors of a ring."""

    latency_us: NonNegativeFloat
    """Microseconds that a message of any size takes."""

    bandwidth_gbs: PositiveFloat
    """GB/s that each rank sends."""


def messages(collective: str, ranks: int) -> int:
    """The number of messages that follow one another on the ring.

    Raises:
        ValueError: an unknown collective, or `ranks` below 1.
    """
    known = ", ".join(COLLECTIVES)
    require(collective in COLLECTIVES, f"collective must be one of {known}, got {collective!r}")
    require(ranks >= 1, f"ranks must be at least 1, got {ranks}")
    return (ranks - 1) * (2 if collective == "all_reduce" else 1)


def bus_factor(collective: str, ranks: int) -> float:
    """The part of a collective's bytes that the busiest rank must send.

    Bytes / time is the algorithm bandwidth; times this factor it is the bus bandwidth, which
    compares with a link's (nccl-tests, doc/PERFORMANCE.md). A switch that adds or multiplies data
    in transit is sent less, so that the bus bandwidth can be above the link's.

    Raises:
        ValueError: as `messages`.
    """
    count = messages(collective, ranks)
    if collective == "broadcast":
        return 1.0 if ranks > 1 else 0.0
    return count / ranks


def predicted_ms(
    collective: str, num_bytes: float, ranks: int, latency_us: float, bandwidth_gbs: float
) -> float:
    """Milliseconds of a collective of `num_bytes` on a ring of `ranks`.

    Raises:
        ValueError: as `messages`; or a size or latency below 0, or no bandwidth.
    """
    require(num_bytes >= 0, f"num_bytes must be at least 0, got {num_bytes}")
    require(latency_us >= 0, f"latency_us must be at least 0, got {latency_us}")
    require(bandwidth_gbs > 0, f"bandwidth_gbs must be more than 0, got {bandwidth_gbs}")
    waiting = messages(collective, ranks) * latency_us / 1e3
    return waiting + bus_factor(collective, ranks) * num_bytes / (bandwidth_gbs * 1e6)


def bus_bandwidth_gbs(collective: str, num_bytes: float, ranks: int, milliseconds: float) -> float:
    """The bus bandwidth of a measured collective; see `bus_factor`."""
    return bus_factor(collective, ranks) * num_bytes / (milliseconds * 1e6)


def fit_link(collective: str, ranks: int, times: Iterable[tuple[float, float]]) -> Link | None:
    """The link that explains measured `times`, pairs of bytes and milliseconds, best.

    Minimizes the squares of log(formula / measured), so that short times count as much as long
    ones. None if there are fewer than two sizes, or if even the largest takes at most a tenth more
    than the latency.

    Raises:
        ValueError: as `messages`; or `ranks` is 1, or bytes or a time are not more than 0.
    """
    times = list(times)
    require(messages(collective, ranks) > 0, f"ranks must be at least 2, got {ranks}")
    for pair in times:
        require(min(pair) > 0, f"times must hold bytes and milliseconds more than 0, got {pair}")
    sizes = [num_bytes for num_bytes, _ in times]
    if len(set(sizes)) < 2:
        return None

    def fit(half: float) -> tuple[float, float]:
        """Squared error and ms per byte, if `half` bytes take as long as the latency."""
        logs = [math.log(ms / (half + num_bytes)) for num_bytes, ms in times]
        mean = sum(logs) / len(logs)
        return sum((value - mean) ** 2 for value in logs), math.exp(mean)

    # search for Hockney's n_1/2, from a negligible latency to nothing but latency
    low, high = min(sizes) / 1e4, max(sizes) * 1e2
    for _ in range(5):
        grid = [low * (high / low) ** (step / 64) for step in range(65)]
        best = min(range(65), key=lambda step: fit(grid[step])[0])
        low, high = grid[max(0, best - 1)], grid[min(64, best + 1)]
    half = grid[best] if grid[best] > min(sizes) / 1e3 else 0.0
    if half > 10 * max(sizes):
        return None
    ms_per_byte = fit(half)[1]
    latency = half * ms_per_byte * 1e3 / messages(collective, ranks)
    return Link(latency, bus_factor(collective, ranks) / (ms_per_byte * 1e6))
