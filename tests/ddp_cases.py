"""Single properties of the wrappers of `lib.ddp`, each a function that every rank of two runs."""

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from ddp_training import WRAPPERS
from torch import Tensor, nn

from lib import ddp, distributed, profiling


@contextmanager
def recorded_all_reduces() -> Iterator[list[tuple[int, torch.dtype]]]:
    """Length and dtype of each all-reduce that starts in the block."""
    calls, original = [], dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **options: Any) -> Any:
        calls.append((tensor.numel(), tensor.dtype))
        return original(tensor, *args, **options)

    dist.all_reduce = all_reduce
    try:
        yield calls
    finally:
        dist.all_reduce = original


def stack(sizes: tuple[int, ...] = (4, 6, 8, 3), **options: Any) -> nn.Sequential:
    """Linear layers without biases: sizes 24, 48, 24 by default."""
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*[nn.Linear(a, b, bias=False, **options) for a, b in pairs])


def step_of(model: nn.Module, width: int = 4, dtype: torch.dtype = torch.float32) -> None:
    """Forward, backward and finish on this rank's own input."""
    x = torch.full((2, width), 1.0 + distributed.rank(), dtype=dtype)
    model(x).square().mean().backward()
    model.finish_gradient_synchronization()


def messages() -> dict[str, list[int]]:
    """The lengths of the all-reduces in the second step of each wrapper, in order."""
    wrappers = {
        "naive": ddp.NaiveDDP,
        "flat": ddp.FlatDDP,
        "overlap": ddp.OverlappedDDP,
        # two of 24 or one of 48
        "flashddp": lambda m: ddp.BucketedDDP(m, bucket_cap_mb=72 * 4 / 2**20),
        "bfloat16": lambda m: ddp.BucketedDDP(m, reduce_dtype=torch.bfloat16),
    }
    results = {}
    for name, make in wrappers.items():
        model = make(stack())
        step_of(model)
        with recorded_all_reduces() as calls:
            step_of(model)
        results[name] = calls
    return results


def nothing_is_sent_in_no_sync() -> int:
    model = ddp.BucketedDDP(stack())
    step_of(model)
    with recorded_all_reduces() as calls, model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    return len(calls)


def overlap_begins_in_backward() -> dict[str, list[int]]:
    """How many all-reduces had begun when the first layer's gradient came, and after backward."""
    results = {}
    for name in ("naive", "flat", "overlap", "flashddp"):
        module = stack()
        options = {"bucket_cap_mb": 1e-6} if name == "flashddp" else {}
        model = ddp.wrap(name, module, **options)
        step_of(model)
        with recorded_all_reduces() as calls:
            seen = []
            module[0].weight.register_hook(lambda grad: seen.append(len(calls)))  # noqa: B023
            model(torch.ones(2, 4)).sum().backward()
            seen.append(len(calls))
            model.finish_gradient_synchronization()
        results[name] = seen
    return results


