"""The table of `test_kinds`: events in the life of each kind of module, divided and in one process.

An event is a function of a `Side`, which returns what it saw. It runs on a divided module, where a
rank has inputs of its own, and on the module alone, with the mean of all ranks' losses.
"""

import contextlib
import copy
import functools
import logging
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lib.ddp.process_group import current_device, gather_objects, rank, world_size
from lib.fsdp import FSDP
from lib.fsdp.blocks import tensors_in
from lib.optimizer.schedule import clip_grad_norm
from tests.fsdp.kinds import KINDS, D, Kind


def seeded(kind: Kind, seed: int) -> nn.Module:
    """A module whose floating-point parameters are drawn anew."""
    module = kind.make().to(current_device())
    if kind.dtype == torch.float64:
        module.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in module.parameters():
            if param.is_floating_point() or param.is_complex():
                drawn = torch.randn(param.shape, dtype=param.dtype, generator=generator)
                param.copy_(drawn / 2)
    return module


class Side:
    """A module in training; here alone, in one process."""

    def __init__(self, kind: Kind, seed: int = 0) -> None:
        self.kind = kind
        self.module = self.inner = seeded(kind, seed)
        self.make_optimizer()

    def make_optimizer(self) -> None:
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)

    @property
    def dtype(self) -> torch.dtype:
        floats = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        return next(floats, torch.float32)

    def ranks(self) -> list[int]:
        return list(range(world_size()))

    def loss(self, step: int = 0, call: Callable[..., Any] | None = None) -> Tensor:
        """The mean of the losses of the ranks in `ranks`."""
        losses = []
        for number in self.ranks():
            generator = torch.Generator().manual_seed(10 * step + number)
            x = torch.randn(3, D, generator=generator, dtype=torch.float64)
            output = (call or self.module)(x.to(current_device(), self.dtype))
            losses.append(sum(t.double().square().mean() for t in tensors_in(output)))
        return sum(losses) / len(losses)  # type: ignore[return-value]

    def no_sync(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def finish(self) -> None:
        pass

    def clip(self, max_norm: float) -> Tensor:
        return clip_grad_norm(self.module.parameters(), max_norm)

    def update(self) -> list[Any]:
        """Take an optimizer step; return who has a gradient, and all values."""
        params = dict(self.inner.named_parameters())
        has_grad = [name for name, param in params.items() if param.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [has_grad, self.values()]

    def step(self, number: int = 0) -> list[Any]:
        """Take a whole step."""
        loss = self.loss(number)
        loss.backward()
        self.finish()
        return [self.mean(loss), *self.update()]

    def values(self) -> dict[str, Tensor]:
        values = {name: param.detach() for name, param in self.inner.named_parameters()}
        return {name: value.clone().cpu() for name, value in values.items()}

    def mean(self, loss: Tensor) -> float:
        return loss.item()


class Divided(Side):
    """A module divided among the ranks of a group; each has its own loss."""

    def __init__(self, kind: Kind, seed: int = 0, group: Any = None) -> None:
        self.kind = kind
        # only rank 0's values count
        self.inner = seeded(kind, seed + rank())
        self.module = FSDP(self.inner, group=group, **kind.options(self.inner))
        self.make_optimizer()

    def ranks(self) -> list[int]:
        return [rank()]

    def no_sync(self) -> contextlib.AbstractContextManager:
        return self.module.no_sync()

    def finish(self) -> None:
        self.module.finish_gradient_synchronization()

    def clip(self, max_norm: float) -> Tensor:
        return self.module.clip_grad_norm(max_norm)

    def values(self) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in self.module.full_parameters().items()}

    def mean(self, loss: Tensor) -> float:
        return sum(gather_objects(loss.item())) / world_size()


# Events


def steps(side: Side) -> list[Any]:
    return [side.step(number) for number in range(3)]


def two_forwards(side: Side) -> list[Any]:
    (side.loss(0) + side.loss(1)).backward()
    side.finish()
    return [side.update(), side.step(2)]


def two_forwards_with_a_backward_each(side: Side) -> list[Any]:
    first, second = side.loss(0), side.loss(1)
    with side.no_sync():
        first.backward()
    second.backward()
    side.finish()
    return [side.update(), side.step(2)]


def forward_without_backward(side: Side) -> list[Any]:
    loss = side.mean(side.loss())
    side.finish()
    return [loss, side.step(1)]


def load_after_forward(side: Side) -> list[Any]:
    side.loss()
    side.module.load_state_dict(Side(side.kind, seed=9).module.state_dict())
    return [side.mean(side.loss()), side.step()]


def update_after_forward(side: Side) -> list[Any]:
    side.loss().backward()
    side.finish()
    side.loss(1)
    return [side.update(), side.mean(side.loss(1)), side.step(2)]


def update_before_backward(side: Side) -> list[Any]:
    """The saved weights are not those anymore: an error where autograd needs them."""
    side.loss().backward()
    side.finish()
    loss = side.loss(1)
    found = side.update()
    loss.backward()
    return found


def accumulation(side: Side) -> list[Any]:
    for number in range(2):
        with side.no_sync():
            side.loss(number).backward()
    side.loss(2).backward()
    side.finish()
    return side.update()


def only_no_sync(side: Side) -> list[Any]:
    with side.no_sync():
        side.loss().backward()
    side.finish()
    return [side.update(), side.step(1)]


def cleared_after_no_sync(side: Side) -> list[Any]:
    found = []
    clears: list[Callable[[], None]] = [
        side.optimizer.zero_grad,
        side.module.zero_grad,
        functools.partial(side.optimizer.zero_grad, set_to_none=False),
    ]
    for clear in clears:
        with side.no_sync():
            side.loss(0).backward()
        clear()
        side.loss(1).backward()
        side.finish()
        found.append(side.update())
    return found


def cleared_before_finish(side: Side) -> list[Any]:
    side.loss().backward()
    side.optimizer.zero_grad()
    side.finish()
    return [side.update(), side.step(1)]


def finished_twice(side: Side) -> list[Any]:
    side.loss().backward()
    side.finish()
    side.finish()
    return side.update()


def finished_after_each(side: Side) -> list[Any]:
    for number in range(2):
        side.loss(number).backward()
        side.finish()
    with side.no_sync():
        side.loss(2).backward()
    side.finish()
    return side.update()


def clipped(side: Side) -> list[Any]:
    side.loss().backward()
    side.finish()
    return [side.clip(0.01).item(), side.update()]


def evaluated_between(side: Side) -> list[Any]:
    loss = side.loss()
    with torch.no_grad():
        found = side.mean(side.loss(1))
    loss.backward()
    side.finish()
    with torch.inference_mode():
        return [found, side.mean(side.loss(2)), side.update()]


def read_between(side: Side) -> list[Any]:
    loss = side.loss()
    found = side.values()
    loss.backward()
    side.finish()
    return [found, side.update()]


def error_in_forward(side: Side) -> list[Any]:
    def fail(x: Tensor) -> Tensor:
        side.module(x)
        return side.module(x[:, : D - 1])

    try:
        side.loss(call=fail)
    except RuntimeError:
        return side.step()
    return ["no error"]


def checkpointed(side: Side) -> list[Any]:
    call = functools.partial(checkpoint, side.module, use_reentrant=False)
    with side.no_sync():
        side.loss(0, call).backward()
    side.loss(1, call).backward()
    side.finish()
    return side.update()


def cast(side: Side) -> list[Any]:
    found = [side.step()]
    side.module.double()
    side.make_optimizer()
    dtypes = {name: value.dtype for name, value in side.values().items()}
    return [*found, str(dtypes), side.step(1), side.step(2)]


def data_replaced(side: Side) -> list[Any]:
    for param in side.module.parameters():
        if param.requires_grad:
            param.data = param.data / 2
    return [side.values(), side.step()]


def frozen_later(side: Side) -> list[Any]:
    found, params = [side.step()], list(side.inner.parameters())
    trained = [param for param in params if param.requires_grad]
    for is_trained in (False, True):
        trained[0].requires_grad_(is_trained)
        found.append(side.step(1))
    return found


def state_dict(side: Side) -> list[Any]:
    side.step()
    state = side.module.state_dict()
    found = {name: value.clone().cpu() for name, value in state.items()}
    # what was returned is no part of the module
    for value in side.values().values():
        value.zero_()
    return [found, side.values(), side.step(1)]


def other_world_size(side: Side) -> list[Any]:
    """A state dict of all ranks goes into a module of one rank, and back."""
    found = side.step()
    if isinstance(side, Divided):
        small = Divided(side.kind, seed=5, group=_group_of_one())
        small.module.load_state_dict(side.module.state_dict())
        found.append(small.values())
        fresh = Divided(side.kind, seed=6)
        fresh.module.load_state_dict(small.module.state_dict())
        return [*found, fresh.step(1)]
    return [*found, side.values(), fresh_step(side)]


def fresh_step(side: Side) -> list[Any]:
    side.make_optimizer()
    return side.step(1)


def deep_copy(side: Side) -> list[Any]:
    if isinstance(side, Divided):
        copy.deepcopy(side.inner if side.module.blocks else side.module)
    return []


def pickled(side: Side) -> list[Any]:
    if isinstance(side, Divided):
        pickle.dumps(side.module)
    return []


def printed(side: Side) -> list[Any]:
    """Nothing is shown that has no memory."""
    assert repr(side.module)
    assert all(map(repr, side.module.parameters()))
    if isinstance(side, Divided):
        assert all(map(repr, [p for flat in side.module.flats for p in flat.whole]))
    return []


def second_derivative(side: Side) -> list[Any]:
    side.loss().backward(create_graph=True)
    return []


def gradient_of_inputs(side: Side) -> list[Any]:
    inputs: list[Tensor] = []

    def call(x: Tensor) -> Any:
        inputs.append(x.requires_grad_())
        return side.module(x)

    grads = torch.autograd.grad(side.loss(call=call), inputs)
    side.finish()
    # this rank's part of the mean over ranks
    own = grads[rank()] * world_size() if len(grads) > 1 else grads[0]
    return [own.cpu(), side.step(1)]


EVENTS: dict[str, Callable[[Side], list[Any]]] = {
    event.__name__.replace("_", " "): event
    for event in (
        steps,
        two_forwards,
        two_forwards_with_a_backward_each,
        forward_without_backward,
        load_after_forward,
        update_after_forward,
        update_before_backward,
        accumulation,
        only_no_sync,
        cleared_after_no_sync,
        cleared_before_finish,
        finished_twice,
        finished_after_each,
        clipped,
        evaluated_between,
        read_between,
        error_in_forward,
        checkpointed,
        cast,
        data_replaced,
        frozen_later,
        state_dict,
        other_world_size,
        deep_copy,
        pickled,
        printed,
        second_derivative,
        gradient_of_inputs,
    )
}


@functools.cache
def _group_of_one() -> Any:
    groups = [dist.new_group([number]) for number in range(world_size())]
    return groups[rank()]


# Cells


def outcome(make: Callable[[], Side], event: Callable[[Side], list[Any]]) -> Any:
    """The outcome of an event: its values, or its error."""
    try:
        return event(make())
    except Exception as error:
        return error


def differences(found: Any, expected: Any, tolerance: float, path: str = "") -> Iterator[str]:
    """Where two nested observations differ by more than rounding."""
    if isinstance(expected, dict):
        found, expected = list(found.items()), list(expected.items())
    if isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            yield f"{path}: {found} instead of {expected}"
        for index, (one, other) in enumerate(zip(found, expected)):
            yield from differences(one, other, tolerance, f"{path}.{index}")
    elif isinstance(expected, (Tensor, float)):
        one, other = torch.as_tensor(found), torch.as_tensor(expected)
        if one.dtype != other.dtype or one.shape != other.shape:
            yield f"{path}: {one.dtype} {one.shape} instead of {other.dtype} {other.shape}"
        elif not torch.allclose(one, other, rtol=tolerance, atol=tolerance):
            yield f"{path}: off by {(one - other).abs().max():.3g}"
    elif found != expected:
        yield f"{path}: {found} instead of {expected}"


def cell(kind: Kind, event: Callable[[Side], list[Any]]) -> str:
    """`equal`, `refused: …`, or what is wrong."""
    alone = outcome(lambda: Side(kind), event)
    divided = outcome(lambda: Divided(kind), event)
    if isinstance(divided, Exception):
        kind_and_text = f"{type(divided).__name__}: {divided}"
        if isinstance(alone, Exception) and str(alone)[:60] == str(divided)[:60]:
            return "equal"
        return f"refused: {kind_and_text}"
    if isinstance(alone, Exception):
        return f"wrong: accepts what one process refuses: {alone}"
    tolerance = 1e-13 if kind.dtype == torch.float64 else 2e-5
    found = list(differences(divided, alone, tolerance))
    return f"wrong: {'; '.join(found[:3])}" if found else "equal"


def table(kinds: list[str] | None = None) -> dict[tuple[str, str], str]:
    """The outcome of every event for every kind of module, on this rank."""
    torch.backends.cudnn.allow_tf32 = False
    warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
    logging.getLogger("lib.fsdp").setLevel(logging.ERROR)
    return {
        (name, what): cell(kind, event)
        for name, kind in KINDS.items()
        if kinds is None or name in kinds
        for what, event in EVENTS.items()
    }
