"""Time and memory of training steps: by model, context, mode, precision and compilation."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib import profiling
from lib.allocations import Function, count_launches, free_memory
from lib.benchmark import measure, run_sweep
from lib.benchmark_step_cases import StepCase, device_memory, predicted_memory, step_cases
from lib.config import StepBenchmarkConfig, require
from lib.config_training import TrainConfig
from lib.files import make_folder, write_atomically
from lib.hardware import device_name, keep_freed_memory, peak, peak_flops, pick_device
from lib.memory_profile import memory_snapshot
from lib.model import TransformerLM
from lib.model_costs import flops_per_token, num_parameters
from lib.plots import save_step_figure, step_precision
from lib.report import Record, read_records, to_csv, to_markdown
from lib.train_step import TrainStep, compile_blocks, numerics

# A row is tried unless the estimate is so many times the device's memory. A GPU refuses what does
# not fit; a CPU's system may end the process instead.
TRIED_UP_TO = {"cuda": 1.2}
COLUMNS = {
    "config.model": "model",
    "config.batch_size": "batch",
    "config.seq_len": "context",
    "config.mode": "mode",
    "config.dtype": "dtype",
    "config.compile": "compiled",
    "config.attention_kernel": "attention",
    "figures.status": "status",
    "figures.median_ms": "median (ms)",
    "figures.mean_ms": "mean (ms)",
    "figures.iqr_ms": "IQR (ms)",
    "figures.samples": "samples",
    "figures.tokens_per_s": "tokens/s",
    "figures.mfu": "MFU",
    "figures.launches": "launches",
    "figures.peak_memory_gb": "peak memory (GB)",
    "figures.predicted_memory_gb": "predicted (GB)",
}


def benchmark_step(config: StepBenchmarkConfig) -> list[Record]:
    """Measure what `config` names, unless its records are there; write table and figure.

    The folder `output` gets step_benchmark.csv, .md and .png of all records of this device and
    these versions, and step_benchmark.jsonl unless `output_json` names another file.

    Returns:
        The records of the rows that `config` names.
    """
    device = pick_device(config.device)
    on_gpu = device.type == "cuda"
    for flag in ("nvtx", "memory_profile"):
        wrong = getattr(config, flag) and not on_gpu
        require(not wrong, f"{flag} is True with device {device}; right is: a CUDA device")
    if device.type == "cpu":
        keep_freed_memory()
    cases = step_cases(config, device)
    if any(_peak_flops(case, device) is None for case in cases):
        print(f"the peak FLOP/s of {device_name(device)} are not known, so there is no MFU")
    path = config.output_json or config.output / "step_benchmark.jsonl"
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
    same = ("device", "versions")
    shown = [r for r in read_records(path) if all(r.get(key) == records[0][key] for key in same)]
    write_report(shown, config.output)
    return records


class StepBench:
    """Measures rows one after another; the model stays for the next row where it can."""

    def __init__(self, config: StepBenchmarkConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.device_memory = device_memory(device)
        self.max_length = max(case.seq_len for case in step_cases(config, device))
        self.model: TransformerLM | None = None
        self.model_key: tuple | None = None
        self.code_key: tuple | None = None

    def expect(self, case: StepCase) -> dict[str, Any]:
        """What is known of a row before it is measured."""
        predicted = predicted_memory(case, self.device)
        flops = flops_per_token(case.shape, backward=case.mode != "forward")
        figures = {
            "parameters": num_parameters(case.shape),
            "flops": flops * case.batch_size * case.seq_len,
            "predicted_memory_gb": predicted and predicted / 1e9,
        }
        if predicted is None:
            figures["not_predicted"] = f"the compiler decides what {case.attention_kernel} keeps"
        return figures

    def run(self, case: StepCase) -> dict[str, Any]:
        """The figures of a row."""
        limit = (self.device_memory or float("inf")) * TRIED_UP_TO.get(self.device.type, 1.0)
        predicted = predicted_memory(case, self.device)
        if predicted is not None and predicted > limit:
            return {"status": "oom", "was_tried": False}
        ranges = contextlib.nullcontext()
        if self.config.nvtx:
            ranges = profiling.enabled(nvtx=True)
        try:
            with numerics(tf32=case.tf32, deterministic=False), ranges:
                return self._measure(case)
        except BaseException:
            self._drop_model()
            raise

    def _measure(self, case: StepCase) -> dict[str, Any]:
        step = self._train_step(case)
        fn = _function(step, case, self.config.seed)
        measured = measure(
            fn,
            device=self.device,
            warmup=case.warmup,
            samples=case.samples,
            max_seconds=case.max_seconds,
        )
        figures = measured.figures() | {"was_tried": True}
        if measured.status == "oom":
            del step, fn
            self._drop_model()
            return figures
        rate = case.batch_size * case.seq_len / measured.median_ms * 1e3
        flops = flops_per_token(case.shape, backward=case.mode != "forward")
        peak_rate, allocated = _peak_flops(case, self.device), measured.peak_memory_bytes
        figures["tokens_per_s"] = rate
        figures["mfu"] = peak_rate and rate * flops / peak_rate
        if allocated is not None:
            figures["peak_memory_gb"] = (allocated + state_bytes(step)) / 1e9
        figures["launches"] = count_launches(fn, self.device)
        if case.compile:
            figures["graph_breaks"] = _graph_breaks()
        if self.config.memory_profile:
            folder = self.config.output / "memory"
            make_folder(folder)
            with memory_snapshot(folder / f"{_name(case)}.pickle"):
                fn()
        # the next row has none yet; cycles would keep these until they are collected
        step.optimizer.state.clear()
        return figures

    def _train_step(self, case: StepCase) -> TrainStep:
        """The step of training that the row is about, of the model as the row wants it."""
        key = (case.model, case.compile)
        if key != self.model_key:
            self._drop_model()
            generator = torch.Generator(self.device).manual_seed(self.config.seed)
            shape = dataclasses.replace(case.shape, context_length=self.max_length)
            self.model = TransformerLM(shape, device=self.device, generator=generator)
            if case.compile:
                compile_blocks(self.model)
            self.model_key = key
        code_key = (*key, case.dtype, case.seq_len, case.attention_kernel)
        if case.compile and code_key != self.code_key:
            # else the compiler keeps code for every length, up to a limit
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
    """The step of `case.mode`, on the same random tokens each time."""
    model = step.model
    generator = torch.Generator().manual_seed(seed)
    size = (case.batch_size, case.seq_len + 1)
    windows = torch.randint(case.shape.vocab_size, size, generator=generator).to(step.device)
    inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

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
        step(windows, 1e-4)

    functions = (forward, forward_backward, full_step)
    return {function.__name__: function for function in functions}[case.mode]


def state_bytes(step: TrainStep) -> int:
    """Bytes of what stays between steps: weights, buffers and the optimizer's state."""
    states = [tensor for state in step.optimizer.state.values() for tensor in state.values()]
    return sum(
        tensor.nbytes for tensor in (*step.model.parameters(), *step.model.buffers(), *states)
    )


