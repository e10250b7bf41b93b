"""What the benchmark of communication measures: a frozen dataclass, checked when made."""

import dataclasses
import math
from pathlib import Path
from typing import Literal

from lib.config import check


@dataclasses.dataclass(frozen=True)
class CommunicationBenchmarkConfig:
    """Collectives between processes, by size, against the cost formula."""

    collectives: tuple[Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"], ...] = (
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "broadcast",
    )
    """What is measured."""

    sizes_mb: tuple[float, ...] = ()
    """Sizes in MiB (2²⁰ bytes); when left out, 1 KiB to 64 MiB, and with NCCL to 1 GiB."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the tensors."""

    ranks: int | None = None
    """Processes; when left out, one for each GPU, or 2 on the CPU. Under torchrun, torchrun's."""

    backend: Literal["nccl", "gloo"] | None = None
    """`nccl` (GPUs) or `gloo` (CPU); when left out, NCCL where there are GPUs enough."""

    warmup: int = 5
    """Calls of each before anything counts."""

    samples: int = 20
    """Samples of each; at least three where they take longer than `max_seconds`."""

    max_seconds: float = 0.5
    """About how long the samples of one row may take."""

    timeout: float = 300.0
    """Seconds that a rank waits for the others."""

    restart: bool = False
    """Whether rows that the records hold already are measured again."""

    output: Path = Path("artifacts")
    """The folder for records, tables and figure."""

    def __post_init__(self) -> None:
        check(self, "collectives", bool(self.collectives), "at least one")
        check(self, "sizes_mb", all(0 < size < math.inf for size in self.sizes_mb), "each above 0")
        check(self, "ranks", self.ranks is None or self.ranks >= 2, "at least 2")
        for field in ("warmup", "samples"):
            check(self, field, getattr(self, field) > 0, "at least 1")
        for field in ("max_seconds", "timeout"):
            check(self, field, 0 < getattr(self, field) < math.inf, "more than 0, and finite")
