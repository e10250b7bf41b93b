"""The sharded optimizer in settings that few trainings have, each against the unsharded one."""

import copy
import functools
import itertools
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed_workers import run_cases
from sharded_optimizer_cases import ADAMW, LOCAL, OVERLAP, SGD, backward, error_of, message_of
from test_sharded_optimizer import launch
from torch import Tensor, nn

from lib import distributed, optimizer
from lib.sharded_optimizer import ShardedOptimizer, load_unsharded

HOWS = {"parameters": {}, "flat": {"strategy": "flat"}, "local": LOCAL, "overlap": OVERLAP}
ZERO = {"optimizer_class": optimizer.AdamW, "lr": 0.1}
# with more than 1 MiB, so that in each strategy the first layer is sent alone
SIZES = (4, 70_000, 3)
CASES = [
    "frozen_with_gradients",
    "frozen_before_the_step",
    "frozen_after_use_by_one",
    "double_precision",
    "empty",
    "sizes",
    "refused_load",
    "refused_shards",
    "masters_of_late_weights",
    "refused_by_one",
]

pytestmark = pytest.mark.usefixtures("quick_ranks")


def layers(sizes: tuple[int, ...] = SIZES) -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    module = nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in itertools.pairwise(sizes)))
    for param in module.parameters():
        nn.init.normal_(param, std=0.1 / param.shape[1] ** 0.5, generator=generator)
    return module


def both(
    step: Callable[[nn.Sequential, torch.optim.Optimizer, int], None], settings: dict[str, Any]
) -> dict[str, float]:
    """Errors of four steps in each way to shard; ranks have the same data."""
    errors = {}
    for name, how in HOWS.items():
        module, alone = layers(), layers()
        made = ShardedOptimizer(module.parameters(), **settings, **how)
        options = {key: value for key, value in settings.items() if key != "optimizer_cls"}
        plain = settings["optimizer_cls"](alone.parameters(), **options)
        for number in range(4):
            step(module, made, number)
            step(alone, plain, number)
        errors[name] = error_of(module, alone)
    return errors


def frozen_with_gradients() -> list[dict[str, float]]:
    def step(module: nn.Sequential, used: torch.optim.Optimizer, number: int) -> None:
        # in the second and third step momentum alone moves the first layer
        module[0].requires_grad_(number not in (1, 2))
        backward(module, rank=0)
        used.step()
        used.zero_grad(set_to_none=False)

    return [both(step, SGD), both(step, ADAMW)]


def frozen_before_the_step() -> list[dict[str, float]]:
    def step(module: nn.Sequential, used: torch.optim.Optimizer, number: int) -> None:
        backward(module, rank=0)
        module[0].requires_grad_(number != 1)
        used.step()
        used.zero_grad()
        module[0].requires_grad_(True)

    return [both(step, SGD)]


def frozen_after_use_by_one() -> dict[str, float]:
    """Errors where rank 0 alone used what all freeze before the step, and nobody uses later."""
    errors = {}
    caps = {"together": 25.0, "alone": 1e-6}
    for (name, how), (kind, cap) in itertools.product(list(HOWS.items())[2:], caps.items()):
        own = nn.ParameterList([torch.ones(8), torch.ones(64)])
        alone = copy.deepcopy(own)
        made = ShardedOptimizer(own.parameters(), **SGD, **how | {"bucket_cap_mb": cap})
        plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            uses_second = step < 2
            loss = own[0].sum()
            if uses_second and distributed.rank() == 0:
                loss = loss + own[1].sum()
            loss.backward()
            (alone[0].sum() + uses_second * alone[1].sum() / 2).backward()
            if step == 1:
                own[1].requires_grad_(False)
            if not uses_second:
                alone[1].grad = None
            for used in (made, plain):
                used.step()
                used.zero_grad()
        errors[name, kind] = error_of(own, alone)
    return errors


def double_precision() -> dict[str, float]:
    """Errors of clipped steps of a float64 parameter, which one rank may own alone."""
    errors = {}
    for name, how in HOWS.items():
        own = nn.ParameterList([torch.ones(6, dtype=torch.float64)])
        made = ShardedOptimizer(own.parameters(), **SGD, **how)
        own[0].sum().backward()
        norm = made.clip_grad_norm(0.5).item()
        made.step()
        expected = 1 - 0.1 * 0.5 / 6**0.5
        errors[name] = max(abs(norm - 6**0.5), (own[0] - expected).abs().max().item())
    return errors


def empty() -> dict[str, float]:
    """Norms of nothing, and the errors where the first group or all groups are empty."""
    results = {}
    for name, how in HOWS.items():
        module, alone = layers((4, 3)), layers((4, 3))
        groups = [{"params": []}, {"params": module.parameters()}]
        made = ShardedOptimizer(groups, **SGD, **how)
        plain = torch.optim.SGD(alone.parameters(), lr=SGD["lr"])
        for model in (module, alone):
            backward(model, rank=0)
        norms = [made.grad_norm().item() - optimizer.grad_norm(alone.parameters()).item()]
        made.step()
        plain.step()
        nothing = ShardedOptimizer([{"params": []}], **SGD, **how)
        norms.append(nothing.clip_grad_norm(1.0).item())
        nothing.step()
        results[name] = max(*map(abs, norms), error_of(module, alone))
    return results


