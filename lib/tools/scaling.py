"""All that a host's GPUs share, in one run beside its predictions, which were recorded before.

    python -m lib benchmark scaling --predict
    python -m lib benchmark scaling

Collectives, steps of each way to train beside PyTorch's own, ring attention and pipelines, and each
way to train beside one process. The first command needs no GPU: it records what formulas and
records of two and four H200s say of two, four and eight. The second measures what has no record,
so one that was cut short goes on when it is called again.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

import torch

from lib.core.files import ROOT
from lib.core.hardware import DtypeName
from lib.core.records import Record, append_record, new_record, read_records
from lib.core.settings import NonEmpty, NonNegativeInt, PositiveFloat, PositiveInt, settings
from lib.ddp.process_group import rank
from lib.ddp.settings import DDP_WRAPPERS
from lib.lessons.ddp.costs import H200_LINKS
from lib.model.config import PresetName, model_preset
from lib.profiling.collectives import predicted_ms
from lib.tools.benchmarks.communication import (
    CommunicationBenchmarkConfig,
    communication_cases,
    communication_frame,
    fitted_link,
    measure_collective,
)
from lib.tools.benchmarks.harness import Benchmark
from lib.tools.benchmarks.interleaved import first_steps, one_process
from lib.tools.benchmarks.rank_training import (
    SHARDING_METHODS,
    RanksTrainingConfig,
    make_groups,
    predicted_memory,
    shape_of,
    training_case,
)
from lib.tools.benchmarks.sharding import measure_methods
from lib.tools.benchmarks.sweep import Case, is_prediction
from lib.tools.predict import GPUS, Run, step_ms
from lib.tools.scaling_mesh import Pipeline, measure_ring
from lib.tools.scaling_report import REPORT, name_of

log = logging.getLogger(__name__)
Part = Literal["collective", "equality", "step", "pipeline", "ring"]
COLLECTIVES: Any = ("all_reduce", "reduce_scatter", "all_gather")
# Two groups of methods: with the `xl` model, each group fits into the memory of an H200 at once.
METHODS = (("none", "flashddp", "torch_ddp"), ("zero1", "fsdp", "fsdp2"))
SEQUENCES = {"tiny": 2, "gpt2-354m": 16}
PREDICTED_RANKS = (2, 4, 8)


@settings
class ScalingConfig(RanksTrainingConfig):
    """Collectives, training steps, rings and pipelines on all GPUs of a host, and predictions."""

    predict: bool = False
    """Record predictions for two, four and eight H200s; measure nothing."""

    parts: Annotated[tuple[Part, ...], NonEmpty] = get_args(Part)
    """The parts to measure, in this order."""

    sizes_mb: tuple[PositiveFloat, ...] = ()
    """Sizes of collectives in MiB; by default as `benchmark communication`."""

    models: tuple[PresetName, ...] = ()
    """Models whose steps are timed; `tiny` by default on a CPU."""

    tokens: tuple[PositiveInt, ...] = ()
    """Tokens of the ring's sequence on each rank."""

    stages_of: PresetName | None = None
    """The model of the pipeline; `tiny` by default on a CPU, `xl` on GPUs."""

    # few steps, so that all of it takes minutes
    epochs: int = 4
    timed_epochs: PositiveInt = 3
    steps_per_epoch: PositiveInt | None = 6
    loss_steps: NonNegativeInt = 0
    trace_steps: NonNegativeInt = 0
    compile: bool = True
    timeout: PositiveFloat = 120.0

    defaults: ClassVar[dict[str, tuple[Any, Any]]] = {
        "models": (("tiny",), ("gpt2-124m", "gpt2-354m", "large", "xl")),
        "tokens": ((64,), (2048, 8192, 16_384)),
        "stages_of": ("tiny", "xl"),
    }


