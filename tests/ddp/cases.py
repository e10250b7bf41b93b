"""Properties of the wrappers, each a function that both of two ranks run."""

import contextlib
import copy
import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lib.core import ranges
from lib.ddp import process_group
from lib.ddp.process_group import current_device, rank
from lib.ddp.wrappers import BucketedDDP, FlatDDP, NaiveDDP, wrap
from lib.tools.peers.torch_ddp import TorchDDP
from tests.ddp.training_cases import WRAPPERS
from tests.ddp.workers import message_of, recorded_collectives

OURS = ("naive", "flat", "overlap", "flashddp")


@contextlib.contextmanager
def recorded_all_reduces() -> Iterator[list[int]]:
    """Elements of each all-reduce that starts in the block."""
    lengths: list[int] = []
    with recorded_collectives(lambda kind, length: kind == "all_reduce" and lengths.append(length)):
        yield lengths


def stack(sizes: tuple[int, ...] = (4, 6, 8, 3)) -> nn.Sequential:
    """Linear layers without biases: 24, 48, 24 elements by default."""
    return nn.Sequential(*[nn.Linear(*pair, bias=False) for pair in itertools.pairwise(sizes)])


def input_of(number: int, width: int = 4) -> Tensor:
    return torch.full((2, width), 1.0 + number)


def step_of(model: nn.Module, width: int = 4) -> None:
    """Forward, backward and finish on this rank's own input."""
    model(input_of(rank(), width)).square().mean().backward()
    model.finish_gradient_synchronization()


def check_mean(module: nn.Module, alone: nn.Module, what: str, width: int = 4) -> None:
    """Gradients are those of one process on the inputs of both ranks."""
    alone.zero_grad()
    for number in range(2):
        (alone(input_of(number, width)).square().mean() / 2).backward()
    for param, expected in zip(module.parameters(), alone.parameters()):
        torch.testing.assert_close(
            param.grad, expected.grad, rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}"
        )


def check_messages_of_each_wrapper() -> None:
    # three parameters of 24, 48 and 24 elements; behind them, who has gradients
    expected = {"naive": [24, 48, 24, 3], "flat": [96, 3], "overlap": [24, 48, 24, 3]}
    # a cap of two of 24 or one of 48
    for name, lengths in (expected | {"flashddp": [72, 24, 3]}).items():
        model = wrap(name, stack(), bucket_cap_mb=72 * 4 / 2**20)
        step_of(model)
        with recorded_all_reduces() as sent:
            step_of(model)
        assert sent == lengths, (name, sent)


def check_no_sync_sends_nothing() -> None:
    model = BucketedDDP(stack())
    for _ in range(2):
        model.zero_grad()
        with recorded_all_reduces() as sent, model.no_sync():
            model(input_of(rank())).square().mean().backward()
        assert sent == []
        step_of(model)


def check_all_reduces_start_in_backward_where_they_overlap() -> None:
    for name in OURS:
        module = stack()
        model = wrap(name, module, bucket_cap_mb=1e-6)
        step_of(model)
        started = []
        with recorded_all_reduces() as sent:
            module[0].weight.register_hook(lambda grad: started.append(len(sent)))  # noqa: B023
            model(input_of(rank())).square().mean().backward()
            started.append(len(sent))
            model.finish_gradient_synchronization()
        # two gradients are complete before the first layer's, which is the last
        assert started == ([2, 4] if name in ("overlap", "flashddp") else [0, 0]), (name, started)


