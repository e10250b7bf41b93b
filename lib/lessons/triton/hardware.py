"""Sizes, bandwidths and latencies of GPUs and a CPU, as a table.

`artifacts/gpu_numbers_notes.md` says where each number comes from.
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
