"""The pictures of notebook 05, and its table of chips beside the data sheets in `lib.core`."""

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from lib.core.files import ROOT
from lib.core.hardware import PEAKS
from lib.lessons.show import DRAWINGS
from lib.lessons.triton import hardware, records
from lib.lessons.triton.figures import show_run
from lib.lessons.triton.recorder_triton import watch


@triton.jit
def shifted(x_ptr, y_ptr, shift, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * shift + tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets))


def texts_of_run(shift, drawn, **options):
    """(texts of each panel, text of the legend) of a run of three programs on ten elements."""
    show_run(watch(shifted, (3,), torch.zeros(10), torch.zeros(10), shift, BLOCK=4), **options)
    figure = drawn[-1]
    panels = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    legends = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return panels, legends


def test_each_cell_has_the_program_that_touched_it(drawn):
    panels, legends = texts_of_run(3, drawn)
    assert panels == [["0", "0", "0", "×2", "1", "1", "×2", "2", "2", "2"]] * 2
    assert legends == ["programs 0 and 1 both store element 3 of y"]
    assert texts_of_run(4, drawn)[1] == ["program 2 loads element 10 of x, which has 10 elements"]
    assert texts_of_run(3, drawn, only=1)[0] == [["1"] * 4] * 2


@pytest.mark.parametrize(
    ("chip", "name"),
    [
        (hardware.T4, "T4"),
        (hardware.A100, "A100-SXM4-80GB"),
        (hardware.H100, "H100 80GB HBM3"),
        (hardware.H200, "H200"),
    ],
)
def test_the_table_agrees_with_the_data_sheets(chip, name):
    peak = PEAKS[name]
    assert chip.bandwidth_gb_per_s == peak.bandwidth / 1e9
    assert chip.float32 == pytest.approx(peak.float32 / 1e12, rel=0.005)
    assert chip.float16 == pytest.approx(peak.float16 / 1e12, rel=0.005)


def test_the_drawings_show_what_the_table_says():
    drawing = (DRAWINGS / "gpu.svg").read_text(encoding="utf-8")
    levels = (DRAWINGS / "memory_hierarchy.svg").read_text(encoding="utf-8")
    for text in ("132 streaming", "256 KB", "60 MB", "141 GB", "4.8 TB/s"):
        assert text in drawing
    # 989 TFLOP/s over 4.8 TB/s
    for text in ("60 MB", "141 GB", "4.8 TB/s", ">206<"):
        assert text in levels


def test_each_chip_of_the_table_has_a_source():
    notes = (ROOT / "artifacts/gpu_numbers_notes.md").read_text(encoding="utf-8")
    sources = notes.partition("| numbers | source | where |")[2]
    for chip in hardware.CHIPS:
        assert f"| {chip.name.split()[0]}" in sources or f", {chip.name.split()[0]}" in sources
    assert f"{hardware.CLOCK_GHZ} | 34 | {hardware.LATENCY_CYCLES['L2']} | " in notes


def test_the_records_have_the_kernels_of_the_notebook(capsys):
    recorded = records.recorded_kernels()
    assert "NVIDIA H200" in capsys.readouterr().out
    assert {"_add_rms_norm_kernel", "_swiglu_kernel", "_swiglu_backward_kernel"} <= set(recorded)
    assert [point.name for point in records.recorded_points("RMSNorm")] == ["RMSNorm"]
    own = records.own_kernels()
    assert {"rms_norm", "softmax", "add_bias", "F.rms_norm", "matmul, groups of 16"} <= own.keys()