def scaling_groups(config: ScalingConfig, device: torch.device) -> list[list[Case]]:
    """The cases of each part; only those of a step, or of equality, are measured together."""
    ranks, backend, on_gpus = config.ranks, config.backend, config.backend == "nccl"
    here: dict[str, Any] = {"ranks": ranks, "backend": backend}
    found: dict[str, list[list[Case]]] = {}
    sizes: Any = {"collectives": COLLECTIVES, "sizes_mb": config.sizes_mb}
    collectives = communication_cases(CommunicationBenchmarkConfig(**sizes, **here), device)
    found["collective"] = [[case] for case in collectives]
    fast: DtypeName = "bfloat16" if on_gpus else "float32"
    timed = dataclasses.replace(config, dtype=fast if config.dtype == "auto" else config.dtype)
    found["step"] = [
        _trainings(timed, model, methods) for model in config.given("models") for methods in METHODS
    ]
    exact = dataclasses.replace(config, dtype="float32", tf32=False, compile=False)
    found["equality"] = [
        _trainings(exact, "tiny", dict.fromkeys([*SHARDING_METHODS, *DDP_WRAPPERS]))
    ]
    # the sizes of notebook 11, whose records predict these
    heads = {"heads": 32, "head_dim": 128} if on_gpus else {"heads": 2, "head_dim": 8}
    found["ring"] = [[Case(tokens=length, **heads, **here)] for length in config.given("tokens")]
    sequences, length = (16, 256) if on_gpus else (2, 16)
    model = config.given("stages_of")
    size = {"model": model, "sequences": sequences, "context_length": length}
    counts = (ranks, 4 * ranks) if model_preset(model).num_layers % ranks == 0 else ()
    found["pipeline"] = [[Case(**size, micro_batches=count, **here)] for count in counts]
    return [
        [Case(what=part, **vars(case)) for case in group]
        for part in config.parts
        for group in found[part]
    ]


def _trainings(config: ScalingConfig, model: str, methods: Iterable[str]) -> list[Case]:
    """A training for each method; made as for a CPU, since a prediction is made without GPUs."""
    batch = config.tr_batch_size or SEQUENCES.get(model, 32)
    given = dataclasses.replace(config, tr_batch_size=batch, backend="gloo")
    cases = [training_case(given, model, "sdpa", method=method) for method in methods]
    return [Case(**vars(case) | {"backend": config.backend}) for case in cases]


def measure_group(
    group: Sequence[Case], config: ScalingConfig, device: torch.device
) -> list[dict[str, Any]]:
    """The figures of each case of a group, with its name."""
    names = [name_of(vars(case)) for case in group]
    if rank() == 0:
        log.info("%s: %s", group[0].what, "; ".join(names))
    found = _figures(group, config, device)
    return [{"name": name, **figures} for name, figures in zip(names, found, strict=True)]


def _figures(
    group: Sequence[Case], config: ScalingConfig, device: torch.device
) -> Iterable[dict[str, Any]]:
    case = group[0]
    if case.what == "step":
        return measure_methods(group, config, device)
    if case.what == "equality":
        return _equality(group, config)
    if case.what == "collective":
        return [measure_collective(case, config, device)]
    if case.what == "ring":
        return [_timed(measure_ring(case.tokens, case.heads, case.head_dim), "ring")]
    stages = Pipeline(case.model, case.sequences, case.context_length)
    return [_timed(stages.measure(case.micro_batches), "1f1b")]


def _timed(figures: dict[str, Any], name: str) -> dict[str, Any]:
    """Figures of a ring or a pipeline, with the time that counts and one from its parts."""
    figures["from_parts_ms"] = figures.pop("predicted_ms")
    return {"median_ms": figures[f"{name}_ms"], **figures}