def _peak_flops(case: StepCase, device: torch.device) -> float | None:
    """The FLOP/s that the device's maker promises for the row's matrix products."""
    if device.type == "cuda" and case.dtype == "float32" and case.tf32:
        limits = peak(device_name(device))
        return limits and limits.tf32
    return peak_flops(device, case.torch_dtype)


def _graph_breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def _name(case: StepCase) -> str:
    compiled = "compiled" if case.compile else "eager"
    return (
        f"{case.model}-{case.mode}-{case.seq_len}-{case.dtype}-{compiled}-{case.attention_kernel}"
    )


def _line(record: Record) -> str:
    case, figures = StepCase(**record["config"]), record["figures"]
    text = f"{_name(case).replace('-', ' ')}: "
    predicted = figures["predicted_memory_gb"]
    memory = f" (predicted {predicted:.2f})" if predicted else f" ({figures['not_predicted']})"
    if figures["status"] == "oom":
        return f"{text}oom{memory.replace(')', ' GB)') if predicted else memory}"
    text += f"{figures['median_ms']:.2f} ms ± {figures['iqr_ms'] / 2:.2f}"
    text += f", {figures['tokens_per_s']:,.0f} tokens/s"
    if figures["mfu"] is not None:
        text += f", MFU {figures['mfu']:.1%}"
    if "peak_memory_gb" in figures:
        text += f", {figures['peak_memory_gb']:.2f} GB{memory}"
    return text


def write_report(records: list[Record], output: Path) -> None:
    """Write step_benchmark.csv, .md and .png of `records`, the newest of each row."""
    settings = ("warmup", "samples", "max_seconds")
    newest = {}
    for record in records:
        newest[tuple(v for k, v in record["config"].items() if k not in settings)] = record
    records = sorted(newest.values(), key=lambda r: r["figures"]["parameters"])
    stem = output / "step_benchmark"
    last = max(records, key=lambda record: record["date"])
    text = (
        f"# Training steps\n\n{last['device']}, torch {last['versions']['torch']}, {last['date']}. "
        "`float32` is IEEE's, a shorter type is autocast's. Launches are kernels on a GPU and "
        "operators on a CPU. `oom`: memory ran out, or would have by the prediction.\n\n"
    )
    rows = [{**r, "config": {**r["config"], "dtype": step_precision(r["config"])}} for r in records]
    present = {f"{part}.{key}" for r in rows for part in ("config", "figures") for key in r[part]}
    columns = {key: heading for key, heading in COLUMNS.items() if key in present}
    write_atomically(f"{stem}.md", text + to_markdown(rows, columns))
    plain = [
        {**r, "figures": {k: v for k, v in r["figures"].items() if k != "times_ms"}}
        for r in records
    ]
    to_csv(plain, f"{stem}.csv")
    save_step_figure(records, f"{stem}.png")
