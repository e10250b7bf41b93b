"""Wrong sentences of the lessons on several GPUs, which must not come back."""

import re

import nbformat
import pytest

from lib.core.files import ROOT
from lib.lessons.ddp import records
from lib.lessons.fsdp.records import flops_per_s

PAGES = {
    path.stem: " ".join(" ".join(c.source for c in nbformat.read(path, as_version=4).cells).split())
    for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
}
LESSONS = ("08_ddp", "09_zero1", "10_fsdp")
# what is wrong with it -> an expression that finds it
WRONG = {
    "a link fitted to NVLink predicts nothing of Ethernet": r"good enough for 90%|A million, the",
    "hidden messages' cost is of one link": r"0\.42 of their time",
    "wrappers of those records were compiled in different ways": r"overlap can lose",
    "activations set the peak of zero1, not gradients": r"peak comes before that, while nearly all",
    "no record has PyTorch's DDP alone": r"saves at most 3% of that",
    "the clock of a simulation measures nothing": r"measured \(predicted",
    "zero1 by itself is stage 2": r"Stage 2, which the workbook doesn't build",
    "nobody traced the hosts of H200s": r"So it was the host, not bytes",
    "NCCL also takes trees": r"But the latency grows with each rank\.(?! That is the ring's law)",
    "your FSDP shards RMSNorm's weights, too": r"they are short, so every rank keeps them whole",
}


@pytest.mark.parametrize("why", WRONG)
def test_a_corrected_sentence_does_not_return(why):
    assert not [name for name in LESSONS if re.search(WRONG[why], PAGES[name])]


def test_the_two_speeds_of_an_h200_are_those_that_the_page_tells_apart():
    assert round(flops_per_s() / 1e12) == 783
    assert round(records.compiled_speeds()["large"] / 1e12) == 421
    assert "large matmul, 783 TFLOP/s. Notebook 08 took the 421" in PAGES["10_fsdp"]


def test_the_essential_parts_do_not_grow_again():
    for name, most in zip(LESSONS, (72, 66, 66)):
        cells = nbformat.read(ROOT / f"notebooks/{name}.ipynb", as_version=4).cells
        (extra,) = [i for i, cell in enumerate(cells) if cell.source.startswith("# Extra\n")]
        assert extra <= most
