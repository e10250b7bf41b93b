"""FSDP trains as one process does, in every mode, and holds and sends no more than it should."""

import pytest
import torch

from tests.ddp.training_cases import check_training
from tests.ddp.workers import launch, run_cases
from tests.fsdp import cases

CASES = [name for name in vars(cases) if name.startswith("check_")]
RANKS = {2: [*CASES, "trained"], 3: ["trained"]}

pytestmark = pytest.mark.usefixtures("quick_ranks")


@pytest.fixture(scope="module")
def found():
    """What each rank found, by world size; each size is launched once."""
    return {
        size: launch(run_cases, size, "tests.fsdp.cases", names) for size, names in RANKS.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(found, case):
    assert all(case in passed for passed in found[2])


@pytest.mark.parametrize("mode", [*cases.MODES, "simulated network"])
@pytest.mark.parametrize("size", RANKS)
def test_training_equals_that_of_one_process(found, size, mode):
    check_mode(found[size], size, mode)


def check_mode(found: list[dict], size: int, mode: str) -> None:
    # two ranks add up in one order
    is_exact = size == 2 and mode in ("default", "simulated network")
    check_training([rank["trained"][mode] for rank in found], is_exact=is_exact)


@pytest.mark.gpu
def test_training_on_gpus_equals_that_of_one_process():
    size = min(4, torch.cuda.device_count())
    # a single rank sends nothing that the other cases could count
    names = RANKS[2] if size > 1 else ["trained"]
    found = launch(run_cases, size, "tests.fsdp.cases", names, backend="nccl")
    for mode in cases.MODES:
        check_mode(found, size, mode)