class Branches(nn.Module):
    """Two branches, used in either order, so that gradients arrive in either order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor, names: str) -> Tensor:
        for name in names:
            x = torch.tanh(getattr(self, name)(x))
        return x


def orders_that_differ() -> dict[str, list[float]]:
    """Errors of the gradients where ranks use layers in another order, or not at all."""
    results = {}
    for name in ("naive", "flat", "overlap", "flashddp", "flashddp, caps below a parameter"):
        torch.manual_seed(0)
        module = Branches()
        model, alone = WRAPPERS[name](module), copy.deepcopy(module)
        errors = []
        for uses in (("ab", "ba"), ("ba", "a"), ("", "b"), ("b", "ab"), ("", "")):
            for rank, names in enumerate(uses):
                x = torch.full((1, 3), 1.0 + rank, requires_grad=True)
                (alone(x, names).sum() / 2).backward()
            x = torch.full((1, 3), 1.0 + distributed.rank(), requires_grad=True)
            model(x, uses[distributed.rank()]).sum().backward()
            model.finish_gradient_synchronization()
            for param, expected in zip(module.parameters(), alone.parameters()):
                if expected.grad is None or param.grad is None:
                    errors.append(0.0 if param.grad is expected.grad else 9.0)
                else:
                    errors.append((param.grad - expected.grad).abs().max().item())
                param.grad = expected.grad = None
        results[name] = errors
    return results


def memory() -> dict[str, Any]:
    """Bytes of gradients, of the memory they stand in, and whether that goes with them."""
    module = stack((4, 5, 7, 3))
    model = ddp.BucketedDDP(module)
    step_of(model)
    grads = [param.grad for param in module.parameters()]
    storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in grads}
    addresses = [grad.data_ptr() % 16 for grad in grads]
    buffer = weakref.ref(grads[0]._base)
    was_alive = buffer() is not None
    del grads
    for param in module.parameters():
        param.grad = None
    gc.collect()
    return {
        "gradients": sum(param.nbytes for param in module.parameters()),
        "storages": list(storages.values()),
        "addresses": addresses,
        "was alive": was_alive,
        "is freed": buffer() is None,
    }


def views_stay() -> dict[str, Any]:
    """Copies in a second step whose gradients were set to zero in place, and their places."""
    module = stack()
    model, alone = ddp.BucketedDDP(module), stack()
    step_of(model)
    alone.load_state_dict(model.state_dict())
    before = [param.grad.data_ptr() for param in module.parameters()]
    for param in module.parameters():
        param.grad.zero_()
    copies, cat = [], torch.cat
    torch.cat = lambda *args, **options: (copies.append(1), cat(*args, **options))[1]
    step_of(model)
    torch.cat = cat
    for rank in range(2):
        (alone(torch.full((2, 4), 1.0 + rank)).square().mean() / 2).backward()
    pairs = zip(module.parameters(), alone.parameters())
    return {
        "copies": len(copies),
        "same places": before == [param.grad.data_ptr() for param in module.parameters()],
        "error": max((a.grad - b.grad).abs().max().item() for a, b in pairs),
    }


def foreign_gradient_between() -> dict[str, float]:
    """The gradient of an input that autograd puts between those of two parameters, off by."""
    results = {}
    for name in ("naive", "flat", "overlap", "flashddp"):
        module = nn.ParameterList([torch.ones(3), torch.ones(4)])
        model = WRAPPERS[name](_Joined(module))
        for _ in range(2):
            module.zero_grad()
            x = torch.ones(1, requires_grad=True)
            (model(x) * (distributed.rank() + 1)).sum().backward()
            model.finish_gradient_synchronization()
        # the fourth of the weights, times this rank's factor
        results[name] = abs(x.grad.item() - 4.0 * (distributed.rank() + 1))
    return results


class _Joined(nn.Module):
    def __init__(self, params: nn.ParameterList) -> None:
        super().__init__()
        self.params = params

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.params[0], x, self.params[1]]) * torch.arange(1.0, 9.0)


def zeroed_before_finish() -> dict[str, list[float]]:
    """What is left of gradients that are dropped between backward and finish, and a step later."""
    results = {}
    for name in ("naive", "flat", "overlap", "flashddp"):
        module = stack()
        model = ddp.wrap(name, module)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            model.zero_grad()
            model.finish_gradient_synchronization()
        left = [0.0 if p.grad is None else p.grad.abs().max().item() for p in module.parameters()]
        step_of(model)
        results[name] = [max(left), *(p.grad.abs().max().item() for p in module.parameters())]
    return results


def cast_later() -> dict[str, list[torch.dtype]]:
    """Dtypes of gradients after the module was cast between steps."""
    results = {}
    for name in ("naive", "flat", "overlap", "flashddp"):
        module = stack((3, 5, 7, 1))
        model = ddp.wrap(name, module)
        step_of(model, width=3)
        module.zero_grad()
        module.bfloat16()
        for _ in range(2):
            step_of(model, width=3, dtype=torch.bfloat16)
        results[name] = [param.grad.dtype for param in module.parameters()]
    return results


def message_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def forgotten_finish() -> dict[str, list[str]]:
    """The error of a forward pass after a backward pass without finish, and of one after it."""
    results = {}
    for name in ("naive", "flat", "overlap", "flashddp"):
        model = ddp.wrap(name, stack())
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            first = message_of(lambda: model(torch.ones(2, 4)))  # noqa: B023
            model.finish_gradient_synchronization()
            second = message_of(lambda: model(torch.ones(2, 4)))  # noqa: B023
        results[name] = [first, second]
    return results


def double_backward() -> dict[str, str]:
    results = {}
    for name in ("naive", "flat", "overlap", "flashddp"):
        model = ddp.wrap(name, stack())
        step_of(model)
        loss = model(torch.ones(2, 4)).sum()
        loss.backward(retain_graph=True)
        results[name] = message_of(loss.backward)
        model.finish_gradient_synchronization()
        results[name] += message_of(lambda: step_of(model))  # noqa: B023
    return results


class Raise(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("in backward")


def exception_in_backward() -> dict[str, list]:
    """The error of the step after a backward pass that failed at another layer on each rank."""
    results = {}
    for name in ("naive", "flat", "overlap", "flashddp", "flashddp, caps below a parameter"):
        module = stack()
        model = WRAPPERS[name](module)
        alone = copy.deepcopy(module)
        step_of(model)
        hook = module[distributed.rank()].register_forward_hook(lambda *args: Raise.apply(args[2]))
        first = message_of(lambda: model(torch.ones(2, 4)).sum().backward())  # noqa: B023
        hook.remove()
        x = torch.full((2, 4), 1.0 + distributed.rank())
        loss = model(x).square().mean()
        module.zero_grad()
        loss.backward()
        model.finish_gradient_synchronization()
        for rank in range(2):
            (alone(torch.full((2, 4), 1.0 + rank)).square().mean() / 2).backward()
        pairs = zip(module.parameters(), alone.parameters())
        results[name] = [first, max((a.grad - b.grad).abs().max().item() for a, b in pairs)]
    return results


def unfrozen() -> str:
    module = stack()
    module[1].requires_grad_(False)
    model = ddp.BucketedDDP(module)
    step_of(model)
    module[1].requires_grad_(True)
    return message_of(lambda: step_of(model))


def sparse() -> str:
    model = ddp.BucketedDDP(nn.Embedding(5, 4, sparse=True))
    return message_of(lambda: model(torch.tensor([1])).sum().backward())


def settings_that_differ() -> list[str]:
    rank = distributed.rank()
    return [
        message_of(lambda: ddp.BucketedDDP(stack(), bucket_cap_mb=1 + rank)),
        message_of(lambda: (ddp.NaiveDDP, ddp.FlatDDP)[rank](stack())),
        message_of(lambda: ddp.NaiveDDP(stack((4, 5 + rank)))),
        message_of(lambda: ddp.wrap("none", stack())),
    ]


def mixed_dtypes() -> dict[str, float]:
    """Errors of gradients of float64 and float32 parameters in one module."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3).double()
            self.c = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x).double()).float())

    results = {}
    for name, make in WRAPPERS.items():
        torch.manual_seed(0)
        module = Mixed()
        alone = copy.deepcopy(module)
        model = make(module)
        for _ in range(2):
            module.zero_grad()
            step_of(model, width=3)
        for rank in range(2):
            (alone(torch.full((2, 3), 1.0 + rank)).square().mean() / 2).backward()
        pairs = zip(module.parameters(), alone.parameters())
        results[name] = max((a.grad - b.grad).abs().max().item() for a, b in pairs)
    return results


