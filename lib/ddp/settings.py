"""The names of the wrappers, and the default size of a bucket; loads no torch."""

from __future__ import annotations

from typing import Literal, get_args

# The wrappers of `lib.ddp.wrappers`, and PyTorch's.
DdpWrapper = Literal["none", "naive", "flat", "overlap", "flashddp", "torch_ddp"]
DDP_WRAPPERS = get_args(DdpWrapper)

# Gradients go in at most about this many buckets, unless those would be below so many MiB.
MOST_BUCKETS = 32
LEAST_CAP_MB = 25.0


def default_bucket_cap_mb(gradient_bytes: int) -> float:
    """The default MiB (2²⁰ bytes) of gradients in a bucket: 25, or 1/32 of all gradients.

    A message costs the host the same time whatever its size, and the last bucket is sent after
    backward. With 1/32 both stay small in models of any size.
    """
    return max(LEAST_CAP_MB, float(round(gradient_bytes / MOST_BUCKETS / 2**20)))
