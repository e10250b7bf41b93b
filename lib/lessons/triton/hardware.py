"""Sizes, bandwidths and latencies of GPUs and a CPU, as a table and as a drawing.

Sources. Sizes, bandwidths and peaks: NVIDIA's data sheets, and its white papers of the Turing,
Ampere and Hopper architectures; Intel's page of the Xeon E5-2690 v4; the H200's L2, as PyTorch
reports it on one. Bandwidth of that L2: gpu-benches (`gpu-l2-cache/h200.txt`). Latencies of L1, L2
and memory: gpu-benches (`gpu-latency/a100_80.txt` and `h100_pcie.txt`); of shared memory, rounded:
Luo et al. (2024).
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.display import HTML, Markdown

from lib.lessons.profiling.figures import SVG_STYLE
from lib.lessons.show import show_svg, show_table


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


CPU = Chip("Xeon E5-2690 v4", 14, None, 32, 35, None, 77, 1.2, None)
T4 = Chip("T4", 40, 256, 96, 4, 16, 320, 8.1, 65)
A100 = Chip("A100 (80 GB, SXM)", 108, 256, 192, 40, 80, 2039, 19.5, 312)
H100 = Chip("H100 (SXM)", 132, 256, 256, 50, 80, 3350, 67, 989)
H200 = Chip("H200 (SXM)", 132, 256, 256, 60, 141, 4800, 67, 989)
CHIPS = (CPU, T4, A100, H100, H200)
# A level of memory -> its latency in cycles of this clock, measured on an H100 (PCIe).
LATENCY_CYCLES = {"registers": 1, "shared memory": 30, "L2": 265, "HBM": 658}
CLOCK_GHZ = 1.755
# Chip -> its clock in GHz, and cycles until a number is there: from L1, L2 and memory.
LATENCIES = {
    "A100 (80 GB)": (1.41, 36, 211, 572),
    "H100 (PCIe)": (CLOCK_GHZ, 34, LATENCY_CYCLES["L2"], LATENCY_CYCLES["HBM"]),
}


def show_chips() -> Markdown:
    """Show the table of chips."""
    rows = []
    for chip in CHIPS:
        row = {"chip": chip.name, "SMs or cores": chip.units}
        row |= {"registers (KB each)": chip.registers_kb, "L1 and shared (KB each)": chip.shared_kb}
        row |= {"L2 or L3 (MB)": chip.cache_mb, "memory (GB)": chip.memory_gb}
        row |= {"GB/s": chip.bandwidth_gb_per_s, "float32 TFLOP/s": chip.float32}
        rows.append(row | {"float16 matmul TFLOP/s": chip.float16})
    return show_table([{k: "–" if v is None else v for k, v in row.items()} for row in rows])


def show_latencies() -> Markdown:
    """Show how long one load takes, by where its number is."""
    rows = []
    for chip, (clock, *cycles) in LATENCIES.items():
        row: dict[str, object] = {"chip": chip, "clock (GHz)": clock}
        row |= dict(zip(("L1 (cycles)", "L2 (cycles)", "memory (cycles)"), cycles))
        rows.append(row | {"memory (ns)": round(cycles[-1] / clock)})
    return show_table(rows)


def show_gpu() -> HTML:
    """Show an H200 as boxes: multiprocessors with what is in them, L2, HBM."""
    return show_svg(gpu_svg())


def gpu_svg() -> str:
    """The drawing, on an opaque light card: it reads the same on light and dark pages."""
    parts = [_sm(24 + 244 * i, 62, number) for i, number in enumerate((0, 1, 131))]
    parts.append(_text(505, 176, "…", "name"))
    l2 = "L2 cache, 60 MB: all SMs share it · about 9.7 TB/s · about 270 cycles"
    hbm = "HBM, 141 GB: your tensors are here · 4.8 TB/s · about 660 cycles"
    parts += [_box(24, 316, 712, 48, "#fbe3b0", l2), _box(24, 398, 712, 60, "#f6d6c4", hbm)]
    for x in (134, 378, 622):
        parts.append(_arrow(x, 292, 314))
    parts.append(_arrow(378, 366, 396))
    head = _text(
        24, 30, "An H200: 132 streaming multiprocessors (SMs), one L2 cache, one memory", "name"
    )
    foot = _text(
        24, 484, "Each program of a kernel runs on one SM. It sees no other program.", "note"
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 500" role="img" '
        f'aria-label="{html.escape(gpu_words())}" style="width:760px;max-width:none">'
        f"<style>{SVG_STYLE}</style>"
        '<rect width="760" height="500" rx="10" fill="#FBFAF7" stroke="#D9D6CF"/>'
        f"{head}{''.join(parts)}{foot}</svg>"
    )


def gpu_words() -> str:
    """The drawing in words."""
    return (
        "132 multiprocessors side by side, each with tensor cores, 128 float32 units, 256 KB of "
        "registers and 256 KB of shared memory and L1. Below them the L2 cache of 60 MB, which "
        "they share, and below that HBM, 141 GB at 4.8 TB/s."
    )


def _sm(x: int, y: int, number: int) -> str:
    """One multiprocessor."""
    frame = (
        f'<rect x="{x}" y="{y}" width="224" height="230" rx="8" fill="#eef3f7" stroke="#8a8f98"/>'
    )
    boxes = (
        ("#d6eaf7", "4 tensor cores: matmuls"),
        ("#d6eaf7", "128 float32 units"),
        ("#9fd3ef", "registers 256 KB · 1 cycle"),
        ("#bfe0f5", "shared, L1 256 KB · 30 cycles"),
    )
    inner = [
        _box(x + 10, y + 34 + 48 * i, 204, 40, color, text) for i, (color, text) in enumerate(boxes)
    ]
    return frame + _text(x + 12, y + 24, f"SM {number}", "name") + "".join(inner)


def _box(x: int, y: int, width: int, height: int, color: str, text: str) -> str:
    place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    box = f'<rect {place} rx="6" fill="{color}" stroke="#8a8f98"/>'
    return box + _text(x + 8, y + height // 2 + 5, text, "note" if width < 300 else "")


def _text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{html.escape(text)}</text>'


def _arrow(x: int, top: int, bottom: int) -> str:
    return f'<path d="M{x} {top}V{bottom}" stroke="#222" stroke-width="2" stroke-dasharray="3 3"/>'