class Branches(nn.Module):
    """Two layers, used in either order, so that gradients arrive in either order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor, names: str) -> Tensor:
        for name in names:
            x = torch.tanh(getattr(self, name)(x))
        return x


def check_ranks_may_use_layers_in_other_orders_or_not_at_all() -> None:
    for name in ("naive", "flat", "overlap", "flashddp", "flashddp, caps below a parameter"):
        torch.manual_seed(0)
        module = Branches()
        model, alone = WRAPPERS[name](module), copy.deepcopy(module)
        for uses in (("ab", "ba"), ("ba", "a"), ("", "b"), ("b", "ab"), ("", "")):
            for number, names in enumerate(uses):
                x = torch.full((1, 3), 1.0 + number, requires_grad=True)
                (alone(x, names).sum() / 2).backward()
            x = torch.full((1, 3), 1.0 + rank(), requires_grad=True)
            model(x, uses[rank()]).sum().backward()
            model.finish_gradient_synchronization()
            for param, expected in zip(module.parameters(), alone.parameters()):
                # None where no rank used the layer
                torch.testing.assert_close(param.grad, expected.grad, rtol=1e-5, atol=1e-6)
                param.grad = expected.grad = None


def check_gradients_take_their_own_memory_only_and_zero_grad_frees_it() -> None:
    module = stack((4, 5, 7, 3))
    model = BucketedDDP(module)
    step_of(model)
    grads = [param.grad for param in module.parameters()]
    # 20, 35 and 21 elements of four bytes, each padded to a multiple of 16 bytes, and for each of
    # the three parameters who has a gradient
    storages = {grad.untyped_storage().data_ptr(): grad.untyped_storage() for grad in grads}
    assert [storage.nbytes() for storage in storages.values()] == [4 * (20 + 36 + 24 + 3)]
    assert [grad.data_ptr() % 16 for grad in grads] == [0, 0, 0]
    buffer = weakref.ref(grads[0]._base)
    assert buffer() is not None
    del grads, storages
    model.zero_grad()
    gc.collect()
    # gloo's thread lets go of what it sent a moment later
    deadline = time.monotonic() + 10
    while buffer() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert buffer() is None


def check_a_forgotten_finish_is_an_error_at_the_next_forward() -> None:
    for name in OURS:
        model = wrap(name, stack())
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            message = message_of(lambda: model(torch.ones(2, 4)))  # noqa: B023
            assert message.startswith("RuntimeError: forward after a backward pass"), message
            message = message_of(model.state_dict)
            assert message.startswith("RuntimeError: state_dict() after a backward pass"), message
            model.finish_gradient_synchronization()
            model.state_dict()
            model(torch.ones(2, 4))


class Raise(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("in backward")


def check_training_goes_on_after_backward_failed_elsewhere_on_each_rank() -> None:
    names = ("naive", "flat", "overlap", "flashddp", "flashddp, caps below a parameter")
    for name, clears in itertools.product(names, ("not", "to None", "to zeros", "after forward")):
        module = stack()
        model = WRAPPERS[name](module)
        step_of(model)
        model.zero_grad()
        hook = module[rank()].register_forward_hook(lambda *args: Raise.apply(args[2]))
        loss = model(torch.ones(2, 4)).sum()
        assert message_of(loss.backward) == "RuntimeError: in backward", name
        hook.remove()
        # ranks have sent other gradients, and those that were not received are cleared, too
        if clears.startswith("to"):
            model.zero_grad(set_to_none=clears == "to None")
        loss = model(input_of(rank())).square().mean()
        if clears == "after forward":
            model.zero_grad()
        loss.backward()
        model.finish_gradient_synchronization()
        check_mean(module, copy.deepcopy(module), f"{name}, cleared {clears}")


def check_a_layer_that_a_checkpoint_runs_twice_is_averaged_or_refused_by_name() -> None:
    for name, reentrant in itertools.product(OURS, (True, False)):
        module = nn.Linear(4, 4, bias=False)
        model, alone = wrap(name, module), copy.deepcopy(module)

        def loss_of(call: nn.Module, number: int, reentrant: bool = reentrant) -> Tensor:
            x = input_of(number).requires_grad_()
            for _ in range(2):
                x = checkpoint(call, x, use_reentrant=reentrant)
            return x.square().mean()

        def step(model: Any = model, loss_of: Callable = loss_of) -> None:
            loss_of(model, rank()).backward()
            model.finish_gradient_synchronization()

        message = message_of(step)
        if reentrant and name in ("overlap", "flashddp"):
            assert "the gradient of weight grew again after its all-reduce" in message, message
            assert message.endswith("and checkpoints with use_reentrant=False"), message
            model.finish_gradient_synchronization()
            continue
        assert message == "no error", (name, message)
        for number in range(2):
            (loss_of(alone, number) / 2).backward()
        for param, expected in zip(module.parameters(), alone.parameters()):
            torch.testing.assert_close(param.grad, expected.grad)


def check_what_cannot_be_averaged_is_refused_by_name() -> None:
    module = stack()
    module[1].requires_grad_(False)
    model = BucketedDDP(module)
    step_of(model)
    module[1].requires_grad_(True)
    message = message_of(lambda: step_of(model))
    assert message.startswith("RuntimeError: parameter 1.weight was frozen when"), message
    for name in (*OURS, TorchDDP):
        module = stack()
        model = wrap(name, module)
        module.append(nn.Linear(3, 3))
        message = message_of(lambda: step_of(model))  # noqa: B023
        words = "RuntimeError: parameter 3.weight was added after the module was wrapped"
        assert message.startswith(words), message
    # a whole layer, once training has begun
    module = stack()
    model = BucketedDDP(module)
    step_of(model)
    module[0] = nn.Linear(4, 6)
    message = message_of(lambda: step_of(model))
    words = "RuntimeError: parameter 0.weight was replaced after the module was wrapped"
    assert message.startswith(words), message
    sparse = BucketedDDP(nn.Embedding(5, 4, sparse=True))
    message = message_of(lambda: sparse(torch.tensor([1])).sum().backward())
    assert message.startswith("ValueError: the gradient of weight must be dense"), message


def check_buffers_of_every_dtype_are_those_of_rank_0_or_refused_by_name() -> None:
    dtypes = ("bool", "int8", "int16", "int64", "uint16", "float8_e4m3fn", "bfloat16", "complex64")
    module = stack()
    given = torch.tensor([1.0, 0.0, 1.0]) * (1 - rank())
    for name in dtypes:
        module.register_buffer(f"in_{name}", given.to(getattr(torch, name)))
    module.register_buffer("none", torch.empty(0, 3, dtype=torch.int16))
    module.register_buffer("number", torch.tensor(1 - rank(), dtype=torch.int16))
    wrap("flat", module)
    found = [getattr(module, f"in_{name}").to(torch.complex64).real.tolist() for name in dtypes]
    assert found == [[1.0, 0.0, 1.0]] * len(dtypes), found
    assert module.number == 1
    refused = {
        "b must be dense, got torch.sparse_coo": torch.eye(3).to_sparse(),
        "b must have memory for each element, but is expanded": torch.ones(1).expand(3),
        "b must have memory, but is on device meta": torch.empty(3, device="meta"),
        "b must have a shape, but is lazy": nn.parameter.UninitializedBuffer(),
    }
    for words, buffer in refused.items():
        module = stack()
        module.register_buffer("b", buffer)
        message = message_of(lambda: wrap("flat", module))  # noqa: B023
        assert message.startswith(f"ValueError: {words}"), message


def check_a_rank_outside_of_a_group_is_refused() -> None:
    group = dist.new_group([1])
    for name in (*OURS, TorchDDP):
        message = message_of(lambda: wrap(name, stack(), group=group))  # noqa: B023
        words = "ValueError: group must be one that this rank is in, but rank 0 of 2 is not"
        assert message.startswith(words if rank() == 0 else "no error"), message


def check_parameters_in_another_order_on_another_rank_are_refused() -> None:
    def in_order() -> nn.Module:
        names = ("abc", "cab")[rank()]
        return nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in names})

    for name in (*OURS, TorchDDP):
        message = message_of(lambda: wrap(name, in_order()))  # noqa: B023
        assert message == (
            "ValueError: the order must be the same on all ranks, but at position 0 is a.weight on "
            "rank 0 and c.weight on rank 1"
        ), message


def check_a_module_is_wrapped_once_until_its_wrapper_is_gone() -> None:
    for first, second in itertools.product((*OURS, TorchDDP), repeat=2):
        module = stack()
        model = wrap(first, module)
        for _ in range(2):
            step_of(model)
        # the wrapper, a module around it, and the module inside
        for given, words in (
            (model, "but it is "),
            (nn.Sequential(model, nn.Linear(3, 3)), "but 0 is "),
            (module, f"but a {type(model).__name__} averages the gradient"),
        ):
            message = message_of(lambda: wrap(second, given))  # noqa: B023
            expected = f"ValueError: module must not be wrapped already, {words}"
            assert message.startswith(expected), message
        del model
        # errors hold the frames that raised them
        gc.collect()
        model = wrap(second, module)
        for _ in range(3):
            model.zero_grad()
            step_of(model)
            check_mean(module, copy.deepcopy(module), f"{first}, then {second}")


def check_a_part_that_was_cast_is_averaged_or_refused_by_name() -> None:
    makes = WRAPPERS | {"torch_ddp": lambda module: wrap(TorchDDP, module)}
    for (name, make), dtypes in itertools.product(
        makes.items(), itertools.permutations((torch.float32, torch.float64))
    ):
        module = Mixed()
        module.b.to(dtypes[0])
        model = make(module)
        step_of(model, width=3)
        model.zero_grad()
        module.b.to(dtypes[1])
        message = message_of(lambda: step_of(model, width=3))  # noqa: B023
        assert message == "no error" or "cast after it was wrapped" in message, (name, message)
        if message == "no error":
            check_mean(module, copy.deepcopy(module), name, width=3)


def check_settings_that_differ_between_ranks_are_named() -> None:
    different: dict[str, Callable[[], nn.Module]] = {
        "bucket_cap_mb must be the same": lambda: BucketedDDP(stack(), bucket_cap_mb=1 + rank()),
        "ddp_wrapper must be the same": lambda: (NaiveDDP, FlatDDP)[rank()](stack()),
        "ddp_wrapper must average": lambda: wrap("none", stack()),
        # that one rank alone refuses, or that begins with another collective
        "rank 1: ddp_wrapper must be one of": lambda: wrap(("flat", "zero")[rank()], stack()),
        "rank 1: ddp_wrapper must be one of none": lambda: wrap(
            ("flat", None)[rank()],  # type: ignore[arg-type]
            stack(),
        ),
        "rank 1: ddp_wrapper must be one of none, naive": lambda: wrap(
            ("flat", nn.Linear)[rank()],  # type: ignore[arg-type]
            stack(),
        ),
        "rank 1: ddp_wrapper must average": lambda: wrap(("naive", "none")[rank()], stack()),
        "rank 1: bucket_cap_mb must be more than 0": lambda: BucketedDDP(
            stack(), bucket_cap_mb=1 - rank()
        ),
        "ddp_wrapper must be the same on all ranks, but is TorchDDP on rank 0": lambda: wrap(
            (TorchDDP, "flashddp")[rank()], stack()
        ),
        "bucket_cap_mb must be the same on all ranks, but is 1 on rank 0 and 2": lambda: wrap(
            TorchDDP, stack(), bucket_cap_mb=1 + rank()
        ),
    }
    for words, make in different.items():
        # where it was raised, without the rank
        message = message_of(make)
        expected = f"ValueError: {words}"
        if rank() == 1 and words.startswith("rank 1: "):
            expected = f"ValueError: {words.removeprefix('rank 1: ')}"
        assert message.startswith(expected), message


def check_torch_ddp_is_freed_before_the_group_is_left() -> None:
    kept, dropped = wrap(TorchDDP, stack()), wrap(TorchDDP, stack())
    for model in (kept, dropped):
        step_of(model)
    reducers = [weakref.ref(model.inner[0]) for model in (kept, dropped)]
    del model, dropped
    process_group._let_go()
    assert [reducer() for reducer in reducers] == [None, None]
    # what is left is the module alone
    step_of(kept)
    assert torch.equal(kept(input_of(0)), kept.module(input_of(0)))


class Mixed(nn.Module):
    """Parameters of float32 and float64."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3).double(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).to(self.b.weight.dtype)).float())


