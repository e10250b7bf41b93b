"""Data-parallel wrappers: each trains as one process does, and keeps its contract."""

import pytest
import torch

from lib.ddp import wrappers
from tests.ddp import cases
from tests.ddp import training_cases as training
from tests.ddp.workers import launch, run_cases

CASES = [name for name in vars(cases) if name.startswith("check_") and name != "check_mean"]

pytestmark = pytest.mark.usefixtures("quick_ranks")


@pytest.fixture(scope="module")
def trained():
    """Results of `training.equality` on each of three ranks."""
    return launch(training.equality, 3)


@pytest.fixture(scope="module")
def two_ranks():
    """The cases that passed on both ranks; the first that fails is the fixture's error."""
    return launch(run_cases, 2, "tests.ddp.cases", CASES)


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(two_ranks, case):
    assert all(case in passed for passed in two_ranks)


@pytest.mark.parametrize("way", training.WAYS_TO_TRAIN, ids=str)
def test_training_equals_that_of_one_process(trained, way):
    training.check_training([result[way] for result in trained])


def test_ranks_can_have_a_group_of_their_own(trained):
    # the last two of three: weights of the group's first rank, and the mean of gradients 1 and 2
    found = [result["subgroup"] for result in trained]
    assert found == [None, [1.0, 1.5] * 5, [1.0, 1.5] * 5]


@pytest.mark.parametrize("name", wrappers.WRAPPERS)
def test_a_single_rank_is_left_alone(name):
    module = cases.stack()
    model = wrappers.wrap(name, module)
    x = torch.ones(2, 4)
    assert torch.equal(model(x), module(x))
    with model.no_sync():
        model(x).sum().backward()
    grads = [param.grad for param in module.parameters()]
    before = [grad.clone() for grad in grads]
    model.finish_gradient_synchronization()
    assert all(param.grad is grad for param, grad in zip(module.parameters(), grads))
    assert all(torch.equal(grad, copy) for grad, copy in zip(grads, before))
    assert not any(param._post_accumulate_grad_hooks for param in module.parameters())
    assert model.module is module


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_on_gpus_equals_that_of_one_process(world_size):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices")
    results = launch(training.equality, world_size, backend="nccl")
    for way in training.WAYS_TO_TRAIN:
        training.check_training([result[way] for result in results])


@pytest.mark.gpu
def test_gradients_on_gpus_are_averaged_in_nccl():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    assert launch(cases.operations_on_gpus, 2, backend="nccl") == [{"AVG"}] * 2
