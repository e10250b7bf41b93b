"""How trainings on several ranks are measured: what their benchmarks' settings share."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lib.config import check


@dataclasses.dataclass(frozen=True, kw_only=True)
class RanksBenchmarkConfig:
    """What is left out is chosen for two processes on one CPU, or for all GPUs of the machine."""

    context_length: int | None = None
    """Tokens in a window; the preset's when left out."""

    tr_batch_size: int | None = None
    """Windows that each rank takes in a step; 2 when left out, and more on GPUs."""

    epochs: int = 6
    """Epochs that each way trains."""

    timed_epochs: int = 5
    """The last so many of them are timed, each a sample; those before warm up."""

    steps_per_epoch: int | None = None
    """Steps in an epoch, once through the data; 3 when left out, and more on GPUs."""

    loss_steps: int = 20
    """So many losses are kept and compared."""

    trace_steps: int = 3
    """Steps watched by PyTorch's profiler, for communication; 0: none."""

    ranks: int | None = None
    """Processes; 2 on a CPU when left out, or one for each GPU. Under `torchrun` it is its own."""

    backend: Literal["nccl", "gloo"] | None = None
    """How ranks talk: `nccl` on GPUs, `gloo` on CPUs; by what there is when left out."""

    timeout: float = 300.0
    """Seconds that a rank waits for the others."""

    dtype: str = "auto"
    """Of matrix products: `auto` (the shortest that the device is fast in), or its name."""

    tf32: bool = True
    """Whether float32 products may use TF32 on GPUs that have it."""

    compile: bool = False
    """Whether `torch.compile` fuses the model."""

    cuda_graph: bool = False
    """Whether the whole step is recorded once and replayed."""

    low_precision_weights: bool = False
    """Whether the model holds its matrices in `dtype`, and AdamW the float32 masters."""

    bucket_size_mb: float | None = None
    """MiB of gradients that are sent at a time, where they go in buckets.

    When left out 25, or a 32nd of all gradients where that is more.
    """

    seed: int = 0
    """Which weights and tokens."""

    output: Path = Path("artifacts")
    """The folder for records, tables and figures; records of other settings there are kept."""

    def __post_init__(self) -> None:
        for field in ("context_length", "tr_batch_size", "steps_per_epoch", "ranks"):
            value = getattr(self, field)
            check(self, field, value is None or value > 0, "at least 1")
        check(self, "timed_epochs", self.timed_epochs > 0, "at least 1")
        right = f"more than timed_epochs {self.timed_epochs}, as the first epoch warms up"
        check(self, "epochs", self.epochs > self.timed_epochs, right)
        for field in ("loss_steps", "trace_steps", "seed"):
            check(self, field, getattr(self, field) >= 0, "0 or more")
        for field in ("timeout", "bucket_size_mb"):
            value = getattr(self, field)
            check(self, field, value is None or 0 < value < math.inf, "more than 0, and finite")
        right = "auto, float32, bfloat16 or float16"
        check(self, "dtype", self.dtype in right.replace(" or", ",").split(", "), right)


@dataclasses.dataclass(frozen=True)
class RepeatConfig:
    """Settings of kept records of training on several ranks, to be measured again."""

    records: Path = Path("artifacts/lm_matrix.jsonl")
    """Of `benchmark lm-matrix` or `benchmark sharding`."""

    only: tuple[str, ...] = ()
    """Settings that have one of these in their title in the report; all when left out."""

    ranks: int | None = None
    """Those of so many processes; one for each GPU when left out, or 2 on a CPU."""

    keep_buckets: bool = True
    """Whether gradients go in buckets of the records' size, or of that which training chooses."""

    seconds: float | None = None
    """No further setting is begun that would probably end later; no limit when left out."""

    output: Path = Path("artifacts")
    """The folder for records, tables and figures; records of other settings there are kept."""

    def __post_init__(self) -> None:
        for field in ("ranks", "seconds"):
            value = getattr(self, field)
            check(self, field, value is None or value > 0, "more than 0")


def check_ranks(asked: int | None, started: int) -> None:
    """Raise a `ValueError` where another number of ranks was asked for than were started."""
    if asked not in (None, started):
        raise ValueError(
            f"ranks is {asked}, but torchrun started {started}; right is: {started}, or none"
        )


def check_different(config: Any, lists: Mapping[str, Any]) -> None:
    """Refuse lists of names that are unknown or twice there; `lists` has the known ones of each."""
    for field, known in lists.items():
        given = getattr(config, field)
        right = f"different ones of {', '.join(known)}"
        check(config, field, set(given) <= set(known) and len(set(given)) == len(given), right)
