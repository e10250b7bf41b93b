"""How fast a T4 should run the CUDA C++ attention kernels, from their machine code.

Nobody needs a T4 for it. The main loop of each kernel is disassembled, and the cycles that its
instructions take on each pipe of a multiprocessor are counted. A round takes at least the cycles of
the busiest pipe, and at most those of all pipes, one after another. Where in between, an H200 says,
which runs the code for a T4 too: the prediction is one share of the sum, the same for all kernels
and both chips, and its error on the H200 is shown.

`python -m lib benchmark attention-prediction` measures where there is a GPU, needs `cuobjdump` and
`ptxas` of a CUDA toolkit, and writes attention_prediction.jsonl and .md.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
import subprocess
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

from lib.benchmarks.sections import Section, Table, write_report
from lib.core.hardware import local_results, pick_device
from lib.core.records import Record, append_record, new_record, read_records
from lib.core.settings import require, settings
from lib.flash_attention.cuda import launch
from lib.flash_attention.cuda.build import build
from lib.profiling.measurement import measure

# The matmuls of a kernel, each 2 · rows · columns · head_dim FLOP.
MATMULS = {"forward": 2, "grad_queries": 3, "grad_keys": 4}
HEAD_DIMS = (64, 128)
# Code for a T4 that the driver compiles for any later chip.
T4_CODE = "compute_75"
# Opcodes -> the pipe of a quarter of a multiprocessor that they occupy; the first match counts.
PIPES = {
    r"HMMA": "tensor",
    r"F2FP": "alu",
    r"MUFU|F2F|F2I|I2F": "special",
    r"LDSM": "matrices from shared memory",
    r"LDS|STS|LDG|STG|LDL|STL|SHFL": "memory",
    r"FFMA|FMUL|FADD|IMAD": "fma",
    r"BAR|BRA|BSSY|BSYNC|NOP|DEPBAR|U[A-Z]|WARPSYNC|R2UR|S2R|S2UR|CS2R": "none",
    r".": "alu",
}


@dataclasses.dataclass(frozen=True)
class Chip:
    """A GPU, as the model sees it."""

    name: str
    architecture: str
    multiprocessors: int
    gigahertz: float
    peak: float  # TFLOP/s of float16 with float32 sums
    cycles: dict[str, float]  # of a pipe, for an instruction of one warp on a quarter


# Turing's white paper: a quarter has 16 lanes for float32 and integers each, 4 for special
# functions, tensor cores of 128 multiply-adds a cycle (m16n8k8 has 1,024); the four quarters share
# 16 units that load and store 4 bytes a cycle, and ldmatrix.x4 brings 512 bytes.
T4 = Chip(
    "T4",
    "sm_75",
    multiprocessors=40,
    gigahertz=1.59,
    peak=65.0,
    cycles={
        "tensor": 8.0,
        "special": 8.0,
        "matrices from shared memory": 32.0,
        "memory": 8.0,
        "fma": 2.0,
        "alu": 2.0,
        "none": 1.0,
    },
)
# Measured on one with loops of a single instruction, 16 warps on a multiprocessor.
H200 = Chip(
    "NVIDIA H200",
    "sm_90",
    multiprocessors=132,
    gigahertz=1.98,
    peak=989.4,
    cycles={
        "tensor": 4.18,
        "special": 8.03,
        "matrices from shared memory": 16.0,
        "memory": 4.03,
        "fma": 1.69,
        "alu": 2.54,
        "none": 1.0,
    },
)


@settings
class AttentionPredictionConfig:
    """A T4's speed on the CUDA C++ attention kernels, predicted from their machine code."""

    device: str = "auto"
    """A CUDA GPU measures the kernels too; the prediction counts what an H200 measured."""

    output: Path = dataclasses.field(default_factory=local_results)
    """Folder for records and table."""


def predict_attention(config: AttentionPredictionConfig) -> list[Record]:
    """Measure the kernels where there is a GPU; write the prediction; return the records."""
    path = config.output / "attention_prediction.jsonl"
    device = pick_device(config.device)
    if device.type == "cuda":
        for case in kernel_cases():
            append_record(
                path, new_record(measure_kernel(*case, device), config=None, device=device)
            )
    measured = {
        (r["figures"]["kernel"], r["figures"]["head_dim"]): r["figures"]["tflops"]
        for r in read_records(path)
        if r["device"] == H200.name
    }
    require(bool(measured), f"{path} must have a measurement of an {H200.name}, got none")
    write_prediction(measured, config.output / "attention_prediction.md")
    return read_records(path)


