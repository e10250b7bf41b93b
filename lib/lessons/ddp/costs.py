"""Costs of data parallelism by formula: overlap with backward, scaling over hosts, bytes sent.

Collectives, units and bytes are those of `lib.profiling.collectives`.
"""

from __future__ import annotations

import dataclasses
import math

from lib.core.settings import PositiveInt, require, settings
from lib.model.config import ModelConfig
from lib.model.costs import num_parameters
from lib.profiling.collectives import COLLECTIVES, Link, bus_factor, predicted_ms

# Overlap with backward


@dataclasses.dataclass(frozen=True)
class Interference:
    """The slowdown of computation by communication that runs beside it."""

    hidden: float = 0.0
    """The part of the time of hidden messages by which the step gets longer."""

    computing: float = 0.0
    """The part by which all computation gets longer, however little is sent."""


@dataclasses.dataclass(frozen=True)
class ScalingPrediction:
    """A data-parallel step by formula."""

    step_ms: float
    """The whole step."""

    exposed_ms: float
    """The part of it with communication alone."""

    slowed_ms: float
    """The time by which computation gets longer beside communication."""

    communication_ms: float
    """All communication, hidden or not."""

    efficiency: float
    """Speed of each rank relative to one rank alone."""


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
    interference: Interference = Interference(),
) -> ScalingPrediction:
    """Predict a data-parallel step, in which each rank computes as long as one rank alone.

    Gradients arrive evenly during backward, in `buckets` of equal size. A bucket's all-reduce
    starts when it is complete and the one before it has ended; what ends after backward is exposed.

    Args:
        latency_us, bandwidth_gbs: of the link; see `Link`.
        backward_ms: backward of one rank alone.
        other_ms: the rest of a step of one rank alone: forward pass and optimizer.
        overlap: if False, all-reduces start after backward.
        interference: with overlap, what messages cost the computation beside them (default:
            nothing, as if they needed neither memory nor processors).

    Raises:
        ValueError: as `predicted_ms`; or `buckets` is below 1, a time below 0, or both are 0.
    """
    require(gradient_bytes >= 0, f"gradient_bytes must be at least 0, got {gradient_bytes}")
    require(buckets >= 1, f"buckets must be at least 1, got {buckets}")
    alone = backward_ms + other_ms
    require(
        min(backward_ms, other_ms) >= 0 and alone > 0,
        "backward_ms and other_ms must be at least 0, and not both 0, got "
        f"{backward_ms} and {other_ms}",
    )

    # each bucket waits for its gradients and for the bucket before it
    one = predicted_ms("all_reduce", gradient_bytes / buckets, ranks, latency_us, bandwidth_gbs)
    end = 0.0
    for number in range(1, buckets + 1):
        ready = backward_ms * number / buckets
        end = max(ready if overlap else backward_ms, end) + one

    # what ends after backward is exposed; what is hidden slows the computation beside it
    exposed, slowed = end - backward_ms, 0.0
    if overlap and ranks > 1:
        hidden = buckets * one - exposed
        slowed = interference.hidden * hidden + interference.computing * alone
    step = alone + exposed + slowed
    return ScalingPrediction(step, exposed, slowed, buckets * one, alone / step)


# Scaling over hosts of several GPUs

# Microseconds per message of a ring over a network in NCCL's own cost model, for its protocol for
# large tensors ("Simple"; NCCL, src/graph/tuning.cc; releases differ).
NETWORK_US = 9.6
# Backward has two matmuls for each one of forward.
BACKWARD_SHARE = 2 / 3
# MiB, from PyTorch's default on.
BUCKET_CAPS_MB = (25, 50, 100, 200, 400, 800)
# Bytes of a parameter's gradient, float32.
GRADIENT_BYTES = 4


@settings
class Cluster:
    """Hosts with some GPUs each, and their links."""

    gpus_per_host: PositiveInt

    inside: Link
    """The link between the GPUs of a host."""

    network: Link
    """The link between hosts; the bandwidth is a whole host's in one direction."""

    def link(self, ranks: int) -> Link:
        """The bottleneck of a ring of `ranks`, with the mean latency of its messages.

        A ring enters and leaves each host once, through one card. NCCL builds a ring for each card
        of a host and sends a part of the data around each, so that a host's whole network counts.
        """
        hosts = math.ceil(ranks / self.gpus_per_host)
        if hosts == 1:
            return self.inside
        # NCCL counts one slow message for each further host
        slow = (hosts - 1) / (ranks - 1)
        latency = slow * self.network.latency_us + (1 - slow) * self.inside.latency_us
        return Link(latency, min(self.inside.bandwidth_gbs, self.network.bandwidth_gbs))


