"""Predict the speed and memory of a training run on GPUs that may not be at hand.

A pass takes what the roofline allows (`lib.profiling.roofline`) at the shares of a GPU's datasheet
that our own steps reach: two numbers, fitted to the steps on H200s in artifacts/. Gradients cost
what `lib.lessons.ddp.costs` says, memory what `lib.profiling.memory_formula` says. A prediction is
for `python -m lib train` with all that makes it fast: 16-bit matmuls, `torch.compile`, `flashddp`.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import pandas as pd

from lib.core.files import ROOT
from lib.core.hardware import GPUS, PEAKS, Gpu
from lib.core.records import records, to_markdown
from lib.core.settings import NonNegativeInt, PositiveInt, require, settings
from lib.lessons.ddp.costs import H200_INTERFERENCE, H200_LINKS, predict_step
from lib.model.config import ModelConfig, PresetName, model_preset
from lib.model.costs import flops_per_token, num_parameters
from lib.profiling.collectives import Link
from lib.profiling.memory_formula import RESERVED_BYTES, rank_memory
from lib.profiling.roofline import UPDATE_BYTES, Limits, predicted_ms

# The share of a link's datasheet bandwidth that all-reduces of four H200s reach.
LINK_SHARE = H200_LINKS[4].bandwidth_gbs / GPUS["H200"].link_gbs
# With fewer tokens a pass the host, which no roofline knows, may take longer than the GPU.
FEWEST_TOKENS = 8192
# Tokens of a GPU in a pass, at most, where the batch size is not given.
MOST_TOKENS = 32_768
# Methods whose ranks update a share of the weights each.
SHARDED = ("zero1", "fsdp", "fsdp2")
SIZES = ("vocab_size", "context_length", "d_model", "num_layers", "num_heads", "d_ff")


class Run(NamedTuple):
    """A model, and the GPUs that train it."""

    model: ModelConfig
    gpu: Gpu
    gpus: int
    batch_size: int
    """Sequences of a GPU in a pass."""

    passes: int = 1
    """Passes of a step, whose gradients are added up."""

    low_precision_weights: bool = True


@dataclass(frozen=True)
class Prediction:
    """Speed and memory of a training run."""

    run: Run
    tokens_per_s: float
    """Of all GPUs."""

    peak_gb: float
    """Of each GPU, as PyTorch counts it."""

    source: Literal["measured", "predicted"] = "predicted"

    @property
    def mfu(self) -> float:
        """The model's FLOP/s, over those of the GPUs' datasheet."""
        run = self.run
        return self.tokens_per_s * flops_per_token(run.model) / (run.gpus * run.gpu.flops_per_s)

    @property
    def fits(self) -> bool:
        return self.peak_gb + RESERVED_BYTES / 1e9 <= self.run.gpu.memory_gb


class Shares(NamedTuple):
    """The shares of a GPU's datasheet that steps reach."""

    matmul: float
    bandwidth: float


@functools.cache
def alone_ms(run: Run, shares: Shares) -> float:
    """The milliseconds of a step on one GPU: its passes, and one update."""
    bandwidth = shares.bandwidth * PEAKS[run.gpu.name].bandwidth
    limits = Limits(shares.matmul * run.gpu.flops_per_s, bandwidth)
    length = run.model.context_length
    one = predicted_ms(run.model, run.batch_size, length, limits, element_bytes=2)
    update = 1e3 * UPDATE_BYTES * num_parameters(run.model) / bandwidth
    return run.passes * (one - update) + update


def step_ms(run: Run, link: Link, shares: Shares | None = None, method: str = "flashddp") -> float:
    """The milliseconds of a step, with `shares` fitted to all our records by default.

    A sharded method sends as many bytes as `flashddp`, and leaves a GPU its share of the update.
    """
    shares = shares or fitted(*measured())
    milliseconds = alone_ms(run, shares)
    if method == "none":
        return milliseconds
    if method in SHARDED:
        bandwidth = shares.bandwidth * PEAKS[run.gpu.name].bandwidth
        update = 1e3 * UPDATE_BYTES * num_parameters(run.model) / bandwidth
        milliseconds -= update * (1 - 1 / run.gpus)
    return predict_step(
        run.model,
        run.gpus,
        link,
        alone_ms=milliseconds,
        passes=run.passes,
        interference=H200_INTERFERENCE,
    ).step_ms


