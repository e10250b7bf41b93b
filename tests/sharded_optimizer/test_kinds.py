"""With wrappers and ZeRO-1, kinds of modules and events equal one process, or are refused by name.

The modules of all kinds are trained together.
"""

import pytest
import torch

from tests.ddp.table import REPLICATED, WAYS, outcomes, unexpected
from tests.ddp.workers import launch

# between them they go through all code of the others
QUICK = ["flashddp, zero1 parameters", "flat, zero1 flat", "zero1, overlapped", "torch_ddp"]
OTHERS = [way for way in WAYS if way not in (*QUICK, "fsdp")]

pytestmark = pytest.mark.usefixtures("quick_ranks")


@pytest.fixture(scope="module")
def found():
    """The outcomes of all cells on each of two ranks, from one launch."""
    return launch(outcomes, 2, QUICK)


@pytest.mark.parametrize("event", REPLICATED)
def test_every_kind_of_module_is_trained_as_in_one_process_or_refused_by_name(found, event):
    for cells in found:
        of_event = {cell: text for cell, text in cells.items() if cell.event == event}
        assert len(of_event) == len(QUICK)
        assert unexpected(of_event) == {}


@pytest.mark.slow
def test_so_it_is_with_all_other_wrappers_and_strategies():
    for cells in launch(outcomes, 2, OTHERS):
        assert unexpected(cells) == {}


@pytest.mark.gpu
def test_on_two_gpus_every_kind_of_module_is_trained_as_in_one_process_or_refused_by_name():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for cells in launch(outcomes, 2, [*QUICK, *OTHERS], backend="nccl"):
        assert unexpected(cells) == {}
