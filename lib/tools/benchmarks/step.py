"""Time and memory of training steps by model, context, mode, precision and compilation.

`StepBench` measures one case after another, and `predicted_memory` estimates how much memory each
takes. A case whose estimate exceeds the memory of a CPU is not tried.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from torch import Tensor

from lib.core.allocator import Function, count_launches, free_memory
from lib.core.figures import COLORS, MARKERS, house_figure, save_figure
from lib.core.hardware import (
    device_name,
    keep_freed_memory,
    local_results,
    peak,
    peak_flops,
    pick_device,
    pick_dtype,
)
from lib.core.records import Record
from lib.core.settings import NonEmpty, NonNegativeInt, PositiveFloat, PositiveInt, settings
from lib.model.config import AttentionKernel, ModelConfig, model_preset
from lib.model.costs import activation_bytes, flops_per_token, num_parameters, parameters_by_part
from lib.model.loss import CHUNK_BYTES, CHUNK_PART
from lib.model.transformer import TransformerLM
from lib.profiling.measurement import measure
from lib.tools.benchmarks.sections import (
    SAMPLING,
    Section,
    Table,
    measured_on,
    newest,
    to_frame,
    write_csv,
    write_report,
)
from lib.tools.benchmarks.sweep import records_like, run_sweep
from lib.training.config import TrainConfig
from lib.training.step import TrainStep, numerics

# Modes, and how the figure's legend names them.
MODES = {"forward": "forward", "forward_backward": "with backward", "full_step": "with update"}
# Default models and lengths.
CPU_SIZES = (("tiny",), (32, 64, 128))
GPU_SIZES = (("small", "medium", "large", "xl"), (128, 256, 512, 1024))
# A case is tried if its estimate is at most this many times the device's memory. A GPU reports what
# does not fit; a CPU's system may kill the process instead.
TRIED_UP_TO = {"cuda": 1.2}
NOTE = """`float32` is IEEE, a shorter type is autocast. Launches are kernels on a GPU and
operators on a CPU. `oom`: out of memory, or predicted to be."""
COLUMNS = {
    "model": "model",
    "batch_size": "batch",
    "seq_len": "context",
    "mode": "mode",
    "precision": "dtype",
    "compile": "compiled",
    "attention_kernel": "attention",
    "status": "status",
    "median_ms": "median (ms)",
    "mean_ms": "mean (ms)",
    "iqr_ms": "IQR (ms)",
    "samples": "samples",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
    "launches": "launches",
    "peak_memory_gb": "peak memory (GB)",
    "predicted_memory_gb": "predicted (GB)",
}


@settings
class StepBenchmarkConfig:
    """Training steps by model size, context, mode, precision and compilation."""

    configs: tuple[str, ...] = ()
    """Model presets; if empty, `tiny` on CPU, `small` to `xl` on GPU."""

    batch_size: PositiveInt = 4
    """Sequences per step."""

    seq_lens: tuple[PositiveInt, ...] = ()
    """Tokens per sequence; if empty, 32, 64 and 128 on CPU, 128 to 1024 on GPU."""

    modes: Annotated[tuple[Literal["forward", "forward_backward", "full_step"], ...], NonEmpty] = (
        "forward",
        "forward_backward",
        "full_step",
    )
    """The loss alone, with its gradients, or with clipping and AdamW too."""

    mixed_precision: bool = False
    """Run matmuls in the 16-bit dtype that is fast on the device, not in float32."""

    compare_precision: bool = False
    """Measure both precisions."""

    tf32: bool = False
    """Let float32 matmuls use TF32."""

    compile: bool = False
    """Fuse each layer with `torch.compile`."""

    compare_compile: bool = False
    """Measure both eager and compiled."""

    attention_kernel: Annotated[tuple[AttentionKernel, ...], NonEmpty] = ("sdpa",)
    """Attention kernels."""

    samples: PositiveInt = 10
    """Samples of each case; fewer, but at least 3, if they exceed max_seconds."""

    warmup: PositiveInt = 3
    """Steps before sampling."""

    max_seconds: PositiveFloat = 2.0
    """Approximate time limit for the samples of one case."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:N` or `mps`."""

    seed: NonNegativeInt = 0
    """Seed of weights and tokens."""

    restart: bool = False
    """Measure again what already has a record."""

    output: Path = dataclasses.field(default_factory=local_results)
    """Folder for records, table and figure."""