# H200s of one host, fitted to their all-reduces (artifacts/communication_benchmark.jsonl).
H200_LINKS = {2: Link(13.2, 318.0), 4: Link(6.7, 374.0)}
# Fitted to the steps of `flashddp` in artifacts/lm_matrix.jsonl: the largest error of its scaling
# efficiency is the least. PyTorch's DDP in the same records is within 2 percentage points of it.
H200_INTERFERENCE = Interference(hidden=0.42, computing=0.051)


# Hosts of eight H200s on NVLink, by the network of a host in Gbit/s. Inside, the link is that of
# four H200s: eight were not measured. A DGX H200 has eight cards of 400 Gbit/s (NVIDIA, DGX
# H100/H200 user guide).
CLUSTERS = {
    name: Cluster(8, H200_LINKS[4], Link(NETWORK_US, gbit / 8))
    for name, gbit in {
        "8 × 400 Gbit/s": 3200,
        "400 Gbit/s": 400,
        "100 Gbit/s": 100,
        "10 Gbit/s": 10,
    }.items()
}


def predict_step(
    shape: ModelConfig,
    ranks: int,
    link: Link,
    *,
    alone_ms: float,
    passes: int = 1,
    interference: Interference = Interference(),
) -> ScalingPrediction:
    """Predict a step of a model of `shape` on `ranks` GPUs, between which gradients use `link`.

    Two thirds of a pass are its backward. Gradients are float32, sent during the last backward in
    buckets of that size of BUCKET_CAPS_MB with which the step is shortest.

    Args:
        alone_ms: the step of one rank alone.
        passes: passes of a step, whose gradients are added up before they are sent.

    Raises:
        ValueError: as `predict_scaling`.
    """
    backward_ms = BACKWARD_SHARE * alone_ms / passes
    gradient_bytes = GRADIENT_BYTES * num_parameters(shape)
    counts = {math.ceil(gradient_bytes / (cap * 2**20)) for cap in BUCKET_CAPS_MB}
    predictions = [
        predict_scaling(
            gradient_bytes,
            ranks,
            latency_us=link.latency_us,
            bandwidth_gbs=link.bandwidth_gbs,
            backward_ms=backward_ms,
            other_ms=alone_ms - backward_ms,
            buckets=count,
            interference=interference,
        )
        for count in sorted(counts)
    ]
    return min(predictions, key=lambda prediction: prediction.step_ms)


# Bytes sent, with plain data parallelism and with ZeRO

# Collectives over all gradients or all weights in a step (Rajbhandari et al. 2020,
# arXiv:1910.02054, section 7; broadcasts are this library's readable strategy).
COLLECTIVES_OF = {
    "ddp": ("all_reduce",),
    "zero1_parameters": ("all_reduce", "broadcast"),
    "zero1_flat": ("reduce_scatter", "all_gather"),
    "zero2": ("reduce_scatter", "all_gather"),
    # weights before forward, and once more before backward
    "zero3": ("all_gather", "all_gather", "reduce_scatter"),
}


def sent_bytes(method: str, num_bytes: float, ranks: int) -> float:
    """Bytes that each of `ranks` sends in a step with one backward pass.

    Args:
        method: one of `COLLECTIVES_OF`.
        num_bytes: bytes of all gradients, and as many of all weights.

    Raises:
        ValueError: an unknown method, or `ranks` below 1.

    Example:
        >>> sent_bytes("ddp", 800, 4), sent_bytes("zero1_flat", 800, 4)
        (1200.0, 1200.0)
    """
    known = ", ".join(COLLECTIVES_OF)
    require(method in COLLECTIVES_OF, f"method must be one of {known}, got {method!r}")
    factors = {collective: bus_factor(collective, ranks) for collective in COLLECTIVES}
    # n - 1 ranks forward a broadcast; the last of the ring sends nothing. With as many owners as
    # ranks, each is last once
    factors["broadcast"] *= (ranks - 1) / ranks
    return sum(factors[collective] for collective in COLLECTIVES_OF[method]) * num_bytes