def kernel_cases() -> list[tuple[str, int]]:
    """The kernels and head sizes that are predicted."""
    return [(kernel, dim) for dim in HEAD_DIMS for kernel in MATMULS]


# From machine code to cycles


def disassemble(kernel: str, dim: int, architecture: str) -> str:
    """The machine code of a T4's kernel: compiled for it, or for `architecture` from its PTX."""
    file = launch.FILES[kernel]
    macros = launch.constants(launch.TILES[file, dim], dim, is_bfloat16=False)
    require(bool(shutil.which("cuobjdump")), "cuobjdump must be on the PATH; it is part of CUDA")
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        if architecture == T4.architecture:
            cubin.write_bytes(build(file, macros, architecture))
        else:
            ptx.write_bytes(build(file, macros, T4_CODE).rstrip(b"\0"))
            command = ["ptxas", f"--gpu-name={architecture}", "-o", str(cubin), str(ptx)]
            subprocess.run(command, check=True)
        command = ["cuobjdump", "--dump-sass", "--function", kernel, str(cubin)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main_loop(code: str) -> Counter[str]:
    """Count the opcodes that a warp runs in one round of the innermost loop with matmuls.

    As in most rounds: without the part that hides scores at the edges, nor the one that rescales.
    """
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", code)
    lines = [(int(address, 16), opcode, rest) for address, _, opcode, rest in found]
    jumps = {}
    for address, opcode, rest in lines:
        if opcode.startswith("BRA") and (target := re.search(r"0x([0-9a-f]+)", rest)):
            jumps[address] = int(target[1], 16)

    def between(start: int, end: int) -> list[str]:
        return [opcode for address, opcode, _ in lines if start <= address < end]

    loops = [(to, at) for at, to in jumps.items() if to < at and _has("HMMA", between(to, at))]
    start, end = min(loops, key=lambda loop: loop[1] - loop[0])
    counts: Counter[str] = Counter()
    address_after_jump = start
    for address, opcode, _ in lines:
        if not start <= address <= end or address < address_after_jump:
            continue
        counts[opcode] += 1
        target = jumps.get(address, 0)
        is_optional = address < target <= end
        # what is jumped over in most rounds has nothing that the others wait for
        if is_optional and not _has("HMMA|LDSM|LDG|STS|BAR", between(address + 1, target)):
            address_after_jump = target
    return counts


def _has(pattern: str, opcodes: list[str]) -> bool:
    return any(re.match(pattern, opcode) for opcode in opcodes)


def pipe_cycles(counts: Counter[str], chip: Chip) -> dict[str, float]:
    """The cycles of each pipe, and of the scheduler, which issues one instruction a cycle."""
    cycles = defaultdict(float, scheduler=float(sum(counts.values())))
    for opcode, count in counts.items():
        pipe = next(pipe for pattern, pipe in PIPES.items() if re.match(pattern, opcode))
        cycles[pipe] += count * chip.cycles[pipe]
    return {pipe: total for pipe, total in cycles.items() if pipe != "none"}


@dataclasses.dataclass(frozen=True)
class Round:
    """A round of a kernel's main loop on a chip, for one warp."""

    chip: Chip
    flops: int
    cycles: dict[str, float]  # of each pipe

    def tflops(self, cycles: float) -> float:
        """The chip's speed if a quarter of a multiprocessor takes this many cycles a round."""
        rounds = 4 * self.chip.multiprocessors * self.chip.gigahertz / cycles
        return self.flops * rounds / 1000

    @property
    def busiest(self) -> str:
        """The pipe that takes longest."""
        return max(self.cycles, key=self.cycles.__getitem__)

    @property
    def longest(self) -> float:
        """The cycles of the busiest pipe."""
        return self.cycles[self.busiest]

    @property
    def sum(self) -> float:
        """The cycles of all pipes, one after another."""
        return sum(self.cycles.values()) - self.cycles["scheduler"]


def find_round(kernel: str, dim: int, chip: Chip) -> Round:
    """A round of the main loop of a T4's kernel on a chip."""
    tiles = launch.TILES[launch.FILES[kernel], dim]
    flops = 2 * MATMULS[kernel] * (tiles.rows // tiles.warps) * tiles.columns * dim
    counts = main_loop(disassemble(kernel, dim, chip.architecture))
    return Round(chip, flops, pipe_cycles(counts, chip))


def predict(
    here: dict[tuple, Round], there: dict[tuple, Round], measured: dict[tuple, float]
) -> list[dict[str, Any]]:
    """A row for each kernel: what was measured here, and what is predicted here and there.

    Args:
        here, there: the round of each kernel, (name, head_dim), on two chips.
        measured: TFLOP/s of each kernel here.
    """
    shares = [here[case].tflops(here[case].sum) / measured[case] for case in here]
    share = sum(shares) / len(shares)

    def predicted(code: Round) -> float:
        return code.tflops(max(code.longest, share * code.sum))

    rows = []
    for case in here:
        mine, theirs = here[case], there[case]
        rows.append(
            {
                "kernel": case[0],
                "head_dim": case[1],
                "H200: at least": mine.tflops(mine.sum),
                "at most": mine.tflops(mine.longest),
                "predicted": predicted(mine),
                "measured": measured[case],
                "predicted / measured": predicted(mine) / measured[case],
                "T4: at least": theirs.tflops(theirs.sum),
                "at most ": theirs.tflops(theirs.longest),
                "predicted ": predicted(theirs),
                "of its 65": predicted(theirs) / theirs.chip.peak,
            }
        )
    return rows


# Measuring and reporting


def measure_kernel(kernel: str, dim: int, device: torch.device) -> dict[str, Any]:
    """TFLOP/s of a T4's kernel on this GPU: 4 sequences of 4,096 tokens, width 2,048, no mask."""
    q, k, v, out, grad_out = (
        torch.randn(4, 2048 // dim, 4096, dim, device=device, dtype=torch.float16) for _ in range(5)
    )
    scale = dim**-0.5
    _, lse = launch.flash_forward(q, k, v, False, scale)
    ready = launch.load_kernel(kernel, q, T4_CODE)
    tensors = {"out": out}
    if kernel != "forward":
        grads = {f"grad_{name}": torch.empty_like(q) for name in "qkv"}
        tensors |= {"grad_out": grad_out, **grads}
    numbers = {"lse": lse, "delta": torch.zeros_like(lse)}
    arguments = launch.kernel_arguments(q, k, v, False, scale, **numbers, **tensors)
    blocks = launch.num_blocks(q, ready)
    run = functools.partial(ready.launch, blocks, arguments)
    ms = measure(run, device=device, samples=10, min_sample_ms=0.0).median_ms
    flops = 2 * MATMULS[kernel] * q.numel() * k.shape[2]
    return {"kernel": kernel, "head_dim": dim, "ms": ms, "tflops": flops / ms / 1e9}


def passes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Both passes on a T4 by the usual count: five matmuls backward, where our kernels do seven."""
    speed = {(row["kernel"], row["head_dim"]): row["predicted "] for row in rows}
    table = []
    for dim in HEAD_DIMS:
        seconds = sum(MATMULS[name] / speed[name, dim] for name in ("grad_queries", "grad_keys"))
        forward, backward = speed["forward", dim], 5 / seconds
        shares = {"of its 65": forward / T4.peak, "backward of its 65": backward / T4.peak}
        table.append({"head_dim": dim, "forward": forward, "backward": backward, **shares})
    return table


def write_prediction(measured: dict[tuple[str, int], float], path: Path) -> None:
    """Write the tables, from TFLOP/s of each kernel on an H200."""
    here = {case: find_round(*case, H200) for case in kernel_cases()}
    there = {case: find_round(*case, T4) for case in kernel_cases()}
    rows = predict(here, there, measured)
    cycles = [
        {"kernel": kernel, "head_dim": dim, "busiest": code.busiest, **code.cycles}
        for (kernel, dim), code in there.items()
    ]
    parts: list[str | Table] = [
        "TFLOP/s of the code for a T4, without a mask: between all pipes one after another (at "
        "least) and the busiest alone (at most). The prediction takes one share of the sum for all "
        "kernels, which is fitted to the measurements on the H200.",
        Table(rows),
        "Both passes on a T4 at 1.59 GHz. Held to 70 watts, it lowers its clock, and its speed.",
        Table(passes(rows)),
        "Cycles of a round of the main loop on a quarter of a T4's multiprocessor, for one warp:",
        Table(cycles),
    ]
    write_report(path, [Section("A T4's speed, predicted from machine code", parts, level=1)])