def sizes() -> dict[str, float]:
    """Errors of parameters of no element and of one, on more ranks than elements, resumed."""
    results = {}
    kinds = {"adamw": ADAMW, "amsgrad": {"optimizer_cls": torch.optim.AdamW, "amsgrad": True}}
    for (name, how), (kind, settings) in itertools.product(HOWS.items(), kinds.items()):
        own = nn.ParameterList([torch.ones(shape) for shape in ((0, 3), (), (1,), (1, 1))])
        alone = copy.deepcopy(own)
        made = ShardedOptimizer(own.parameters(), **settings, **how)
        options = {key: value for key, value in settings.items() if key != "optimizer_cls"}
        plain = settings["optimizer_cls"](alone.parameters(), **options)
        for step in range(4):
            for model, used in ((own, made), (alone, plain)):
                sum((param * (step + 0.5)).sum() for param in model.parameters()).backward()
                used.step()
                used.zero_grad()
            made.load_state_dict(copy.deepcopy(made.state_dict()))
        pairs = list(zip(own.parameters(), alone.parameters()))[1:]
        results[name, kind] = max((a - b).abs().item() for a, b in pairs)
    return results


def refused_load() -> dict[str, tuple[str, str, bool]]:
    """The errors of state that does not fit, and whether settings are as before."""
    results = {}
    for name, how in HOWS.items():
        made = ShardedOptimizer(layers((4, 5, 3)).parameters(), **ADAMW, **how)
        before = copy.deepcopy(made.state_dict())
        fits = momentum_of(layers((4, 5, 3)))
        messages = [message_of(lambda: made.load_state_dict(fits))]  # noqa: B023
        messages.append(message_of(lambda: made.load_state_dict({"model": fits})))  # noqa: B023
        results[name] = (*messages, made.state_dict() == before)
    return results


def refused_shards() -> list[str]:
    """The errors of files whose only parameter has the state of another kind of optimizer."""
    # which loads torch.jit, and warns of it
    from lib.sharded_optimizer_torch import TorchZero

    folders = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folders, 0)
    module = layers((4, 3))
    made = ShardedOptimizer(module.parameters(), **SGD)
    backward(module, rank=0)
    made.step()
    made.save_shard(folders[0])
    others = [
        ShardedOptimizer(module.parameters(), **ADAMW),
        TorchZero(module.parameters(), **ZERO),
    ]
    return [message_of(lambda: other.load_shards(folders[0])) for other in others]  # noqa: B023


def masters_of_late_weights() -> dict[str, tuple[list[float], bool]]:
    """bfloat16 weights that were loaded into the module later, after a step that one is not in."""
    results = {}
    for name, how in HOWS.items():
        module = nn.ParameterList([torch.ones(8, dtype=torch.bfloat16) for _ in range(2)])
        made = ShardedOptimizer(
            module.parameters(), torch.optim.SGD, lr=0.5, master_weights=True, **how
        )
        module.load_state_dict({"0": torch.full((8,), 2.0), "1": torch.full((8,), 3.0)})
        masters = [state["master"] for state in made.state_dict()["state"].values()]
        module[0].sum().backward()
        made.step()
        found = [param.float().mean().item() for param in module]
        results[name] = found, all((master > 1).all().item() for master in masters)
    return results


