"""Every kind of module lives through every event as in one process, or is refused by name."""

import pytest
import torch

from tests.ddp.workers import launch
from tests.fsdp.table import EVENTS, KINDS, table

pytestmark = pytest.mark.usefixtures("quick_ranks")

# Refusals, by kind or by event; all other cells are equal to one process.
REFUSED_KINDS = {
    "wrapped twice": "layers.0.module.linear.weight is divided among the ranks already",
    "changes a weight": "a forward pass changed one of layers.0.linear.weight",
}
REFUSED_EVENTS = {
    "deep copy": "TypeError: an FSDP cannot be copied or pickled",
    "pickled": "TypeError: an FSDP cannot be copied or pickled",
    "second derivative": "backward must run without create_graph=True",
}
# A block is as new as the newest of its parameters: PyTorch's error comes more often.
OLD = {"update before backward": "has been modified by an inplace operation"}


def check(kind: str, found: list[dict[tuple[str, str], str]]) -> None:
    unexpected = {}
    for number, cells in enumerate(found):
        for event in EVENTS:
            outcome = cells[kind, event]
            reasons = (REFUSED_EVENTS.get(event), REFUSED_KINDS.get(kind), OLD.get(event))
            is_refused = any(words in outcome for words in reasons if words)
            # some events of a kind that is refused make no pass, or end in PyTorch's error too
            if not is_refused and (outcome != "equal" or event in REFUSED_EVENTS):
                unexpected[number, event] = outcome
    assert unexpected == {}
    words = REFUSED_KINDS.get(kind, "")
    assert any(words in outcome for (name, _), outcome in found[0].items() if name == kind)


@pytest.fixture(scope="module")
def found():
    """The outcomes of all cells on each of two ranks, from one launch."""
    return launch(table, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_lives_through_all_events_as_in_one_process_or_is_refused_by_name(found, kind):
    check(kind, found)


@pytest.mark.gpu
def test_on_gpus_too():
    size = min(2, torch.cuda.device_count())
    found = launch(table, size, backend="nccl")
    for kind in KINDS:
        check(kind, found)
