"""Sizes, bandwidths and latencies of GPUs and a CPU, as a table.

SOURCES says where each number comes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.display import Markdown

from lib.lessons.show import show_table


@dataclass(frozen=True)
class Chip:
    """A processor; sizes in KB, MB and GB, rates in GB/s, TB/s and TFLOP/s."""

    name: str
    units: int
    """Multiprocessors, or cores."""

    registers_kb: float | None
    shared_kb: int
    """Shared memory and L1 of one multiprocessor together; of a core its L1."""

    cache_mb: float
    """The last cache before memory."""

    memory_gb: int | None
    bandwidth_gb_per_s: float
    float32: float
    float16: float | None
    """In matmuls, on tensor cores."""


# Cores, and GHz at base clock; two units per core, each with an FMA (2 FLOP) of 8 float32 numbers.
CPU_CORES, CPU_GHZ, CPU_FLOP_PER_CYCLE = 14, 2.6, 2 * 8 * 2
CPU_TFLOPS = CPU_CORES * CPU_GHZ * CPU_FLOP_PER_CYCLE / 1000
CPU = Chip("Xeon E5-2690 v4", CPU_CORES, None, 32, 35, None, 77, round(CPU_TFLOPS, 1), None)
T4 = Chip("T4", 40, 256, 96, 4, 16, 320, 8.1, 65)
A100 = Chip("A100 (80 GB, SXM)", 108, 256, 192, 40, 80, 2039, 19.5, 312)
H100 = Chip("H100 (SXM)", 132, 256, 256, 50, 80, 3350, 67, 989)
H200 = Chip("H200 (SXM)", 132, 256, 256, 60, 141, 4800, 67, 989)
CHIPS = (CPU, T4, A100, H100, H200)
# A level of memory -> its latency in cycles of this clock; L2 and HBM measured on an H100 (PCIe).
LATENCY_CYCLES = {"shared memory": 30, "L2": 265, "HBM": 658}
CLOCK_GHZ = 1.755
# Chip -> its clock in GHz, and cycles until a number is there: from L1, L2 and memory.
LATENCIES = {
    "A100 (80 GB)": (1.41, 36, 211, 572),
    "H100 (PCIe)": (CLOCK_GHZ, 34, LATENCY_CYCLES["L2"], LATENCY_CYCLES["HBM"]),
}
BENCHES = (
    "[gpu-benches](https://github.com/te42kyfo/gpu-benches/tree/"
    "1c36d509ee717dca9215c27135fa1e611bb03ed1)"
)
# (numbers, document, where in it or how they follow from it)
SOURCES = (
    (
        "Xeon: cores, L3, GB/s",
        "Intel's specifications of the Xeon E5-2690 v4",
        "Total Cores, Cache, Max Memory Bandwidth (76.8 GB/s)",
    ),
    (
        "Xeon: L1",
        "Intel's Optimization Reference Manual",
        "cache parameters of Haswell and Broadwell",
    ),
    (
        "Xeon: TFLOP/s",
        "computed",
        f"{CPU_CORES} cores × {CPU_GHZ} GHz (base clock) × {CPU_FLOP_PER_CYCLE} FLOP/cycle "
        f"(2 units × 8 numbers × multiply and add) = {CPU_TFLOPS:.2f}",
    ),
    ("T4: memory, GB/s, TFLOP/s", "NVIDIA's T4 data sheet", "specifications"),
    ("T4: SMs, registers, L1, L2", "NVIDIA's Turing white paper", "Tesla T4; the Turing SM"),
    ("A100: memory, GB/s, TFLOP/s", "NVIDIA's A100 data sheet", "80 GB SXM, without sparsity"),
    (
        "A100: SMs, registers, L1, L2",
        "NVIDIA's A100 white paper",
        "table 4; Combined L1 Data Cache and Shared Memory",
    ),
    ("H100, H200: memory, GB/s, float32", "NVIDIA's H100 and H200 data sheets", "column SXM"),
    (
        "H100, H200: 989 TFLOP/s",
        "NVIDIA's H100 and H200 data sheets",
        "FP16 Tensor Core: 1,979 with sparsity; dense is half of that",
    ),
    (
        "H100: SMs, registers, L1, L2; H200: the same but L2",
        "NVIDIA's H100 white paper",
        "table 3; Combined L1 Data Cache and Shared Memory",
    ),
    ("H200: L2, 60 MB", "PyTorch on an H200", "`get_device_properties().L2_cache_size`"),
    ("H200: L2, 9.8 TB/s", BENCHES, "`gpu-l2-cache/h200.txt`, buffers of 10 to 40 MB"),
    (
        "A100, H100: clock; cycles of L1, L2, memory",
        BENCHES,
        "`gpu-latency/a100_80.txt` and `gpu-latency/h100_pcie.txt`",
    ),
    (
        "cycles of shared memory, rounded",
        "[Luo et al. (2024)](https://arxiv.org/abs/2402.13499)",
        "latencies of the levels of memory",
    ),
)


def show_chips() -> Markdown:
    """Show the table of chips."""
    rows = []
    for chip in CHIPS:
        row = {"chip": chip.name, "SMs or cores": chip.units}
        row |= {"registers (KB each)": chip.registers_kb, "L1 and shared (KB each)": chip.shared_kb}
        row |= {"L2 or L3 (MB)": chip.cache_mb, "memory (GB)": chip.memory_gb}
        row |= {"GB/s": chip.bandwidth_gb_per_s, "float32 TFLOP/s": chip.float32}
        rows.append(row | {"float16 matmul TFLOP/s": chip.float16})
    # no zeros behind a float
    return show_table(
        [{k: f"{v:g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    )


def show_sources() -> Markdown:
    """Show where each number of the tables and of the drawing `gpu` comes from."""
    return show_table([dict(zip(("numbers", "source", "where"), row)) for row in SOURCES])


def show_latencies() -> Markdown:
    """Show how long one load takes, by where its number is."""
    rows = []
    for chip, (clock, *cycles) in LATENCIES.items():
        row: dict[str, object] = {"chip": chip, "clock (GHz)": clock}
        row |= dict(zip(("L1 (cycles)", "L2 (cycles)", "memory (cycles)"), cycles))
        rows.append(row | {"memory (ns)": round(cycles[-1] / clock)})
    return show_table(rows)
