"""Properties of `ShardedOptimizer`, each a function that both of two ranks run.

Most compare with an unsharded optimizer in one process, which sees both ranks' data.
"""

import copy
import gc
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.ddp.process_group import (
    barrier,
    broadcast_module,
    current_device,
    on_first_rank,
    rank,
)
from lib.ddp.wrappers import wrap
from lib.optimizer.adamw import AdamW, clip_grad_norm
from lib.sharded_optimizer.optimizer import ShardedOptimizer
from lib.tools.peers.torch_ddp import TorchDDP
from lib.training.checkpoint import load_checkpoint, save_checkpoint
from tests.ddp.cases import Raise, input_of, stack
from tests.ddp.workers import message_of, recorded_collectives

SGD = {"optimizer_cls": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
ADAMW = {"optimizer_cls": AdamW, "lr": 0.1}
LOCAL = {"strategy": "flat", "reduces_gradients": True}
# a bucket for each layer of `stack`
OVERLAP = LOCAL | {"overlap": True, "bucket_cap_mb": 1e-6}
HOWS = {"parameters": {}, "flat": {"strategy": "flat"}, "local": LOCAL, "overlap": OVERLAP}
AVERAGING = {"local": LOCAL, "overlap": OVERLAP}


@contextmanager
def counted() -> Iterator[Counter]:
    """Elements of the whole tensors in the collectives that start in the block, by kind."""
    elements: Counter = Counter()
    with recorded_collectives(lambda kind, length: elements.update({kind: length})):
        yield elements


def made_of(module: nn.Module, settings: dict[str, Any], **options: Any) -> ShardedOptimizer:
    return ShardedOptimizer(module.parameters(), **settings | options)


def plain_of(module: nn.Module, settings: dict[str, Any]) -> torch.optim.Optimizer:
    options = {name: value for name, value in settings.items() if name != "optimizer_cls"}
    return settings["optimizer_cls"](module.parameters(), **options)


def twins(settings: dict[str, Any], how: dict[str, Any], module: nn.Module | None = None) -> tuple:
    """A module, its sharded optimizer, a copy, and the copy's plain optimizer."""
    module = module or stack()
    alone = copy.deepcopy(module)
    return module, made_of(module, settings, **how), alone, plain_of(alone, settings)


def update(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def loss_of(module: nn.Module, number: int) -> Tensor:
    """The loss of rank `number`'s input."""
    return module(input_of(number).to(next(module.parameters()).dtype)).square().mean()


def backward(module: nn.Module, number: int | None = None) -> None:
    """The gradient of this rank's input, or of rank `number`'s."""
    loss_of(module, rank() if number is None else number).backward()


def backward_of_both(module: nn.Module) -> None:
    """The mean gradient of both ranks, in one process."""
    for number in range(2):
        (loss_of(module, number) / 2).backward()


def check_equal(module: nn.Module, expected: nn.Module, what: object, atol: float = 1e-6) -> None:
    for param, other in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            param, other, rtol=0, atol=atol, msg=lambda text: f"{what}: {text}"
        )


def check_as_unsharded(
    settings: dict[str, Any],
    act: Callable[[nn.Module, torch.optim.Optimizer], None],
    make: Callable[[], nn.Module] = stack,
    hows: dict[str, dict] = HOWS,
) -> None:
    """`act` leaves the same parameters, sharded in each way or not; ranks have the same data."""
    for name, how in hows.items():
        module, made, alone, plain = twins(settings, how, make())
        act(module, made)
        act(alone, plain)
        check_equal(module, alone, name)


def shared_folder() -> Path:
    """A new folder, the same on all ranks."""
    return Path(on_first_rank(tempfile.mkdtemp))


# What is refused


def check_closures_and_later_groups_are_refused_by_name() -> None:
    for how in HOWS.values():
        made = made_of(stack(), ADAMW, **how)
        message = message_of(lambda: made.step(lambda: 0.0))  # noqa: B023
        assert message.startswith("ValueError: closure must be None"), message
        message = message_of(lambda: made.add_param_group({"params": stack().parameters()}))  # noqa: B023
        assert message.startswith("RuntimeError: a ShardedOptimizer takes all parameters"), message
        assert len(made.param_groups) == 1


# Gradients


def check_flat_shards_send_what_one_all_reduce_does() -> None:
    # parameters of 24, 48 and 24 elements; the three numbers say which have gradients
    expected = {
        "parameters": {"broadcast": 96},
        "flat": {"all_gather": 96},
        "local": {"reduce_scatter": 96, "all_gather": 96, "all_reduce": 3},
    }
    for name, sent in expected.items():
        module = stack()
        made = made_of(module, SGD, **HOWS[name])
        for _ in range(2):
            with counted() as elements:
                backward(module, 0)
                update(made)
        assert elements == sent, (name, elements)


def check_finish_leaves_the_means_in_the_shards_and_the_rest_sends_none() -> None:
    for name, how in AVERAGING.items():
        module, made, alone, _ = twins(SGD, how)
        backward(module)
        backward_of_both(alone)
        made.finish_gradient_synchronization()
        assert all(param.grad is None for param in module.parameters()), name
        whole = [param.grad for param in alone.parameters()]
        for shard in made.shards:
            part = whole[shard.number].reshape(-1)[shard.start : shard.stop]
            torch.testing.assert_close(shard.leaf.grad.view(-1), part)
        with counted() as elements:
            made.grad_norm()
            made.step()
        # the norm's one number
        assert (elements["reduce_scatter"], elements["all_reduce"]) == (0, 1), name


def check_gradients_stay_in_the_shards_until_zero_grad() -> None:
    for name, how in AVERAGING.items():
        module, made, alone, plain = twins(ADAMW, how)
        for zeros in (None, None, False, None, True, None):
            if zeros is not None:
                made.zero_grad(set_to_none=zeros)
                plain.zero_grad(set_to_none=zeros)
            if zeros is not False:
                backward(module)
                backward_of_both(alone)
            # the second step with the same gradients once more
            for _ in range(2):
                made.step()
                plain.step()
                check_equal(module, alone, name)


def check_gradients_that_come_after_they_were_averaged_are_an_error() -> None:
    expected = {"local": "RuntimeError: a backward pass ran after", "overlap": "RuntimeError: the"}
    for name, how in AVERAGING.items():
        module = stack()
        made = made_of(module, SGD, **how)
        backward(module)
        made.grad_norm()

        def again(module=module, made=made) -> None:
            backward(module)
            made.step()

        assert message_of(again).startswith(expected[name]), name
        made.zero_grad()
        again()


def check_no_sync_sends_nothing() -> None:
    module = stack()
    made = made_of(module, SGD, **OVERLAP)
    backward(module)
    update(made)
    with counted() as elements, made.no_sync():
        backward(module)
    assert not elements
    backward(module)
    update(made)


def check_reduce_scatters_start_in_backward_and_two_buckets_at_most_are_held() -> None:
    module = stack((4, 4, 4, 4, 4, 4))
    made = made_of(module, SGD, **OVERLAP)
    seen = []
    with counted() as elements:
        for param in module.parameters():
            param.register_hook(
                lambda grad: seen.append(
                    (
                        elements["reduce_scatter"] // 16,
                        sum(bool(bucket.sent) for bucket in made.strategy.buckets),
                    )
                )
            )
        for _ in range(2):
            backward(module)
            update(made)
    # (started, held) as each of five gradients comes; the first step agrees on an order
    assert seen[:5] == [(0, 0)] * 5
    assert seen[5:] == [(5, 0), (6, 1), (7, 2), (8, 2), (9, 2)], seen


def check_training_goes_on_after_backward_failed_elsewhere_on_each_rank() -> None:
    module, made, alone, plain = twins(SGD, OVERLAP)
    for step in range(2):
        if step:
            hook = module[rank()].register_forward_hook(lambda *args: Raise.apply(args[2]))
            assert message_of(lambda: backward(module)) == "RuntimeError: in backward"
            hook.remove()
            made.zero_grad()
        backward(module)
        backward_of_both(alone)
        update(made, plain)
    check_equal(module, alone, "exception")


def check_two_optimizers_that_overlap_share_a_group() -> None:
    module = stack((4, 6, 8, 5, 3))
    alone = copy.deepcopy(module)
    # one over the first and third layer, one over the others
    layers = (module[::2], module[1::2])
    pair = [made_of(part, ADAMW, **OVERLAP) for part in layers]
    plain = plain_of(alone, ADAMW)
    for _ in range(3):
        backward(module)
        backward_of_both(alone)
        update(*pair, plain)
    check_equal(module, alone, "two optimizers")


# Parameters


def check_parameters_become_aligned_views_and_keep_values_and_identity() -> None:
    module = nn.Sequential(stack((3, 5, 7, 1)), nn.Linear(1, 7))
    module[1].weight.data = module[1].weight.data.T.clone().T
    before = copy.deepcopy(module)
    params = list(module.parameters())
    made = made_of(module, SGD, **LOCAL)
    check_equal(module, before, "values", atol=0)
    assert all(param is old for param, old in zip(module.parameters(), params))
    assert len({param.untyped_storage().data_ptr() for param in params}) == 1
    assert all(param.storage_offset() % 4 == 0 and param.is_contiguous() for param in params)
    # and so are the slices of ranks
    assert made.strategy.buckets[0].slice_length % 4 == 0


def announce(module: nn.Sequential, before_part: Callable[[nn.Module], None]) -> None:
    """Call `before_part` just before each layer, as a model does."""
    for layer in module:
        layer.register_forward_pre_hook(lambda layer, args: before_part(layer))


def check_each_all_gather_is_awaited_just_before_its_part_runs() -> None:
    for name in ("plain", "compiled"):
        module, made, alone, plain = twins(
            ADAMW, OVERLAP, nn.Sequential(*[nn.Sequential(layer, nn.Tanh()) for layer in stack()])
        )
        announce(module, made.overlap_gather_with_forward(module[:2], in_graph=False))
        pending = []

        def note(*args: Any, made: ShardedOptimizer = made, pending: list = pending) -> None:
            pending.append([bucket.gathering is not None for bucket in made.strategy.buckets])

        for block in module:
            block.register_forward_pre_hook(note)
            if name == "compiled":
                block.compile(backend="aot_eager")
        for step in range(3):
            pending.clear()
            backward(module)
            # buckets are in reverse order, and the last layer was not chosen
            if step:
                assert pending == [[False, True, False], [False] * 3, [False] * 3], (name, pending)
            made.step()
            note()
            assert pending[-1] == [False, True, True], name
            made.zero_grad()
            backward_of_both(alone)
            update(plain)
        made.wait_for_parameters()
        check_equal(module, alone, name)


def check_for_a_graph_forward_starts_the_all_gathers_after_each_step_and_replay() -> None:
    module, made, alone, plain = twins(ADAMW, OVERLAP)
    announce(module, made.overlap_gather_with_forward(module, in_graph=True))
    for _ in range(2):
        backward(module)
        with counted() as elements:
            made.step()
        assert elements["all_gather"] == 0
        made.zero_grad()
        backward_of_both(alone)
        update(plain)
    with counted() as elements:
        output = module(input_of(0))
    assert elements["all_gather"] == 96
    torch.testing.assert_close(output, alone(input_of(0)))
    # a replay updates shards behind the optimizer's back
    for shard in made.shards:
        shard.leaf.detach().fill_(1.0)
    barrier()
    made.mark_replayed()
    module(input_of(0))
    assert all((param == 1.0).all() for param in module.parameters())


# Kinds of parameters


def check_parameters_may_be_frozen_and_trained_later() -> None:
    def trained_later(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for trained in ((0, 2), (0, 1, 2), (1, 2), (1, 2), (0, 1)):
            for index, layer in enumerate(module):
                layer.requires_grad_(index in trained)
            optimizer.zero_grad()
            backward(module, 0)
            optimizer.step()

    def frozen_before_the_step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(4):
            backward(module, 0)
            module[0].requires_grad_(step != 1)
            optimizer.step()
            optimizer.zero_grad()
            module[0].requires_grad_(True)

    def frozen_from_the_start() -> nn.Module:
        module = stack()
        module[1].requires_grad_(False)
        return module

    check_as_unsharded(ADAMW, trained_later)
    check_as_unsharded(ADAMW, trained_later, frozen_from_the_start, {"parameters": {}})
    # it would have to move into a buffer
    for how in (HOWS["flat"], *AVERAGING.values()):
        module = frozen_from_the_start()
        made = made_of(module, ADAMW, **how)
        module.requires_grad_(True)
        backward(module, 0)
        message = message_of(made.step)
        words = (
            "RuntimeError: a parameter of shape (8, 6) was frozen when the optimizer was created"
        )
        assert message.startswith(words), message
    # more than 1 MiB, so that with each strategy the first layer is sent alone
    check_as_unsharded(SGD, frozen_before_the_step, lambda: stack((4, 70_000, 3)))


def check_dtypes_are_clipped_together_and_float64_in_float64() -> None:
    several = (torch.float32, torch.bfloat16, torch.float64)
    cases = ((several, 1e-6), ((torch.float64,) * 3, 1e-15))
    for (name, how), (dtypes, atol) in itertools.product(HOWS.items(), cases):
        params = [torch.ones(size, dtype=dtype) for size, dtype in zip((5, (), 6), dtypes)]
        module, made, alone, plain = twins(SGD, how, nn.ParameterList(params))
        for param in (*module, *alone):
            param.grad = torch.full_like(param, 0.3)
        norms = made.clip_grad_norm(0.5), clip_grad_norm(alone.parameters(), 0.5)
        torch.testing.assert_close(*norms)
        made.step()
        plain.step()
        check_equal(module, alone, name, atol=atol)


def check_tiny_parameters_and_all_optimizers_resume() -> None:
    def act(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(4):
            sum((param * (step + 0.5)).square().sum() for param in module.parameters()).backward()
            update(optimizer)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def tiny() -> nn.Module:
        # fewer elements than ranks
        return nn.ParameterList([torch.ones(shape) for shape in ((0, 3), (), (1,), (1, 1))])

    for settings in (ADAMW, {"optimizer_cls": torch.optim.AdamW, "amsgrad": True}, SGD):
        check_as_unsharded(settings, act, tiny)


class NoVectors(torch.optim.SGD):
    """Refuses what one rank alone may own."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        if any(param.ndim == 1 for group in self.param_groups for param in group["params"]):
            raise ValueError("there is a vector")


def check_what_cannot_be_trained_is_refused_by_name() -> None:
    moved = stack()
    made = made_of(moved, SGD, **LOCAL)
    moved.double()
    sparse = nn.Embedding(5, 4, sparse=True)
    made_sparse = made_of(sparse, SGD, **LOCAL)
    sparse(torch.tensor([1])).sum().backward()
    # averaged by a wrapper, and cut
    sparse = nn.Embedding(6, 4, sparse=True)
    cut_sparse = made_of(sparse, SGD, strategy="flat")
    sparse(torch.tensor([1])).sum().backward()
    wrong: dict[str, Callable[[], Any]] = {
        "RuntimeError: a parameter of shape (3, 8) was moved": made.step,
        "ValueError: the gradient of a parameter of shape (5, 4) must": made_sparse.step,
        "ValueError: the gradient of a parameter of shape (6, 4) must": cut_sparse.step,
        "ValueError: strategy must be the same on all ranks": lambda: made_of(
            stack(), SGD, strategy=("flat", "parameters")[rank()]
        ),
        "ValueError: parameter 0 must be the same on all ranks": lambda: made_of(
            stack((4, 5 + rank())), SGD
        ),
        # the owner of the bias on both ranks
        "ValueError: ": lambda: ShardedOptimizer(nn.Linear(4, 4).parameters(), NoVectors, lr=0.1),
    }
    for words, action in wrong.items():
        assert message_of(action).startswith(words), message_of(action)


def check_parameters_in_another_order_or_with_other_values_are_refused() -> None:
    for how in HOWS.values():
        torch.manual_seed(0)
        module = stack((4, 4, 4))
        params = list(module.parameters())[:: 1 - 2 * rank()]
        made = ShardedOptimizer(params, torch.optim.SGD, lr=0.1, **how)
        message = message_of(made.step)
        words = "ValueError: parameters must be given in the same order and start with the same "
        assert message.startswith(words), message
        assert "but parameter 0, of shape (4, 4), has other values on rank 1" in message
        # names, if there are any, tell at once, even if all values are the same
        named = list(nn.ParameterDict({n: torch.zeros(3) for n in "ab"}).named_parameters())
        message = message_of(
            lambda: ShardedOptimizer(named[:: 1 - 2 * rank()], torch.optim.SGD, lr=0.1, **how)  # noqa: B023
        )
        assert "parameter 0 must be the same on all ranks, but is a float32 (3,)" in message


def check_gradients_that_nobody_averages_are_refused_in_the_first_step() -> None:
    words = (
        "ValueError: gradients must be averaged before step() and grad_norm(), but parameter 0, of "
        "shape (6, 4), has other gradients on rank 1 than on rank 0; call finish_gradient_sync"
    )
    for how in (HOWS["parameters"], HOWS["flat"]):
        for act in ("step", "grad_norm"):
            module = stack()
            broadcast_module(module)
            made = made_of(module, SGD, **how)
            backward(module)
            message = message_of(getattr(made, act))
            assert message.startswith(words), message
        # of a wrapper, but not finished
        model = wrap("flat", stack())
        made = made_of(model, SGD, **how)
        backward(model)
        assert message_of(made.step).startswith(words)
        # clipped, a rank's part is not as on other ranks
        model.finish_gradient_synchronization()
        made.clip_grad_norm(1e-3)
        made.step()


def check_clipping_that_misses_the_shards_is_refused_by_name() -> None:
    words = "ValueError: params must have whole gradients, but a parameter of shape (6, 4) has none"
    for how in AVERAGING.values():
        module = stack()
        made = made_of(module, SGD, **how)
        backward(module)
        # a rank may clip its own, before they are averaged
        if not how.get("overlap"):
            assert clip_grad_norm(module.parameters(), 1.0) > 0
        made.finish_gradient_synchronization()
        message = message_of(lambda: clip_grad_norm(module.parameters(), 1.0))  # noqa: B023
        assert message.startswith(words), message
        assert "call ShardedOptimizer.clip_grad_norm()" in message, message
        # a second one takes them over; errors hold the frames that raised them
        made = made_of(module, SGD, **how)
        gc.collect()
        assert message_of(lambda: clip_grad_norm(module.parameters(), 1.0)) == message  # noqa: B023
        del made
        gc.collect()
        backward(module, 0)
        assert clip_grad_norm(module.parameters(), 1.0) > 0


def check_gradients_that_a_wrapper_averages_are_not_averaged_again() -> None:
    words = "ValueError: reduces_gradients must be False for the parameters of a wrapper"
    for name, how in itertools.product(("flat", "overlap", TorchDDP), AVERAGING.values()):
        model = wrap(name, stack())
        message = message_of(lambda: made_of(model, SGD, **how))  # noqa: B023
        assert message.startswith(words), message
        # wrapped afterwards
        module = stack()
        broadcast_module(module)
        made = made_of(module, SGD, **how)
        model = wrap(name, module)
        backward(model)
        model.finish_gradient_synchronization()
        message = message_of(made.step)
        assert message.startswith(words), message


def check_a_norm_that_is_negative_is_refused_with_or_without_gradients() -> None:
    for how in HOWS.values():
        made = made_of(stack(), SGD, **how)
        message = message_of(lambda: made.clip_grad_norm(-1.0))  # noqa: B023
        assert message == "ValueError: max_norm must be at least 0, got -1.0", message
        assert float(made.clip_grad_norm(1.0)) == 0.0


def check_a_part_that_was_cast_is_updated_or_refused_by_name() -> None:
    for index, (name, how) in itertools.product(range(3), HOWS.items()):
        module, made, alone, plain = twins(SGD, how)
        for each in (module, alone):
            each[index].double()
            for param in each.parameters():
                param.grad = torch.ones_like(param)
        message = message_of(made.step)
        plain.step()
        if message == "no error":
            check_equal(module, alone, name)
        else:
            assert "was moved to other memory" in message or "was cast" in message, (name, message)


def check_what_one_rank_alone_is_given_is_refused_on_both() -> None:
    module = stack()
    later = made_of(module, ADAMW)
    params = list(module.parameters())
    mine, groups = ({"params": params[:2]}, {"params": params[2:]}), [{"params": params}]
    wrong: dict[str, Callable[[], Any]] = {
        "strategy must be one of": lambda: made_of(stack(), SGD, strategy=("flat", "zero")[rank()]),
        "got an unexpected": lambda: made_of(stack(), SGD, **({}, {"learning": 1})[rank()]),
        "lr must be at least 0": lambda: made_of(stack(), ADAMW | {"lr": 0.1 - rank()}),
        "empty parameter list": lambda: ShardedOptimizer(params[rank() * 3 :], AdamW),
        "optimizer_cls must be the same on all ranks, but is AdamW on rank 0 and SGD": (
            lambda: ShardedOptimizer(params, (AdamW, torch.optim.SGD)[rank()], lr=0.1)
        ),
        "betas of parameter group 0 must be the same on all ranks, but is (0.9, 0.999)": (
            lambda: made_of(stack(), ADAMW, betas=(0.9, 0.999 - 0.1 * rank()))
        ),
        "lr of parameter group 0 must be the same on all ranks, but is 0.5": (
            lambda: made_of(stack(), ADAMW | {"lr": torch.tensor(0.5 + rank())})
        ),
        "length of parameter group 0 must be the same on all ranks, but is 2": (
            lambda: ShardedOptimizer((mine, groups)[rank()], AdamW)
        ),
        "each parameter once, got one of them twice": lambda: ShardedOptimizer(
            params + params[: rank()], AdamW
        ),
    }
    for words, action in wrong.items():
        assert words in message_of(action), (words, message_of(action))
    # still in step
    backward(module, 0)
    update(later)
    path = shared_folder() / "a file"
    on_first_rank(path.touch)
    for folder in (path, (path.parent, None)[rank()]):
        message = message_of(lambda: save_checkpoint(folder, step=0, model={}, optimizer=later))  # noqa: B023
        assert message.startswith(("NotADirectoryError: ", "TypeError: ")), message


# Saved state


def check_state_dicts_hold_one_rank_and_load_there_bit_for_bit() -> None:
    for name, how in HOWS.items():
        module, made, alone, plain = twins(ADAMW, how)
        for model, used in ((module, made), (alone, plain)):
            backward(model, 0)
            update(used)
        again, from_plain = copy.deepcopy(module), copy.deepcopy(alone)
        others = [made_of(again, ADAMW, **how), made_of(from_plain, ADAMW, **how)]
        state = made.state_dict()
        moments = [value for s in state["state"].values() for value in s.values() if value.dim()]
        assert sum(value.numel() for value in moments) == 96
        others[0].load_state_dict(state)
        others[1].load_state_dict(plain.state_dict())
        of_rank_0 = on_first_rank(lambda: state)  # noqa: B023
        for model, used in zip((module, again, from_plain, alone), (made, *others, plain)):
            backward(model, 0)
            used.step()
        check_equal(again, module, name, atol=0)
        check_equal(from_plain, alone, name, atol=0)
        if rank() == 1:
            message = message_of(lambda: made.load_state_dict(of_rank_0))  # noqa: B023
            assert message.endswith("load_checkpoint loads the state of all ranks"), message


def check_state_that_does_not_fit_is_refused_on_all_ranks_and_changes_nothing() -> None:
    # which loads torch.jit, and warns of it
    from lib.tools.peers.torch_zero import TorchZero

    module = stack()
    momentum = plain_of(module, SGD | {"lr": 0.7})
    backward(module, 0)
    momentum.step()
    for how in HOWS.values():
        made = made_of(module, ADAMW, **how)
        before = copy.deepcopy(made.state_dict())
        other_kind = message_of(lambda: made.load_state_dict(momentum.state_dict()))  # noqa: B023
        assert other_kind.startswith("ValueError: state step of parameter"), other_kind
        other_file = message_of(lambda: made.load_state_dict({"model": {}}))  # noqa: B023
        assert "lacks param_groups, state" in other_file, other_file
        assert made.state_dict() == before
    # the file of a parameter that rank 0 alone owns
    owned = nn.Linear(4, 3, bias=False)
    made = made_of(owned, SGD)
    backward(owned, 0)
    made.step()
    folder = shared_folder()
    save_checkpoint(folder, step=0, model={}, optimizer=made)
    zero = TorchZero(owned.parameters(), optimizer_class=AdamW, lr=0.1)
    for other in (made_of(owned, ADAMW), zero):
        message = message_of(lambda: load_checkpoint(folder, optimizer=other))  # noqa: B023
        assert message.endswith(
            "fit the optimizer: ['', 'SGD', [3, 4]] instead of ['', 'AdamW', [3, 4]]"
        )


def check_bfloat16_is_trained_with_masters_that_are_saved_and_cut_bit_for_bit() -> None:
    folder = shared_folder()
    alone_group = [dist.new_group([number]) for number in range(2)][rank()]
    for name, how in HOWS.items():
        module, made, alone, plain = twins(ADAMW | {"lr": 0.01}, how, stack().bfloat16())
        for _ in range(5):
            if name in AVERAGING:
                backward(module)
                # the mean of two ranks is rounded as the sum of two halves is
                backward_of_both(alone)
            else:
                backward(module, 0)
                backward(alone, 0)
            update(made, plain)
        check_equal(module, alone, name, atol=0)
        save_checkpoint(folder / name, step=0, model={}, optimizer=made)
        sharded = made_of(copy.deepcopy(alone), ADAMW, group=alone_group)
        load_checkpoint(folder / name, optimizer=sharded)
        unsharded = plain_of(copy.deepcopy(alone), ADAMW)
        load_checkpoint(folder / name, optimizer=unsharded)
        expected = plain.state_dict()["state"]
        for found in (sharded.state_dict()["state"], unsharded.state_dict()["state"]):
            assert found.keys() == expected.keys()
            for number, key in itertools.product(expected, ("master", "exp_avg", "exp_avg_sq")):
                assert torch.equal(found[number][key], expected[number][key]), (name, key)
        barrier()


def on_gpus() -> None:
    """All-gathers that overlap with forward on this rank's GPU, over three steps."""
    device = current_device()
    torch.manual_seed(0)
    module, made, alone, plain = twins(ADAMW, OVERLAP, stack((64, 300, 300, 5)).to(device))
    announce(module, made.overlap_gather_with_forward(module, in_graph=False))
    for _ in range(3):
        inputs = [input_of(number, 64).to(device) for number in range(2)]
        module(inputs[rank()]).square().mean().backward()
        (sum(alone(x).square().mean() for x in inputs) / 2).backward()
        torch.testing.assert_close(
            made.clip_grad_norm(1.0), clip_grad_norm(alone.parameters(), 1.0)
        )
        update(made, plain)
    made.wait_for_parameters()
    check_equal(module, alone, "on GPUs", atol=1e-5)