def predict(run: Run, shares: Shares | None = None) -> Prediction:
    """Predict `run`, with `shares` fitted to all our records by default."""
    link = Link(H200_LINKS[4].latency_us, LINK_SHARE * run.gpu.link_gbs)
    tokens = run.gpus * run.passes * run.batch_size * run.model.context_length
    memory = rank_memory(
        run.model,
        ranks=run.gpus,
        batch_size=run.batch_size,
        dtype=run.gpu.dtype,
        low_precision_weights=run.low_precision_weights and run.gpu.dtype == "bfloat16",
    )
    return Prediction(run, 1e3 * tokens / step_ms(run, link, shares), memory.peak / 1e9)


# Our own records


@functools.cache
def measured() -> tuple[Prediction, ...]:
    """Our compiled steps on H200s with at least FEWEST_TOKENS a pass, or in a CUDA graph."""
    found = []
    for row in records("training_benchmark", task="step", candidate="all").to_dict("records"):
        found.append(_measured(row, 1, row["batch_size"], True, row["peak_memory_gb"]))
    compiled = {"compile": True, "status": "ok", "wrapper": ["none", "flashddp"]}
    for row in records("lm_matrix", **compiled).to_dict("records"):
        batch, low = row["tr_batch_size"], row["low_precision_weights"]
        if row["cuda_graph"] or batch * row["context_length"] >= FEWEST_TOKENS:
            ranks = 1 if row["wrapper"] == "none" else row["ranks"]
            found.append(_measured(row, ranks, batch, low, row["peak_memory_bytes"] / 1e9))
    return tuple(found)


def _measured(
    row: Mapping[str, Any], ranks: int, batch: int, low: bool, peak_gb: float
) -> Prediction:
    length = row["context_length"]
    model = replace(model_preset(row["model"]), context_length=length)
    tokens_per_s = 1e3 * ranks * batch * length / row["median_ms"]
    return Prediction(
        Run(model, GPUS["H200"], ranks, batch, 1, low), tokens_per_s, peak_gb, "measured"
    )


@functools.cache
def fitted(*steps: Prediction) -> Shares:
    """The shares with which the steps of one GPU in `steps` are predicted best.

    Least squares of log(predicted / measured), one share after the other.
    """
    alone = [step for step in steps if step.run.gpus == 1]
    grid = [share / 100 for share in range(20, 101)]

    def error(shares: Shares) -> float:
        def log(step: Prediction) -> float:
            tokens = step.run.batch_size * step.run.model.context_length
            return math.log(alone_ms(step.run, shares) * step.tokens_per_s / tokens / 1e3)

        return sum(log(step) ** 2 for step in alone)

    best = Shares(0.8, 0.5)
    for _ in range(4):
        best = min((best._replace(matmul=share) for share in grid), key=error)
        best = min((best._replace(bandwidth=share) for share in grid), key=error)
    return best


def left_out_errors() -> list[tuple[Prediction, float]]:
    """Each of our steps, and the relative error of predicting it without its model's records."""
    errors = []
    for step in measured():
        others = [other for other in measured() if _shape(other) != _shape(step)]
        found = predict(step.run, fitted(*others))
        errors.append((step, found.tokens_per_s / step.tokens_per_s - 1))
    return errors


def _shape(step: Prediction) -> ModelConfig:
    return replace(step.run.model, context_length=1)


# Figures that others published, which nothing here is fitted to


@functools.cache
def published() -> pd.DataFrame:
    """The rows of artifacts/published_speeds.csv: what somebody else measured with their own code.

    `assumed` are the parts of the run that `source` does not state, `predicted` the tokens/s that
    it should have, and `error` how far that is off.
    """
    frame = pd.read_csv(ROOT / "artifacts/published_speeds.csv", keep_default_na=False)
    rows = frame.to_dict("records")
    frame["predicted"] = [predict(_published_run(row)).tokens_per_s for row in rows]
    return frame.assign(error=frame["predicted"] / frame["tokens_per_s"] - 1)


def _published_run(row: Mapping[str, Any]) -> Run:
    sizes: Any = {name: row[name] for name in SIZES}
    model = ModelConfig(tied_embeddings=True, **sizes)
    return Run(model, GPUS[row["gpu"]], row["gpus"], row["batch_size"], row["passes"])


# The command


