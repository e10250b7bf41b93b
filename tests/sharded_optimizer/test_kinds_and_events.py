"""Every kind of module and event equals one process, or is refused by name."""

import pytest
import torch

from tests.ddp.workers import launch
from tests.sharded_optimizer import kinds_and_events as table

pytestmark = pytest.mark.usefixtures("quick_ranks")


# between them they go through all code of the others
WAYS = ["flashddp, zero1 parameters", "flat, zero1 flat", "zero1, overlapped", "torch_ddp"]
OTHERS = [way for way in table.WAYS if way not in WAYS]


@pytest.fixture(scope="module")
def found():
    """The outcomes of all cells, from one launch of two ranks."""
    return launch(table.outcomes, 2, WAYS)[0]


def check_cells(found: dict, way: str, event: str) -> None:
    expected = table.REFUSED.get((way, event), "")
    for outcome in found[way, event]:
        for kind, text in outcome.items():
            where = f"{kind} with {way}: {text or 'as one process'}"
            assert text.startswith(expected), where
            assert bool(text) == bool(expected), where


@pytest.mark.parametrize("event", table.EVENTS)
def test_every_kind_of_module_is_trained_as_in_one_process_or_refused_by_name(found, event):
    for way in WAYS:
        check_cells(found, way, event)


@pytest.mark.slow
def test_so_it_is_with_all_other_wrappers_and_strategies():
    found = launch(table.outcomes, 2, OTHERS)[0]
    for way, event in found:
        check_cells(found, way, event)


@pytest.mark.gpu
def test_on_two_gpus_every_kind_of_module_is_trained_as_in_one_process_or_refused_by_name():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    found = launch(table.outcomes, 2, list(table.WAYS), backend="nccl")[0]
    for way, event in found:
        check_cells(found, way, event)