def check_the_state_is_that_of_the_module_compiled_or_not_by_itself_or_inside_another() -> None:
    for name in (*OURS, TorchDDP):
        for module in (stack(), torch.compile(stack(), backend="eager")):
            model = wrap(name, module)
            assert list(model.state_dict()) == ["0.weight", "1.weight", "2.weight"], name
            assert model.load_state_dict(stack().state_dict()).missing_keys == []
            around = nn.ModuleDict({"a": model, "b": nn.Linear(2, 2)})
            saved = {key: value + 1 for key, value in around.state_dict().items()}
            assert sorted(saved) == ["a.0.weight", "a.1.weight", "a.2.weight", "b.bias", "b.weight"]
            around.load_state_dict(saved)
            for key, value in around.state_dict().items():
                assert torch.equal(value, saved[key]), (name, key)
            del saved["a.1.weight"]
            message = message_of(lambda: around.load_state_dict(saved))  # noqa: B023
            assert "Missing key(s)" in message, message


def check_hooks_work_with_compiled_modules() -> None:
    for name in OURS:
        module = stack()
        alone = copy.deepcopy(module)
        model = wrap(name, torch.compile(module, backend="aot_eager"))
        alone.load_state_dict(module.state_dict())
        for _ in range(2):
            module.zero_grad()
            step_of(model)
        check_mean(module, alone, name)


