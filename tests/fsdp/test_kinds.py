"""Every kind of module lives through every event as in one process, or is refused by name."""

import pytest
import torch

from tests.ddp.kinds import KINDS
from tests.ddp.table import REFUSED_KINDS, outcome, outcomes, unexpected
from tests.ddp.workers import launch

pytestmark = pytest.mark.usefixtures("quick_ranks")


@pytest.fixture(scope="module")
def found():
    """The outcomes of all cells on each of two ranks, from one launch."""
    return launch(outcomes, 2, ["fsdp"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_lives_through_all_events_as_in_one_process_or_is_refused_by_name(found, kind):
    for cells in found:
        of_kind = {cell: text for cell, text in cells.items() if cell.kinds == kind}
        assert unexpected(of_kind) == {}
        assert kind not in REFUSED_KINDS or any(
            REFUSED_KINDS[kind] in text for text in of_kind.values()
        )


def test_one_rank_alone_refuses_a_module_with_an_fsdp_inside():
    (text,) = launch(outcome, 1, "fsdp", ["wrapped twice"], "steps")
    assert REFUSED_KINDS["wrapped twice"] in text


@pytest.mark.gpu
def test_on_gpus_too():
    size = min(2, torch.cuda.device_count())
    for cells in launch(outcomes, size, ["fsdp"], backend="nccl"):
        assert unexpected(cells) == {}