def _equality(group: Sequence[Case], config: ScalingConfig) -> Iterator[dict[str, Any]]:
    """How far losses and gradient norms of an epoch are from those of one process."""
    exact, groups = dataclasses.replace(config, tf32=False), make_groups(config.timeout)
    steps = group[0].steps_per_epoch
    one = one_process(group[0], exact, steps, groups)
    for case in group:
        try:
            found = first_steps(case, exact, steps, groups)
        except ValueError as error:
            yield {"status": "refused", "reason": str(error)}
            continue
        losses = [abs(a.loss - b.loss) for a, b in zip(found, one, strict=True)]
        norms = [abs(a.grad_norm / b.grad_norm - 1) for a, b in zip(found, one, strict=True)]
        yield {"loss_off": max(losses), "norm_off": max(norms)}


# Predictions


def predicted(case: Case, communication: Sequence[Record], mesh: Sequence[Record]) -> dict:
    """The figures of a case on H200s, from records of two and of four."""
    if case.what == "step":
        size = (case.ranks, case.tr_batch_size, 1, case.low_precision_weights)
        run, link = (
            Run(shape_of(case), GPUS["H200"], *size),
            H200_LINKS[2 if case.ranks == 2 else 4],
        )
        took, peak = step_ms(run, link, method=case.method), predicted_memory(case).peak
        rate = case.ranks * case.tr_batch_size * case.context_length / took * 1e3
        return {"median_ms": took, "tokens_per_s": rate, "peak_memory_bytes": peak}
    if case.what == "collective":
        rows = communication_frame(communication)
        of_ranks = rows["ranks"] == (2 if case.ranks == 2 else 4)
        link = fitted_link(rows[of_ranks & (rows["collective"] == case.collective)])
        assert link is not None
        numbers = (case.num_bytes, case.ranks, link.latency_us, link.bandwidth_gbs)
        return {"median_ms": predicted_ms(case.collective, *numbers)}
    names = ("tokens", "heads", "head_dim", "model", "sequences", "context_length")
    near = [
        record["figures"]
        for record in mesh
        if all(record["config"].get(name) == getattr(case, name, None) for name in names)
        and (case.what == "ring" or record["config"]["micro_batches"] == 8)
    ]
    if case.what == "ring":  # of each step's computing and message the longer counts
        compute, message = (
            statistics.median(figures[f"{part}_ms"] / steps for figures in near)
            for part, steps in (("computing", 2), ("messages", 1))
        )
        return {"median_ms": (case.ranks - 1) * max(compute, message) + compute}
    # a stage has 2 / ranks of the blocks that it had on two ranks, and waits for the others
    stage_ms = statistics.median(figures["alone_ms"] / 8 for figures in near) * 2 / case.ranks
    return {"median_ms": (case.micro_batches + case.ranks - 1) * stage_ms}


def record_predictions(config: ScalingConfig) -> list[Record]:
    """Append predictions to the file of records, and return all that is in it."""
    path = config.output / f"{REPORT.stem}.jsonl"
    communication, mesh = (
        read_records(ROOT / f"artifacts/{name}.jsonl")
        for name in ("communication_benchmark", "mesh_gpus")
    )
    known = [record["config"] for record in read_records(path) if is_prediction(record)]
    for ranks in [config.ranks] if config.ranks else PREDICTED_RANKS:
        foreseen = dataclasses.replace(config, ranks=ranks, backend="nccl")
        groups = scaling_groups(foreseen, torch.device("cuda"))
        for case in (case for group in groups for case in group):
            if case.what != "equality" and (config.restart or vars(case) not in known):
                figures = {"status": "predicted", "of": "NVIDIA H200"}
                figures |= predicted(case, communication, mesh)
                append_record(path, new_record(figures, config=vars(case), device="cpu"))
    records = read_records(path)
    REPORT.write(records, config.output)
    return records


MEASURED = Benchmark(REPORT, scaling_groups, measure_group)


def benchmark_scaling(config: ScalingConfig) -> list[Record]:
    """Measure what has no record, or record predictions; write tables of both."""
    return record_predictions(config) if config.predict else MEASURED(config)
