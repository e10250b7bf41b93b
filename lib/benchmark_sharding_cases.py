"""The trainings of the sharding benchmark: what each is, and how much memory it should take."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lib.benchmark_lm_matrix_cases import (
    LmMatrixCase,
    bucket_size_mb,
    loss_difference,
    spread,
    turn_ratios,
)
from lib.config_lm_matrix import SIZES
from lib.config_ranks import check_ranks
from lib.config_sharding import SHARDING_METHODS, ShardingConfig
from lib.config_training import TrainConfig
from lib.memory_accounting import RankMemory, rank_memory

# Against which the others stand.
BASE = "flashddp"
# When the bytes of a rank are counted, and how a `RankMemory` calls them.
MOMENTS = {
    "initialised": "initialised",
    "before_step": "before_step",
    "after_step": "between_steps",
    "peak": "peak",
}
KINDS = ("parameters", "gradients", "optimizer_state", "activations")


@dataclasses.dataclass(frozen=True)
class ShardingCase(LmMatrixCase):
    """One training: a model trained by one method."""

    method: str
    """Which of `SHARDING_METHODS`."""

    def training(self, *, parts: int = 1, log_interval: int) -> TrainConfig:
        """The training, with a step's batch in so many `parts` one after another."""
        settings = super().training(parts=parts, log_interval=log_interval)
        return dataclasses.replace(settings, **SHARDING_METHODS[self.method])

    @property
    def predicted(self) -> RankMemory:
        """What the formulas say of a rank's memory."""
        method = SHARDING_METHODS[self.method]
        stage = 3 if self.method == "fsdp2" else int(method["sharded_optimizer"] != "none")
        return rank_memory(
            self.shape,
            ranks=1 if self.method == "none" else self.ranks,
            stage=stage,
            batch_size=self.tr_batch_size,
            dtype=self.dtype,
            low_precision_weights=self.low_precision_weights,
            ddp_wrapper="none" if stage == 3 else method["ddp_wrapper"],
            bucket_cap_mb=self.bucket_size_mb,
            cuda=self.backend == "nccl",
        )


def settled(config: ShardingConfig, ranks: int, *, on_gpu: bool) -> ShardingConfig:
    """`config` with what it leaves out, but `dtype`, chosen for so many ranks on such devices.

    Raises:
        ValueError: `ranks` is another number in `config`, or an option needs a GPU.
    """
    check_ranks(config.ranks, ranks)
    if config.cuda_graph and not on_gpu:
        raise ValueError("cuda_graph is True on a CPU; right is: False, or GPUs")
    return dataclasses.replace(
        config,
        ranks=ranks,
        backend=config.backend or ("nccl" if on_gpu else "gloo"),
        models=config.models or (("large", "xl") if on_gpu else ("tiny",)),
        tr_batch_size=config.tr_batch_size or (32 if on_gpu else 2),
        steps_per_epoch=config.steps_per_epoch or (10 if on_gpu else 3),
    )


def make_case(config: ShardingConfig, model: str, method: str, dtype: str) -> ShardingCase:
    """The training of a `settled` config."""
    shape = config.shape(model)
    names = {field.name for field in dataclasses.fields(ShardingCase)}
    values = {name: getattr(config, name) for name in names & vars(config).keys()}
    values |= {name: getattr(shape, name) for name in SIZES}
    values |= {"kernel": config.attention_kernel, "model": model, "dtype": dtype, "method": method}
    values["bucket_size_mb"] = bucket_size_mb(config, shape, dtype)
    return ShardingCase(**values, wrapper=SHARDING_METHODS[method]["ddp_wrapper"])


def fits_together(cases: Sequence[ShardingCase], memory: float) -> bool:
    """Whether the trainings are likely to fit into `memory` bytes of a rank at once.

    Each keeps what is there between steps, and one at a time works on what its peak has beyond;
    with recorded CUDA graphs all do.
    """
    predicted = [case.predicted for case in cases]
    kept = sum(rank.between_steps for rank in predicted)
    beyond = [rank.peak - rank.between_steps for rank in predicted]
    return kept + (sum(beyond) if cases[0].cuda_graph else max(beyond)) < 0.8 * memory


def predicted_bytes(memory: RankMemory) -> dict[str, int]:
    """The bytes of a rank by kind and moment, as they are measured."""
    kinds = {kind: getattr(memory, kind) for kind in KINDS}
    if not memory.gradients_stay:
        # counted before the optimizer's step
        kinds["gradients"] = memory.averaged_gradients
    return kinds | {moment: getattr(memory, name) for moment, name in MOMENTS.items()}


def compared(figures: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each method's figures the further ones that compare it with `flashddp`, turn by turn.

    `step_ratio` is its time over that of `flashddp`, `state_share` its optimizer state over that of
    `flashddp`, and `saved_bytes` what its peak is below, measured and predicted.
    """
    base = figures.get(BASE, {})
    further = {}
    for method, row in figures.items():
        ratios = turn_ratios(row["times_ms"], base.get("times_ms", []))
        further[method] = {
            "step_ratio": median(ratios) if ratios else None,
            "iqr_step_ratio": spread(ratios),
        }
        if base and method != "none":
            state = row["measured"]["optimizer_state"] / base["measured"]["optimizer_state"]
            further[method]["state_share"] = state
            further[method]["loss_difference"] = loss_difference(row["losses"], base["losses"])
            for kind in ("measured", "predicted"):
                saved = base[kind]["peak"] - row[kind]["peak"]
                further[method][f"saved_{kind}_bytes"] = saved
    return further