def state() -> dict[str, list]:
    """Names of each wrapper's state, plain and compiled, and whether loading takes it over."""
    results = {}
    for name in ("naive", "flat", "overlap", "flashddp", "torch_ddp"):
        model = ddp.wrap(name, stack())
        other = ddp.wrap(name, torch.compile(stack(), backend="eager"))
        other.load_state_dict(model.state_dict())
        pairs = zip(other.state_dict().values(), model.state_dict().values())
        results[name] = [*other.state_dict(), all(torch.equal(a, b) for a, b in pairs)]
    return results


def compiled() -> dict[str, float]:
    """Errors of gradients of a compiled module, in whose backward hooks fire too."""
    results = {}
    for name in ("naive", "flat", "overlap", "flashddp"):
        torch.manual_seed(0)
        module = stack()
        alone = copy.deepcopy(module)
        model = ddp.wrap(name, torch.compile(module, backend="aot_eager"))
        for _ in range(2):
            module.zero_grad()
            step_of(model)
        for rank in range(2):
            (alone(torch.full((2, 4), 1.0 + rank)).square().mean() / 2).backward()
        pairs = zip(module.parameters(), alone.parameters())
        results[name] = max((a.grad - b.grad).abs().max().item() for a, b in pairs)
    return results


def ranges() -> dict[str, int]:
    """How many ranges called all-reduce a profiler sees in the second step."""
    results = {}
    for name in ("naive", "flat", "overlap", "flashddp"):
        model = ddp.wrap(name, stack())
        step_of(model)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with profiling.enabled(), torch.profiler.profile(activities=activities) as profiler:
            step_of(model)
        results[name] = sum(event.name == "all-reduce" for event in profiler.events())
    return results


def wrapped_again() -> list[int]:
    """All-reduces of a module that was wrapped before, whose old wrapper is gone."""
    module = stack()
    model = ddp.NaiveDDP(module)
    step_of(model)
    del model
    gc.collect()
    model = ddp.FlatDDP(module)
    with recorded_all_reduces() as calls:
        step_of(model)
    return [length for length, _ in calls]


def on_gpus() -> dict[str, Any]:
    """Errors of each wrapper's second step on this rank's GPU, and the operations of NCCL."""
    device = distributed.current_device()
    operations, original = set(), dist.all_reduce

    def all_reduce(tensor: Tensor, op: Any, **options: Any) -> Any:
        operations.add(str(op).rpartition(".")[2])
        return original(tensor, op, **options)

    dist.all_reduce = all_reduce
    errors = {}
    for name in (name for name in WRAPPERS if name != "torch_ddp"):
        torch.manual_seed(0)
        module = stack((64, 300, 300, 5)).to(device)
        alone = copy.deepcopy(module)
        model = WRAPPERS[name](module)
        for _ in range(2):
            module.zero_grad()
            model(torch.full((2, 64), 1.0 + distributed.rank(), device=device)).sum().backward()
            model.finish_gradient_synchronization()
        for rank in range(2):
            (alone(torch.full((2, 64), 1.0 + rank, device=device)).sum() / 2).backward()
        pairs = zip(module.parameters(), alone.parameters())
        errors[name] = max(
            ((a.grad - b.grad).abs().max() / b.grad.abs().max()).item() for a, b in pairs
        )
    dist.all_reduce = original
    return {"errors": errors, "operations": operations}