class NoVectors(torch.optim.SGD):
    """Refuses what one rank alone may own."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        if any(param.ndim == 1 for group in self.param_groups for param in group["params"]):
            raise ValueError("there is a vector")


def refused_by_one() -> str:
    return message_of(lambda: ShardedOptimizer(nn.Linear(4, 4).parameters(), NoVectors, lr=0.1))


def momentum_of(module: nn.Module) -> dict[str, Any]:
    """The state dict of SGD after a step, at another learning rate."""
    plain = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9)
    backward(module, rank=0)
    plain.step()
    return plain.state_dict()


@pytest.fixture(scope="module")
def two_ranks():
    """What each case gave on each of two ranks: {case: [on rank 0, on rank 1]}."""
    results = launch(run_cases, 2, "test_sharded_optimizer_edges", CASES)
    return {name: [result[name] for result in results] for name in CASES}


def test_a_parameter_frozen_with_gradients_left_is_the_same_on_all_ranks(two_ranks):
    for results in two_ranks["frozen_with_gradients"]:
        for errors in results:
            assert errors == dict.fromkeys(HOWS, pytest.approx(0, abs=1e-6))


def test_a_parameter_frozen_between_backward_and_step_is_updated_once_more(two_ranks):
    for results in two_ranks["frozen_before_the_step"]:
        for errors in results:
            assert errors == dict.fromkeys(HOWS, pytest.approx(0, abs=1e-6))


def test_groups_may_be_empty(two_ranks):
    for errors in two_ranks["empty"]:
        assert errors == dict.fromkeys(HOWS, pytest.approx(0, abs=1e-6))


def test_parameters_of_no_element_or_one_on_more_ranks_than_elements(two_ranks):
    for errors in two_ranks["sizes"]:
        assert len(errors) == 8
        assert max(errors.values()) < 1e-6


def test_state_that_is_refused_changes_no_setting(two_ranks):
    for results in two_ranks["refused_load"]:
        for other_kind, other_file, is_same in results.values():
            assert other_kind.startswith("ValueError: state step of parameter")
            assert other_file.startswith("ValueError: state_dict lacks param_groups, state; right")
            assert is_same


def test_masters_are_made_of_the_weights_at_the_first_gradient(two_ranks):
    for found in two_ranks["masters_of_late_weights"]:
        assert found == dict.fromkeys(HOWS, ([1.5, 3.0], True))


def test_parameters_that_one_rank_refuses_are_an_error_on_all(two_ranks):
    messages = two_ranks["refused_by_one"]
    assert all(message.endswith("there is a vector") for message in messages), messages


def test_masters_take_sparse_gradients():
    module = nn.Embedding(4, 3, sparse=True, dtype=torch.bfloat16)
    before = module.weight.detach().clone()
    made = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.5, master_weights=True)
    module(torch.tensor([2])).sum().backward()
    made.step()
    moved = (before.float() - module.weight.float()).mean(1)
    torch.testing.assert_close(moved, torch.tensor([0, 0, 0.5, 0]), rtol=0, atol=0.01)


def test_files_that_one_rank_refuses_are_an_error_on_all(two_ranks):
    # the first rank owns the parameter
    for messages in two_ranks["refused_shards"]:
        assert len(messages) == 2
        for message in messages:
            assert message.startswith("ValueError: state step of parameter 0 is None; right is: a")


def test_state_that_is_refused_changes_no_setting_of_an_unsharded_optimizer(tmp_path):
    module = layers((4, 3))
    made = ShardedOptimizer(module.parameters(), **SGD)
    backward(module, rank=0)
    made.step()
    made.save_shard(tmp_path)
    plain = optimizer.AdamW(layers((4, 3)).parameters(), lr=0.2)
    with pytest.raises(ValueError, match="state step of parameter 0 is None"):
        load_unsharded(tmp_path, plain)
    assert plain.param_groups[0]["lr"] == 0.2
    assert "momentum" not in plain.param_groups[0]


def test_what_one_rank_used_is_updated_everywhere_though_frozen_before_the_step(two_ranks):
    for errors in two_ranks["frozen_after_use_by_one"]:
        assert max(errors.values()) < 1e-6


def test_norms_of_wide_gradients_are_known_to_all_ranks(two_ranks):
    for errors in two_ranks["double_precision"]:
        assert max(errors.values()) < 1e-6


@pytest.mark.parametrize("unsharded", [optimizer.AdamW, torch.optim.AdamW])
def test_a_learning_rate_tensor_takes_the_saved_value(tmp_path, unsharded):
    ShardedOptimizer(layers((4, 3)).parameters(), torch.optim.AdamW, lr=0.3).save_shard(tmp_path)
    plain = unsharded(layers((4, 3)).parameters(), lr=torch.tensor(0.1))
    load_unsharded(tmp_path, plain)
    assert isinstance(plain.param_groups[0]["lr"], Tensor)
    assert plain.param_groups[0]["lr"].item() == pytest.approx(0.3)


class OwnLBFGS(torch.optim.LBFGS):
    pass


@pytest.mark.parametrize(
    ("optimizer_cls", "message"),
    [
        (OwnLBFGS, "optimizer_cls is OwnLBFGS, whose update .* right is: another"),
        (functools.partial(torch.optim.LBFGS, lr=0.1), "optimizer_cls is LBFGS, whose update"),
        ("AdamW", "optimizer_cls is 'AdamW'; right is: a class, such as torch.optim.AdamW"),
    ],
)
def test_optimizers_are_refused_however_they_are_given(optimizer_cls, message):
    with pytest.raises(ValueError, match=message):
        ShardedOptimizer(layers((4, 3)).parameters(), optimizer_cls)


def test_two_optimizers_overlap_in_a_group_each():
    for error in launch(two_optimizers, 2):
        assert error < 1e-6


def two_optimizers() -> float:
    """The error of two optimizers, where rank 1 does not use all parameters."""
    module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    distributed.broadcast_module(module)
    alone = copy.deepcopy(module)
    made = [
        ShardedOptimizer(layer.parameters(), **SGD, **OVERLAP, group=torch.distributed.new_group())
        for layer in (module[::2], module[1::2])
    ]
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)

    def loss(model: nn.Sequential, rank: int) -> Tensor:
        return sum(layer.weight.sum() * (1 + rank) for layer in model[: 4 - rank])

    for _ in range(3):
        loss(module, distributed.rank()).backward()
        (sum(loss(alone, rank) for rank in range(2)) / 2).backward()
        for used in (*made, plain):
            used.step()
            used.zero_grad()
    return error_of(module, alone)