@settings
class PredictConfig:
    """A model, and the GPUs to train it on."""

    model: PresetName = "gpt2-124m"
    """The preset that is trained."""

    gpu: Literal["all", "T4", "L4", "4090", "A100", "H100", "H200", "B200"] = "all"
    """The GPU, or all that are known."""

    gpus: NonNegativeInt = 0
    """GPUs of a host, 1 to 8; 0: one, two, four and eight."""

    context_length: NonNegativeInt = 0
    """Tokens of a sequence; 0: the model's own."""

    batch_size: NonNegativeInt = 0
    """Sequences of a GPU in a pass; 0: a power of two that fits and is on record if one is."""

    passes: PositiveInt = 1
    """Passes whose gradients are added up before an update."""


def answer(
    model: ModelConfig, gpu: str, gpus: int, batch_size: int = 0, passes: int = 1
) -> Prediction:
    """The measured or predicted run; with `batch_size` 0 the largest that fits.

    Raises:
        ValueError: a GPU that is not in `GPUS`, or not 1 to 8 of it.
    """
    require(gpu in GPUS, f"gpu must be one of {', '.join(GPUS)}, got {gpu!r}")
    require(1 <= gpus <= 8, f"gpus must be 1 to 8, those of one host, got {gpus}")
    for step in measured():
        run = step.run
        same = (run.model, run.gpu, run.gpus, passes) == (model, GPUS[gpu], gpus, run.passes)
        if same and batch_size in (0, run.batch_size):
            return step
    largest = max(1, MOST_TOKENS // model.context_length)
    found = predict(Run(model, GPUS[gpu], gpus, batch_size or largest, passes))
    while not (batch_size or found.fits or found.run.batch_size == 1):
        found = predict(found.run._replace(batch_size=found.run.batch_size // 2))
    return found


def row(found: Prediction) -> dict[str, Any]:
    """A prediction as a row of a table, with what is not known about it."""
    run = found.run
    doubts = []
    if run.batch_size * run.model.context_length < FEWEST_TOKENS and found.source == "predicted":
        doubts.append("few tokens: the host may be slower than the GPU")
    if run.gpus > 1 and run.gpu.link_gbs < 100:
        doubts.append("PCIe: no link of its kind was measured")
    cells = {
        "GPU": f"{run.gpus} × {run.gpu.name}",
        "batch": f"{run.batch_size} × {run.model.context_length:,}",
        "tokens/s": f"{found.tokens_per_s:,.0f}" if found.fits else "does not fit",
        "MFU": f"{found.mfu:.0%}" if found.fits else "",
        "peak (GB)": f"{found.peak_gb:.1f} of {run.gpu.memory_gb:g}",
    }
    return cells | {"source": found.source, "not known": "; ".join(doubts)}


def published_rows() -> list[dict[str, Any]]:
    """The published figures, and the errors of predicting them: rows of a table."""
    return [
        {
            "what": row["what"],
            "GPU": f"{row['gpus']} × {GPUS[row['gpu']].name}",
            "published tokens/s": f"{row['tokens_per_s']:,.0f}",
            "predicted": f"{row['predicted']:,.0f}",
            "error": f"{row['error']:+.0%}",
            "source": row["source"],
            "assumed": row["assumed"],
        }
        for row in published().to_dict("records")
    ]


def typical_errors() -> str:
    """A sentence on how far predictions are off."""
    own = [abs(error) for _, error in left_out_errors()]
    others = published()["error"].abs()
    return (
        f"Error, median and largest: {statistics.median(own):.0%} and {max(own):.0%} on "
        f"{len(own)} steps of our own, each predicted without its model's records; "
        f"{others.median():.0%} and {others.max():.0%} on {len(others)} figures that "
        "others published for their own code."
    )


def print_predictions(config: PredictConfig) -> None:
    """Print the table of predictions, and how far to trust it."""
    model = model_preset(config.model)
    model = replace(model, context_length=config.context_length or model.context_length)
    names: Sequence[str] = [*GPUS] if config.gpu == "all" else [config.gpu]
    counts = [config.gpus] if config.gpus else [1, 2, 4, 8]
    found = [
        answer(model, name, count, config.batch_size, config.passes)
        for name in names
        for count in counts
    ]
    print(to_markdown([row(each) for each in found]))
    print("Steps with 16-bit matmuls, torch.compile and flashddp; measured: our record of one.")
    print(typical_errors())
