"""Training of a language model with each attention kernel in each data-parallel wrapper.

For each kernel the wrappers are interleaved (see `multi_rank.py`). In the baseline `none`
each rank trains alone, in a group of its own, while the others do the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from statistics import median
from typing import Annotated, Any, ClassVar

import torch

from lib.core.allocator import allocate_workspaces, allocated_bytes, free_memory, synchronize
from lib.core.records import Record
from lib.core.settings import NonEmpty, settings
from lib.ddp.process_group import gather_objects
from lib.ddp.settings import DDP_WRAPPERS, DdpWrapper
from lib.model.config import (
    ATTENTION_KERNELS,
    AttentionKernel,
    ModelConfig,
    PresetName,
    model_preset,
)
from lib.profiling.measurement import interquartile_range
from lib.tools.benchmarks.lm_matrix_report import write_report
from lib.tools.benchmarks.multi_rank import (
    Interleaved,
    epoch_ratios,
    loss_difference,
    run_benchmark,
)
from lib.tools.benchmarks.rank_training import (
    SIZES,
    Plan,
    RanksBenchmarkConfig,
    Training,
    TrainingCase,
    case_fields,
    check_choices,
)

CPU_KERNELS = ("scaled_dot_prod_attention", "vectorized_torch", "flash_attention_torch", "sdpa")
GPU_KERNELS = ("vectorized_torch", "flash_attention_triton", "sdpa")


@settings
class LmMatrixConfig(RanksBenchmarkConfig):
    """Train a language model with each attention kernel in each data-parallel wrapper.

    Defaults are chosen for two processes on one CPU, or for all GPUs of the machine.
    """

    kernels: tuple[AttentionKernel, ...] = ()
    """Attention kernels; by default four that run on a CPU, or the three fast ones of a GPU."""

    wrappers: Annotated[tuple[DdpWrapper, ...], NonEmpty] = DDP_WRAPPERS
    """Data-parallel wrappers; `none` is the baseline, where each rank has a model of its own."""

    model: PresetName | None = None
    """Model preset, such as `small`; `tiny` by default on a CPU, `matrix` on GPUs."""

    d_model: int | None = None
    """Width of the residual stream; the preset's by default, like the sizes below."""

    d_ff: int | None = None
    """Inner width of SwiGLU."""

    num_layers: int | None = None
    """Transformer blocks."""

    num_heads: int | None = None
    """Attention heads."""

    vocab_size: int | None = None
    """Token ids."""

    cpu_defaults: ClassVar[dict[str, Any]] = {
        "model": "tiny",
        "kernels": CPU_KERNELS,
        "tr_batch_size": 2,
        "steps_per_epoch": 3,
    }
    gpu_defaults: ClassVar[dict[str, Any]] = {
        "model": "matrix",
        "kernels": GPU_KERNELS,
        "tr_batch_size": 8,
        "steps_per_epoch": 20,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, {"kernels": ATTENTION_KERNELS, "wrappers": DDP_WRAPPERS})
        if self.model is not None:
            # sizes that do not fit together are refused now
            self.shape()

    def shape(self, kernel: AttentionKernel = "sdpa") -> ModelConfig:
        """The model, with an attention kernel."""
        given = {name: getattr(self, name) for name in SIZES if getattr(self, name) is not None}
        preset = model_preset(self.model or "tiny")
        return dataclasses.replace(preset, attention_kernel=kernel, **given)

    def plans(self) -> list[Plan]:
        return [Plan(kernel, self.wrappers) for kernel in self.kernels]

    def case(self, subject: str, name: str, dtype: str) -> TrainingCase:
        return TrainingCase(**case_fields(self, self.shape(subject), dtype), wrapper=name)


def benchmark_lm_matrix(config: LmMatrixConfig) -> list[Record]:
    """Measure the cells that `config` names; see `multi_rank.run_benchmark`."""
    return run_benchmark(LmMatrix, config)


def compare_with_none(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Scaling efficiency and memory overhead of each wrapper against `none`, epoch by epoch."""
    alone = rows.get("none", {})
    memory = alone.get("peak_memory_bytes")
    further = {}
    for wrapper, row in rows.items():
        ratios = epoch_ratios(alone.get("times_ms", []), row.get("times_ms", []))
        own = row.get("peak_memory_bytes")
        further[wrapper] = {
            "scaling_efficiency": median(ratios) if ratios else None,
            "iqr_scaling_efficiency": interquartile_range(ratios),
            "memory_overhead": own / memory - 1 if own and memory else None,
        }
    return further


class LmMatrix(Interleaved):
    """The benchmark; an instance is the wrappers of one kernel on one rank."""

    records = "lm_matrix.jsonl"
    compare = staticmethod(compare_with_none)
    write_report = staticmethod(write_report)
    reference: list[float] | None = None

    @staticmethod
    def describe(figures: dict[str, Any]) -> str:
        text = f", {figures['tokens_per_s']:,.0f} tokens/s"
        if figures["scaling_efficiency"] is not None:
            text += f", efficiency {figures['scaling_efficiency']:.1%}"
        if figures["peak_memory_bytes"] is not None:
            text += f", {figures['peak_memory_bytes'] / 1e6:,.1f} MB"
        return text

    def warm_up(self, name: str) -> tuple[Training, int | None]:
        """A training after its warm-up epochs, and its peak memory in bytes; None where unknown.

        The peak counts this training alone, whatever else is allocated. On a GPU it leaves out the
        first step, which compiles and tunes; on a CPU it covers the first two.
        """
        if self.reference is None:
            self.reference = self._reference_losses()
        case, device = self.cases[name], self.device
        made: list[Training] = []

        def start(steps: int) -> None:
            made.append(Training(case, self.config, self.group(name)))
            made[0].train(steps)

        if device.type == "cpu":
            peak, _ = allocated_bytes(lambda: start(2), device)
        else:
            allocate_workspaces(device)
            before = torch.cuda.memory_allocated(device)
            start(1)
            synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            made[0].train(1)
        made[0].finish_warm_up(self.config, 2)
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device) - before
        return made[0], peak

    def _reference_losses(self) -> list[float]:
        """Losses of one process that trains on the batches of all ranks, which every rank does."""
        case = dataclasses.replace(next(iter(self.cases.values())), wrapper="none")
        if case.compared_steps == 0:
            return []
        training = Training(case, self.config, self.groups.own, ranks_in_one=case.ranks)
        training.train(case.compared_steps)
        training.read_losses()
        losses = training.losses
        del training
        free_memory()
        return losses

    def own_figures(self, name: str, time: dict[str, Any]) -> dict[str, Any]:
        case = self.cases[name]
        peaks = gather_objects(self.memory[name])
        figures: dict[str, Any] = {
            "epoch_s": time["median_ms"] * case.steps_per_epoch / 1e3,
            "peak_memory_bytes": max(peaks) if None not in peaks else None,
        }
        # in `none` each rank sees its own batches alone
        if name != "none" or case.ranks == 1:
            losses = self.finite_losses(name)
            figures |= {"losses": losses, "reference_losses": self.reference}
            figures["loss_difference"] = loss_difference(losses, self.reference)
        return figures
