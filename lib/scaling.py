"""Predicted speed of data-parallel training on hosts of several GPUs, by formula."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from lib.communication_costs import NVLINK_GBS, Link, ScalingPrediction, predict_scaling
from lib.config_training import ModelConfig
from lib.model_costs import flops_per_token, num_parameters

# Backward has two products for each one of forward.
BACKWARD_SHARE = 2 / 3
# Microseconds that NCCL's own cost model takes for a message of a ring of the protocol for large
# tensors ("Simple"): over NVLink, and over a network (NCCL, src/graph/tuning.cc; releases differ).
NVLINK_US, NETWORK_US = 3.4, 9.6
# MiB, from PyTorch's default on.
BUCKET_CAPS_MB = (25, 50, 100, 200, 400, 800)
# Gradients are of this many bytes a parameter, float32.
GRADIENT_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts with some GPUs each, and what connects them."""

    gpus_per_host: int

    inside: Link
    """Between the GPUs of a host."""

    network: Link
    """Between hosts; its bandwidth is that of a whole host in one direction."""

    def link(self, ranks: int) -> Link:
        """The slowest place of a ring of so many ranks, with the mean latency of its messages.

        A ring enters and leaves each host once, so that a host's ranks do not share its network.
        """
        hosts = math.ceil(ranks / self.gpus_per_host)
        if hosts == 1:
            return self.inside
        # NCCL counts one slow message for each further host
        slow = (hosts - 1) / (ranks - 1)
        latency = slow * self.network.latency_us + (1 - slow) * self.inside.latency_us
        return Link(latency, min(self.inside.bandwidth_gbs, self.network.bandwidth_gbs))


def _cluster(network_gbit: float) -> Cluster:
    """Hosts of eight H200s on NVLink, with a network of so many Gbit/s for each host."""
    inside = Link(NVLINK_US, NVLINK_GBS["H200"])
    return Cluster(8, inside, Link(NETWORK_US, network_gbit / 8))


# Network of a host -> the cluster. Eight cards of 400 Gbit/s are those of a DGX H200 (NVIDIA's
# DGX H100/H200 user guide).
CLUSTERS = {
    "8 × 400 Gbit/s": _cluster(3200),
    "400 Gbit/s": _cluster(400),
    "100 Gbit/s": _cluster(100),
    "10 Gbit/s": _cluster(10),
}


def predict_step(
    shape: ModelConfig,
    tokens: int,
    ranks: int,
    cluster: Cluster,
    *,
    flops_per_s: float,
    bucket_caps_mb: Sequence[float] = BUCKET_CAPS_MB,
    overlap: bool = True,
) -> ScalingPrediction:
    """A step of a model of `shape` on `ranks` GPUs, each with `tokens` tokens.

    Computation takes the model's FLOPs over `flops_per_s`, the same for any number of tokens, and
    two thirds of it are backward. Gradients are float32.

    Args:
        bucket_caps_mb: MiB in a bucket; the size with the shortest step is taken.

    Raises:
        ValueError: as in `lib.communication_costs.predict_scaling`.
    """
    alone = 1e3 * flops_per_token(shape) * tokens / flops_per_s
    gradient_bytes = GRADIENT_BYTES * num_parameters(shape)
    link = cluster.link(ranks)
    counts = {math.ceil(gradient_bytes / (cap * 2**20)) for cap in bucket_caps_mb}
    found = [
        predict_scaling(
            gradient_bytes,
            ranks,
            latency_us=link.latency_us,
            bandwidth_gbs=link.bandwidth_gbs,
            backward_ms=alone * BACKWARD_SHARE,
            other_ms=alone * (1 - BACKWARD_SHARE),
            buckets=count,
            overlap=overlap,
        )
        for count in sorted(counts)
    ]
    return min(found, key=lambda prediction: prediction.step_ms)