@dataclasses.dataclass(frozen=True)
class StepCase:
    """One record of the benchmark: a `mode` of a step on (batch_size, seq_len) tokens.

    The `dtype` of matmuls is `float32`, or a shorter type by autocast. The step is warmed up
    `warmup` times and sampled at most `samples` times, in about `max_seconds`.
    """

    model: str
    mode: str
    batch_size: int
    seq_len: int
    dtype: str
    tf32: bool
    compile: bool
    attention_kernel: str
    warmup: int
    samples: int
    max_seconds: float

    @property
    def shape(self) -> ModelConfig:
        """The model, for sequences of this length."""
        return dataclasses.replace(
            model_preset(self.model),
            context_length=self.seq_len,
            attention_kernel=self.attention_kernel,
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as PyTorch's."""
        return getattr(torch, self.dtype)


def benchmark_step(config: StepBenchmarkConfig) -> list[Record]:
    """Measure the cases of `config` that have no record yet; write table and figure.

    Writes step_benchmark.jsonl to the folder `output`, and from all its records of this device and
    these versions step_benchmark.csv, .md and .png.

    Returns:
        The records of the cases of `config`.
    """
    device = pick_device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    cases = step_cases(config, device)
    if any(_peak_flops(case, device) is None for case in cases):
        print(f"the peak FLOP/s of {device_name(device)} are not known, so there is no MFU")
    path = config.output / "step_benchmark.jsonl"
    bench = StepBench(config, device)
    records = run_sweep(
        path,
        cases,
        bench.run,
        expect=bench.expect,
        show=_line,
        seed=config.seed,
        device=device,
        restart=config.restart,
    )
    write_step_report(records_like(path, records[0]), config.output)
    return records


def step_cases(config: StepBenchmarkConfig, device: torch.device) -> list[StepCase]:
    """List the cases of `config`, neighbors sharing a model or compiled code.

    Raises:
        ValueError: a model preset or an attention kernel is unknown.
    """
    names, lengths = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    # "auto" is float32 on a CPU, which has bfloat16 too
    short = pick_dtype(device, "auto" if device.type == "cuda" else "bfloat16")
    short = str(short).removeprefix("torch.")
    dtypes = (short,) if config.mixed_precision else ("float32",)
    cases = [
        StepCase(
            model=name,
            mode=mode,
            batch_size=config.batch_size,
            seq_len=length,
            dtype=dtype,
            tf32=config.tf32,
            compile=is_compiled,
            attention_kernel=kernel,
            warmup=config.warmup,
            samples=config.samples,
            max_seconds=config.max_seconds,
        )
        for name, is_compiled, dtype, kernel, length, mode in itertools.product(
            config.configs or names,
            (False, True) if config.compare_compile else (config.compile,),
            ("float32", short) if config.compare_precision else dtypes,
            config.attention_kernel,
            config.seq_lens or lengths,
            config.modes,
        )
    ]
    for case in cases:
        _ = case.shape  # raises for an unknown preset or kernel
    return cases


class StepBench:
    """Measures cases one after another, and keeps the model for the next case if it fits."""

    def __init__(self, config: StepBenchmarkConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.device_memory = device_memory(device)
        self.max_length = max(case.seq_len for case in step_cases(config, device))
        self.model: TransformerLM | None = None
        self.model_key: tuple | None = None
        self.code_key: tuple | None = None

    def expect(self, case: StepCase) -> dict[str, Any]:
        """The figures of a case that are known before it is measured."""
        predicted = predicted_memory(case, self.device)
        figures: dict[str, Any] = {
            "parameters": num_parameters(case.shape),
            "flops": _flops_per_token(case) * case.batch_size * case.seq_len,
            "predicted_memory_gb": predicted and predicted / 1e9,
        }
        if predicted is None:
            figures["not_predicted"] = f"the compiler decides what {case.attention_kernel} keeps"
        return figures

    def run(self, case: StepCase) -> dict[str, Any]:
        """Measure a case, unless it is far too large."""
        limit = (self.device_memory or float("inf")) * TRIED_UP_TO.get(self.device.type, 1.0)
        predicted = predicted_memory(case, self.device)
        if predicted is not None and predicted > limit:
            return {"status": "oom", "was_tried": False}
        try:
            with numerics(tf32=case.tf32, deterministic=False):
                return self._measure(case)
        except BaseException:
            self._drop_model()
            raise

    def _measure(self, case: StepCase) -> dict[str, Any]:
        # time and memory
        step = self._train_step(case)
        fn = _function(step, case, self.config.seed)
        sampling = {name: getattr(case, name) for name in SAMPLING}
        measured = measure(fn, device=self.device, **sampling)
        figures = measured.figures() | {"was_tried": True}
        if measured.status == "oom":
            del step, fn
            self._drop_model()
            return figures

        # speed, memory of the model and its step together, launches
        rate = case.batch_size * case.seq_len / measured.median_ms * 1e3
        limit, allocated = _peak_flops(case, self.device), measured.peak_memory_bytes
        figures["tokens_per_s"] = rate
        figures["mfu"] = limit and rate * _flops_per_token(case) / limit
        if allocated is not None:
            figures["peak_memory_gb"] = (allocated + state_bytes(step)) / 1e9
        figures["launches"] = count_launches(fn, self.device)
        if case.compile:
            breaks = torch._dynamo.utils.counters["graph_break"]
            figures["graph_breaks"] = sum(breaks.values())

        # free the optimizer state now; reference cycles would keep it until they are collected
        step.optimizer.state.clear()
        return figures

    def _train_step(self, case: StepCase) -> TrainStep:
        """The training step of a case, on the last model if that has the right weights."""
        key = (case.model, case.compile)
        if key != self.model_key:
            self._drop_model()
            generator = torch.Generator(self.device).manual_seed(self.config.seed)
            shape = dataclasses.replace(case.shape, context_length=self.max_length)
            self.model = TransformerLM(shape, device=self.device, generator=generator)
            if case.compile:
                self.model.compile_blocks()
            self.model_key = key
        code_key = (*key, case.dtype, case.seq_len, case.attention_kernel)
        if case.compile and code_key != self.code_key:
            # otherwise the compiler keeps code for every length, up to a limit
            torch.compiler.reset()
            torch._dynamo.utils.counters.clear()
            self.code_key = code_key
        self.model.config = case.shape
        for layer in self.model.layers:
            layer.attn.kernel = case.attention_kernel
        settings = TrainConfig(model=case.shape, batch_size=case.batch_size, steps=10**6)
        return TrainStep(self.model, settings, self.device, case.torch_dtype)

    def _drop_model(self) -> None:
        self.model = self.model_key = None
        if self.code_key is not None:
            torch.compiler.reset()
        free_memory()


def _function(step: TrainStep, case: StepCase, seed: int) -> Function:
    """The function to measure: the mode of `case`, on the same random tokens each time."""
    model = step.model
    generator = torch.Generator().manual_seed(seed)
    size = (case.batch_size, case.seq_len + 1)
    tokens = torch.randint(case.shape.vocab_size, size, generator=generator).to(step.device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss() -> Tensor:
        with step.autocast():
            return model.loss(inputs, targets)

    def forward() -> None:
        with torch.no_grad():
            loss()

    def forward_backward() -> None:
        step.backward(loss())
        model.zero_grad(set_to_none=True)

    def full_step() -> None:
        step(tokens, 1e-4)

    functions = {"forward": forward, "forward_backward": forward_backward, "full_step": full_step}
    return functions[case.mode]


def state_bytes(step: TrainStep) -> int:
    """Bytes that stay allocated between steps: weights, buffers and optimizer state."""
    states = [tensor for state in step.optimizer.state.values() for tensor in state.values()]
    return sum(
        tensor.nbytes for tensor in (*step.model.parameters(), *step.model.buffers(), *states)
    )


def _flops_per_token(case: StepCase) -> float:
    return flops_per_token(case.shape, backward=case.mode != "forward")


def _peak_flops(case: StepCase, device: torch.device) -> float | None:
    """The datasheet FLOP/s of the device for the matmuls of a case."""
    if device.type == "cuda" and case.dtype == "float32" and case.tf32:
        limits = peak(device_name(device))
        return limits.tf32 if limits else None
    return peak_flops(device, case.torch_dtype)


def predicted_memory(case: StepCase, device: torch.device) -> int | None:
    """Estimate the peak memory of a step in bytes, the model included; None: not predictable.

    With P parameters, weights take 4 P all the time and, in a full step, AdamW's moments 8 P. On
    top of that, at the peak,

    - forward: one layer's tensors or the loss's, and the weights' 16-bit copies under autocast
    - with gradients: either what is kept for the backward pass (`lib.model.costs`), at its start,
      or the gradients, 4 P, at its end; on a CPU AdamW then needs 8 P more.
    """
    shape, on_gpu = case.shape, device.type == "cuda"
    element_bytes = case.torch_dtype.itemsize
    is_short = element_bytes < 4
    width, vocabulary = shape.d_model, shape.vocab_size
    tokens, weights = case.batch_size * case.seq_len, 4 * num_parameters(shape)

    # logits of one chunk; in 16 bits on a CPU the loss also copies them to float32
    most_logits = CHUNK_PART * device_memory(device) if on_gpu else CHUNK_BYTES
    logits = min(tokens * vocabulary * element_bytes, int(most_logits))
    if is_short and not on_gpu:
        logits *= 3

    # the residual stream and its norm, and what lies between the matmuls of the feed-forward layer
    layer = tokens * element_bytes * (4 * width + 3 * shape.ff_width)
    if case.mode == "forward":
        parts = parameters_by_part(shape)
        matrices = parts["attention"] + parts["feed_forward"]
        copies = element_bytes * matrices if is_short and not case.compile else 0
        head = (tokens + is_short * vocabulary) * width * element_bytes
        return weights + copies + max(layer + _score_bytes(case), logits + head)
    try:
        options: dict = {"element_bytes": element_bytes, "autocast": is_short, "cuda": on_gpu}
        kept = activation_bytes(shape, case.batch_size, **options)
    except ValueError:
        return None
    if case.mode == "forward_backward":
        return weights + max(kept + max(layer, logits), weights)
    update = weights if on_gpu else 3 * weights
    return 3 * weights + max(kept + max(layer, logits), update)


def _score_bytes(case: StepCase) -> int:
    """Bytes of a naive kernel: scores, a masked copy and exponentials, all in float32."""
    if case.attention_kernel == "sdpa" or case.attention_kernel.startswith("flash_attention"):
        return 0
    heads = case.batch_size * case.shape.num_heads
    # that kernel computes one head at a time
    heads = 1 if case.attention_kernel == "scaled_dot_prod_attention" else heads
    return 12 * heads * case.seq_len**2


def device_memory(device: torch.device) -> int | None:
    """Total memory of `device` in bytes; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _line(record: Record) -> str:
    """Describe a finished case in one line, for the log."""
    case, figures = record["config"], record["figures"]
    words = [case[key] for key in ("model", "mode", "seq_len", "dtype", "attention_kernel")]
    text = " ".join(map(str, [*words, "compiled" if case["compile"] else "eager"]))
    predicted = figures["predicted_memory_gb"]
    estimate = f"predicted {predicted:.2f} GB" if predicted else figures["not_predicted"]
    if figures["status"] == "oom":
        return f"{text}: oom ({estimate})"
    text += f": {figures['median_ms']:.2f} ms ± {figures['iqr_ms'] / 2:.2f}"
    text += f", {figures['tokens_per_s']:,.0f} tokens/s"
    if figures["mfu"] is not None:
        text += f", MFU {figures['mfu']:.1%}"
    if "peak_memory_gb" in figures:
        text += f", {figures['peak_memory_gb']:.2f} GB ({estimate})"
    return text


def write_step_report(records: Sequence[Record], output: Path) -> None:
    """Write step_benchmark.csv, .md and .png from the newest record of each case."""
    records = sorted(newest(records), key=lambda record: record["figures"]["parameters"])
    frame = to_frame(records)
    frame["precision"] = frame["dtype"].mask(
        frame["tf32"].astype(bool) & (frame["dtype"] == "float32"), "TF32"
    )
    # if memory ran out in every case, there are no figures
    frame = frame.reindex(columns=list(dict.fromkeys([*frame.columns, *COLUMNS])))
    parts: list[str | Table] = [f"{measured_on(records)}. {NOTE}", Table(frame, COLUMNS)]
    write_report(output / "step_benchmark.md", [Section("Training steps", parts, level=1)])
    write_csv(output / "step_benchmark.csv", records)
    save_step_figure(frame, output / "step_benchmark.png")


def save_step_figure(frame: pd.DataFrame, path: str | os.PathLike) -> Path:
    """Draw time and memory of steps, a column of panels for each precision and compilation.

    Above: milliseconds per step by model and mode at the longest context. Below: the peak memory of
    the most complete mode against the context, with the prediction dotted. Of several batch sizes,
    the figure shows the one measured last.
    """
    batch_size = frame.sort_values("date", kind="stable")["batch_size"].iloc[-1]
    frame = frame[frame["batch_size"] == batch_size]
    compiled = frame["compile"].map({True: "compiled", False: "eager"})
    names = frame["precision"] + ", " + compiled + "\n" + frame["attention_kernel"]
    variants = frame.groupby(names, sort=False)
    models = list(frame["model"].unique())
    modes = [mode for mode in MODES if mode in set(frame["mode"])]
    longest = frame["seq_len"].max()
    shape = {"nrows": 2, "ncols": len(variants), "squeeze": False, "sharey": "row"}
    with house_figure(width=3.6 * len(variants) + 0.6, height=7.4, **shape) as (figure, grid):
        for (times, memory), (name, rows) in zip(grid.T, variants):
            _draw_times(times, rows[rows["seq_len"] == longest], models, modes)
            times.set(title=name, xlabel=f"model, {longest:,} tokens", ylabel="time per step (ms)")
            _draw_memory(memory, rows[rows["mode"] == modes[-1]], models)
            memory.set(title=f"memory, {modes[-1].replace('_', ' ')}")
            memory.set(xlabel="context length (tokens)", ylabel="peak memory (GB)")
        # set the limit last, otherwise the axis would not grow with later lines
        grid[1, 0].set_ylim(bottom=0)
        for row in grid:
            # the legend of the panel with the most lines
            fullest = max(row, key=lambda axes: len(axes.get_legend_handles_labels()[1]))
            if fullest.get_legend_handles_labels()[1]:
                fullest.legend(fontsize="small")
        return save_figure(figure, path)


def _draw_times(axes: Axes, rows: pd.DataFrame, models: Sequence[str], modes: Sequence) -> None:
    """Draw a point for each model and mode; `oom` if memory ran out."""
    axes.set(yscale="log", xlim=(-0.6, len(models) - 0.4))
    for index, mode in enumerate(modes):
        found = rows[rows["mode"] == mode].drop_duplicates("model", keep="last")
        found = found.set_index("model").reindex(models)
        x = np.arange(len(models)) + (index - (len(modes) - 1) / 2) * 0.25
        style = {"color": COLORS[index], "marker": MARKERS[index], "linestyle": ""}
        axes.plot(x, found["median_ms"].astype(float), label=MODES[mode], **style)
        for center in x[found["status"] == "oom"]:
            where = {"transform": axes.get_xaxis_transform(), "ha": "center", "rotation": 90}
            axes.text(center, 0.02, "oom", color=COLORS[index], fontsize="small", **where)
    axes.set_xticks(range(len(models)), models)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(visible=False, axis="x")


def _draw_memory(axes: Axes, rows: pd.DataFrame, models: Sequence[str]) -> None:
    """Draw a line for each model, and its prediction dotted."""
    for index, model in enumerate(models):
        found = rows[rows["model"] == model].sort_values("seq_len")
        color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
        measured = found.dropna(subset=["peak_memory_gb"])
        label = model if len(measured) else None
        line: dict = {"color": color, "marker": marker, "linestyle": "-", "label": label}
        axes.plot(measured["seq_len"], measured["peak_memory_gb"], **line)
        predicted = found.dropna(subset=["predicted_memory_gb"])
        line |= {"marker": "", "linestyle": ":", "alpha": 0.8, "label": None}
        axes.plot(predicted["seq_len"], predicted["predicted_memory_gb"], **line)
    axes.set_xscale("log")
    lengths = sorted(rows["seq_len"].unique())
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