def check_torch_ddp_splits_no_part_that_was_compiled_by_itself() -> None:
    for compiles in (True, False):
        module = stack()
        if compiles:
            module[1].compile(backend="eager")
        splits: list[bool] = []
        module[0].register_forward_pre_hook(
            lambda *args: splits.append(torch._dynamo.config.optimize_ddp)  # noqa: B023
        )
        model = wrap(TorchDDP, module)
        step_of(model)
        assert bool(splits[0]) is not compiles, splits
        with torch.no_grad():
            assert torch.equal(model(input_of(0)), module(input_of(0)))


def check_profilers_see_the_all_reduces() -> None:
    # where they overlap: one for each message, and the waiting for them
    for name, count in {"naive": 1, "flat": 1, "overlap": 4, "flashddp": 2}.items():
        model = wrap(name, stack())
        step_of(model)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with ranges.enabled(), torch.profiler.profile(activities=activities) as profiler:
            step_of(model)
        found = sum(event.name == "all-reduce" for event in profiler.events())
        assert found == count, (name, found)


def operations_on_gpus() -> set[str]:
    """The operations that NCCL is asked for in a step of each wrapper."""
    operations, original = set(), dist.all_reduce

    def all_reduce(tensor: Tensor, op: Any, **options: Any) -> Any:
        operations.add(str(op).rpartition(".")[2])
        return original(tensor, op, **options)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        for make in WRAPPERS.values():
            model = make(stack().to(current_device()))
            model(input_of(rank()).to(current_device())).sum().backward()
            model.finish_gradient_synchronization()
    return operations
