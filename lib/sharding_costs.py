"""What each rank sends in a step, by formula: with plain data parallelism and with ZeRO.

Every collective goes round a ring (`lib.communication_costs`). Where parameters have different
owners, their broadcasts begin at different ranks, and each rank sends as much as any other: all but
what ends with it, 1/n of the bytes.
"""

from __future__ import annotations

from lib.communication_costs import bus_factor
from lib.config import require

# What is sent of all gradients or all weights in a step (Rajbhandari et al. 2020, arXiv:1910.02054,
# section 7; broadcasting is this library's readable strategy).
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
        num_bytes: of all gradients, and as many of all weights.

    Raises:
        ValueError: an unknown method, or less than one rank.

    Example:
        >>> sent_bytes("ddp", 800, 4), sent_bytes("zero1_flat", 800, 4)
        (1200.0, 1200.0)
    """
    known = ", ".join(COLLECTIVES_OF)
    require(method in COLLECTIVES_OF, f"method is {method!r}; right is one of: {known}")
    factor = sum(_factor(collective, ranks) for collective in COLLECTIVES_OF[method])
    return factor * num_bytes


def _factor(collective: str, ranks: int) -> float:
    """The part of the bytes that each rank sends."""
    if collective == "broadcast":
        # n - 1 ranks each send all; the last of the ring, another one for each owner, sends nothing
        return bus_factor("broadcast", ranks) * (ranks - 1) / ranks
    return bus_factor(collective, ranks)
