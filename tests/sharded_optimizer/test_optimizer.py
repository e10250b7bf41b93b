"""The sharded optimizer trains as one process does, and shares state, traffic and checkpoints."""

import functools

import pytest
import torch

from lib.sharded_optimizer.shards import whole_shards
from tests.ddp.training_cases import OPTIMIZERS as TRAINED
from tests.ddp.training_cases import check_training
from tests.ddp.workers import launch, run_cases
from tests.sharded_optimizer import cases
from tests.sharded_optimizer import training_cases as training

HELPERS = ("check_equal", "check_as_unsharded")
CASES = [name for name in vars(cases) if name.startswith("check_") and name not in HELPERS]
# group sizes -> optimizers; three ranks on two cores are slow
OPTIMIZERS = {1: ["adamw"], 2: ["torch adamw", "adamw"], 3: ["sgd"]}
WAYS = [
    (size, name, way)
    for size, names in OPTIMIZERS.items()
    for name in names
    for way in training.WAYS
]
pytestmark = pytest.mark.usefixtures("quick_ranks")


@pytest.fixture(scope="module")
def two_ranks():
    """The cases that passed on both ranks; the first that fails is the fixture's error."""
    return launch(run_cases, 2, "tests.sharded_optimizer.cases", CASES)


@pytest.fixture(scope="module")
def three_ranks():
    """What each of three ranks found; they also train in smaller groups."""
    return launch(training.equality, 3, OPTIMIZERS)


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(two_ranks, case):
    assert all(case in passed for passed in two_ranks)


def check_way(results: list[dict], way: tuple[int, str, str]) -> None:
    found = [result[way] for result in results if way in result]
    assert len(found) == way[0]
    # one rank trains as one process
    check_training(found, is_exact=way[0] == 1)
    # all shards together are the state of one process
    assert sum(result.elements for result in found) == found[0].whole_elements


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_training_equals_that_of_one_process(three_ranks, way):
    check_way(three_ranks, way)


@pytest.mark.parametrize("how", ["parameters", "local"])
def test_a_single_rank_is_left_alone(how):
    module = cases.stack()
    params = list(module.parameters())
    addresses = [param.data_ptr() for param in params]
    made = cases.made_of(module, cases.ADAMW, **cases.HOWS[how])
    assert made.inner.param_groups[0]["params"] == params
    cases.backward(module)
    grads = [param.grad for param in params]
    made.clip_grad_norm(1.0)
    made.step()
    assert all(param.grad is grad for param, grad in zip(params, grads))
    assert [param.data_ptr() for param in params] == addresses
    assert not any(param._post_accumulate_grad_hooks for param in params)


def test_what_divides_parameters_may_be_a_partial_function():
    module = cases.stack()
    made = cases.made_of(module, cases.ADAMW, strategy=functools.partial(whole_shards))
    assert [shard.leaf for shard in made.shards] == list(module.parameters())


def test_schedulers_find_what_they_look_for():
    made = cases.made_of(cases.stack(), {"optimizer_cls": torch.optim.AdamW})
    torch.optim.lr_scheduler.OneCycleLR(made, max_lr=1.0, total_steps=10)
    assert made.param_groups[0]["lr"] < 1e-1
    assert made.param_groups[0]["betas"][0] != 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "zero"}, "strategy must be one of parameters, flat, got 'zero'"),
        ({"reduces_gradients": True}, "strategy must be 'flat' with reduces_gradients"),
        ({"strategy": "flat", "overlap": True}, "overlap must be False without reduces_gradients"),
        ({"strategy": "flat", "bucket_cap_mb": 0}, "bucket_cap_mb must be more than 0, got 0"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb must be more than 0, got '25'"),
        ({"optimizer_cls": "AdamW"}, "optimizer_cls must be AdamW, .* or a subclass, got 'AdamW'"),
        (
            {"strategy": "flat", "optimizer_cls": torch.optim.Adafactor},
            "optimizer_cls must be AdamW, of lib.optimizer or torch.optim, .* got Adafactor",
        ),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        cases.made_of(cases.stack(), {"optimizer_cls": torch.optim.SGD, "lr": 0.1} | options)


@pytest.mark.gpu
def test_training_on_gpus_equals_that_of_one_process():
    ranks = min(4, torch.cuda.device_count())
    optimizers = {size: list(TRAINED) for size in range(1, ranks + 1)}
    results = launch(training.equality, ranks, optimizers, backend="nccl")
    for size, names in optimizers.items():
        for name in names:
            for way in training.WAYS:
                check_way(results, (size, name, way))


@pytest.mark.gpu
def test_two_gpus_train_as_one_process():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    launch(cases.on_gpus, 2, backend="nccl")
