"""Kinds of modules × events in their life × ways of training on ranks.

An event is a function of a `Side`, which returns what it saw. It runs on ranks, each with inputs of
its own, and in one process with the mean of all ranks' losses. A cell is right if both saw the
same, or if the ranks refuse it with the words in `REFUSED`.
"""

import contextlib
import copy
import functools
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lib.ddp.process_group import (
    barrier,
    broadcast_module,
    current_device,
    mean_over_ranks,
    on_first_rank,
    rank,
    world_size,
)
from lib.ddp.wrappers import wrap
from lib.fsdp import FSDP
from lib.fsdp.blocks import tensors_in
from lib.optimizer.adamw import clip_grad_norm
from lib.sharded_optimizer.optimizer import ShardedOptimizer
from lib.tools.peers.torch_ddp import TorchDDP
from lib.training.checkpoint import load_checkpoint, save_checkpoint
from tests.ddp.kinds import KINDS, D, dtype_of, seeded

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
SMALL = {"bucket_cap_mb": 5e-4}


class Way(NamedTuple):
    """A wrapper, and options of the sharded optimizer, if there is one."""

    wrapper: str | type | None
    zero: dict[str, Any] | None = None

    @property
    def keeps_gradients(self) -> bool:
        """Whether averaged gradients stay with the parameters."""
        return self.zero is None or "reduces_gradients" not in self.zero


LOCAL = {"strategy": "flat", "reduces_gradients": True} | SMALL
WAYS = {
    "naive": Way("naive"),
    "flat": Way("flat"),
    "overlap": Way("overlap"),
    "flashddp": Way("flashddp"),
    "torch_ddp": Way(TorchDDP),
    "zero1": Way(None, LOCAL),
    "zero1, overlapped": Way(None, LOCAL | {"overlap": True}),
    "flashddp, zero1 parameters": Way("flashddp", {"strategy": "parameters"}),
    "flat, zero1 flat": Way("flat", {"strategy": "flat"} | SMALL),
    "torch_ddp, zero1 parameters": Way(TorchDDP, {"strategy": "parameters"}),
    "fsdp": Way("fsdp"),
}
# With other ways than FSDP, which divides modules in many ways, modules of these are trained
# together; PyTorch's DDP wants all parameters to be used.
TOGETHER = ["tied", "frozen", "uneven", "lists", "float64", "two dtypes", "complex", "integers"]
TOGETHER += ["shared", "outputs", "sometimes"]


def kinds_of(way: str) -> list[list[str]]:
    """The kinds that a way takes, in groups of those that are trained together."""
    if way == "fsdp":
        return [[kind] for kind in KINDS]
    return [TOGETHER[:-1] if way.startswith("torch_ddp") else TOGETHER]


class Side:
    """A module in training; here alone, in one process with the inputs of all ranks."""

    def __init__(self, way: str, kinds: Sequence[str], seed: int = 0, group: Any = None) -> None:
        self.way, self.kinds = WAYS[way], kinds
        # on ranks, only rank 0's values count
        self.module = seeded(kinds, seed + self.ranks()[0])
        self.model = self.wrapped(group)
        self.make_optimizer()

    def wrapped(self, group: Any) -> nn.Module:
        """The module or wrapper that is called in training."""
        return self.module

    def make_optimizer(self) -> None:
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), **SGD)

    @property
    def rounds(self) -> list[int]:
        """Where an event is repeated: all but FSDP only agree on an order in the first step."""
        return [0] if self.way.wrapper == "fsdp" else [0, 3]

    def ranks(self) -> list[int]:
        return list(range(world_size()))

    def loss(self, step: int = 0, call: Callable[..., Any] | None = None) -> Tensor:
        """The mean of the losses of the ranks in `ranks`."""
        losses = []
        for number in self.ranks():
            generator = torch.Generator().manual_seed(10 * step + number)
            x = torch.randn(3, D, generator=generator, dtype=torch.float64)
            output = (call or self.model)(x.to(current_device(), dtype_of(self.module)))
            losses.append(sum(t.double().square().mean() for t in tensors_in(output)))
        return sum(losses) / len(losses)  # type: ignore[return-value]

    def no_sync(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Do nothing: gradients are those of all inputs."""

    def clip(self, max_norm: float) -> Tensor:
        return clip_grad_norm(self.module.parameters(), max_norm)

    def update(self, set_to_none: bool = True) -> list[Any]:
        """Take an optimizer step; return who has a gradient, and all values."""
        params = dict(self.module.named_parameters()) if self.way.keeps_gradients else {}
        has_grad = [name for name, param in params.items() if param.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)
        return [has_grad, self.values()]

    def step(self, number: int = 0) -> list[Any]:
        """Take a whole step."""
        loss = self.loss(number)
        loss.backward()
        self.finish()
        return [self.mean(loss), *self.update()]

    def parameters(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters())

    def values(self) -> dict[str, Tensor]:
        values = self.parameters() | dict(self.module.named_buffers())
        return {name: value.detach().clone().cpu() for name, value in values.items()}

    def mean(self, loss: Tensor) -> float:
        return loss.item()

    def alone(self) -> "Side":
        """The side that goes on in one process, on each rank, from saved state."""
        return self


class OnRanks(Side):
    """This rank's side: its own inputs."""

    def wrapped(self, group: Any) -> nn.Module:
        if self.way.wrapper == "fsdp":
            options = KINDS[self.kinds[0]].options(self.module)
            return FSDP(self.module, group=group, **options)
        if self.way.wrapper:
            return wrap(self.way.wrapper, self.module, **SMALL)
        broadcast_module(self.module)
        return self.module

    def make_optimizer(self) -> None:
        if self.way.zero is None:
            super().make_optimizer()
        else:
            params = self.module.parameters()
            self.optimizer = ShardedOptimizer(params, torch.optim.SGD, **self.way.zero, **SGD)

    @property
    def syncing(self) -> Any:
        return self.model if self.way.wrapper else self.optimizer

    def ranks(self) -> list[int]:
        return [rank()]

    def no_sync(self) -> contextlib.AbstractContextManager:
        return self.syncing.no_sync()

    def finish(self) -> None:
        self.syncing.finish_gradient_synchronization()

    def clip(self, max_norm: float) -> Tensor:
        if self.way.zero is not None:
            return self.optimizer.clip_grad_norm(max_norm)
        if isinstance(self.model, FSDP):
            return self.model.clip_grad_norm(max_norm)
        return super().clip(max_norm)

    def parameters(self) -> dict[str, Tensor]:
        if isinstance(self.model, FSDP):
            return self.model.full_parameters()
        return super().parameters()

    def mean(self, loss: Tensor) -> float:
        return mean_over_ranks(loss.item())

    def alone(self) -> Side:
        one = Side("naive", self.kinds)
        one.way = self.way
        one.module.load_state_dict(copy.deepcopy(self.model.state_dict()))
        if self.way.zero is None:
            one.optimizer.load_state_dict(self.optimizer.state_dict())
            return one
        folder = Path(on_first_rank(tempfile.mkdtemp))
        save_checkpoint(folder, step=0, model={}, optimizer=self.optimizer)
        load_checkpoint(folder, optimizer=one.optimizer)
        barrier()
        on_first_rank(lambda: shutil.rmtree(folder))
        return one

    def recover(self) -> None:
        """Get in step with the other ranks again after an error."""
        if self.way.wrapper is None:
            # also with parameters that were moved
            self.optimizer.strategy.check_parameters = lambda: None
            self.optimizer.zero_grad()
        elif self.way.wrapper != "fsdp":
            self.finish()


# Events with all ways


def steps(side: Side) -> list[Any]:
    return [side.step(number) for number in range(3)]


def forward_without_backward(side: Side) -> list[Any]:
    found = []
    for number in side.rounds:
        found += [side.mean(side.loss(7)), side.step(number)]
        with torch.no_grad():
            side.loss(8)
        side.loss(9)
    return found


def two_forwards(side: Side) -> list[Any]:
    found = []
    for number in side.rounds:
        (side.loss(number) + side.loss(number + 1)).backward()
        side.finish()
        found.append(side.update())
    return [*found, side.step(2)]


def accumulation(side: Side) -> list[Any]:
    found = []
    for number in side.rounds:
        for micro in range(2):
            with side.no_sync():
                side.loss(number + micro).backward()
        found.append(side.step(number + 2))
    return found


def only_no_sync(side: Side) -> list[Any]:
    found = []
    for number in side.rounds:
        with side.no_sync():
            side.loss(number).backward()
        side.finish()
        found.append(side.update())
    return [*found, side.step(2)]


def cleared_after_no_sync(side: Side) -> list[Any]:
    found = []
    clears: list[Callable[[], None]] = [
        side.optimizer.zero_grad,
        side.model.zero_grad,
        functools.partial(side.optimizer.zero_grad, set_to_none=False),
    ]
    for number, clear in enumerate(clears):
        with side.no_sync():
            side.loss(number).backward()
        clear()
        found.append(side.step(number + 1))
    return found


def cleared_before_finish(side: Side) -> list[Any]:
    found = []
    for number in side.rounds:
        side.loss(number).backward()
        side.optimizer.zero_grad()
        side.finish()
        found += [side.update(), side.step(number + 1)]
    return found


def finished_twice(side: Side) -> list[Any]:
    found = []
    for number in side.rounds:
        side.loss(number).backward()
        side.finish()
        side.finish()
        found.append(side.update())
    return found


def finished_without_backward(side: Side) -> list[Any]:
    found: list[Any] = []
    for number in side.rounds:
        side.loss(7)
        side.finish()
        found += [side.update(), side.step(number)]
    return found


def clipped(side: Side) -> list[Any]:
    found: list[Any] = []
    for number, max_norm in zip(side.rounds, (0.01, 0.5)):
        side.loss(number).backward()
        side.finish()
        found += [side.clip(max_norm).item(), side.update()]
    return found


def cast(side: Side) -> list[Any]:
    found = [side.step()]
    side.model.double()
    if side.way.wrapper == "fsdp":
        side.make_optimizer()
    dtypes = {name: value.dtype for name, value in side.values().items()}
    return [*found, str(dtypes), side.step(1), side.step(2)]


def copied(side: Side) -> list[Any]:
    side.step()
    if isinstance(side, OnRanks):
        # the hooks of its blocks belong to the FSDP
        has_hooks = isinstance(side.model, FSDP) and side.model.blocks
        copy.deepcopy(side.module if has_hooks else (side.model, side.optimizer))
    return []


def pickled(side: Side) -> list[Any]:
    side.step()
    if isinstance(side, OnRanks):
        pickle.dumps((side.model, side.optimizer))
    return []


def printed(side: Side) -> list[Any]:
    """Nothing is shown that has no memory."""
    assert repr((side.model, side.optimizer, list(side.model.parameters())))
    if isinstance(side.model, FSDP):
        assert all(map(repr, [p for flat in side.model.flats for p in flat.placeholders]))
    return []


# Events with wrappers and ZeRO-1


def gradients_of_zeros(side: Side) -> list[Any]:
    found = []
    for number in range(3):
        side.loss(number).backward()
        side.finish()
        found.append(side.update(set_to_none=False))
    return found


def two_backwards(side: Side) -> list[Any]:
    found = []
    for number in side.rounds:
        losses = [side.loss(number + micro) for micro in range(2)]
        for loss in losses:
            loss.backward()
        side.finish()
        found.append(side.update())
    return found


def finished_for_each_pass(side: Side) -> list[Any]:
    found = []
    for number in side.rounds:
        for micro in range(2):
            side.loss(number + micro).backward()
            side.finish()
        found.append(side.update())
    return found


def load_weights(side: Side) -> list[Any]:
    saved = copy.deepcopy(side.model.state_dict())
    found = side.step()
    side.model.load_state_dict(saved)
    return [found, side.step(1)]


def load_weights_by_assignment(side: Side) -> list[Any]:
    side.step()
    saved = {name: value.clone() for name, value in side.model.state_dict().items()}
    side.model.load_state_dict(saved, assign=True)
    # as PyTorch's documentation asks for
    side.make_optimizer()
    return steps(side)


def load_optimizer(side: Side) -> list[Any]:
    side.step()
    saved = copy.deepcopy(side.optimizer.state_dict())
    found = side.step(1)
    side.optimizer.load_state_dict(saved)
    return [found, side.step(2)]


def goes_on_in_one_process(side: Side) -> list[Any]:
    return [side.step(), side.step(1), side.alone().step(2)]


# Events with FSDP


def two_forwards_with_a_backward_each(side: Side) -> list[Any]:
    first, second = side.loss(0), side.loss(1)
    with side.no_sync():
        first.backward()
    second.backward()
    side.finish()
    return [side.update(), side.step(2)]


def load_after_forward(side: Side) -> list[Any]:
    side.loss()
    side.model.load_state_dict(Side("fsdp", side.kinds, seed=9).module.state_dict())
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


def finished_after_each(side: Side) -> list[Any]:
    for number in range(2):
        side.loss(number).backward()
        side.finish()
    with side.no_sync():
        side.loss(2).backward()
    side.finish()
    return side.update()


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
        side.model(x)
        return side.model(x[:, : D - 1])

    try:
        side.loss(call=fail)
    except RuntimeError:
        return side.step()
    return ["no error"]


def checkpointed(side: Side) -> list[Any]:
    call = functools.partial(checkpoint, side.model, use_reentrant=False)
    with side.no_sync():
        side.loss(0, call).backward()
    side.loss(1, call).backward()
    side.finish()
    return side.update()


def data_replaced(side: Side) -> list[Any]:
    for param in side.model.parameters():
        if param.requires_grad:
            param.data = param.data / 2
    return [side.values(), side.step()]


def frozen_later(side: Side) -> list[Any]:
    found, params = [side.step()], list(side.module.parameters())
    trained = [param for param in params if param.requires_grad]
    for is_trained in (False, True):
        trained[0].requires_grad_(is_trained)
        found.append(side.step(1))
    return found


def state_dict(side: Side) -> list[Any]:
    side.step()
    state = side.model.state_dict()
    found = {name: value.clone().cpu() for name, value in state.items()}
    # what was returned is no part of the module
    for value in side.values().values():
        value.zero_()
    return [found, side.values(), side.step(1)]


def other_world_size(side: Side) -> list[Any]:
    """A state dict of all ranks goes into a module of one rank, and back."""
    found = side.step()
    if isinstance(side, OnRanks):
        small = OnRanks("fsdp", side.kinds, seed=5, group=_group_of_one())
        small.model.load_state_dict(side.model.state_dict())
        found.append(small.values())
        fresh = OnRanks("fsdp", side.kinds, seed=6)
        fresh.model.load_state_dict(small.model.state_dict())
        return [*found, fresh.step(1)]
    return [*found, side.values(), fresh_step(side)]


def fresh_step(side: Side) -> list[Any]:
    side.make_optimizer()
    return side.step(1)


def second_derivative(side: Side) -> list[Any]:
    side.loss().backward(create_graph=True)
    return []


def gradient_of_inputs(side: Side) -> list[Any]:
    inputs: list[Tensor] = []

    def call(x: Tensor) -> Any:
        inputs.append(x.requires_grad_())
        return side.model(x)

    grads = torch.autograd.grad(side.loss(call=call), inputs)
    side.finish()
    # this rank's part of the mean over ranks
    own = grads[rank()] * world_size() if len(grads) > 1 else grads[0]
    return [own.cpu(), side.step(1)]


def events(*functions: Callable[[Side], list[Any]]) -> dict[str, Callable[[Side], list[Any]]]:
    return {function.__name__.replace("_", " "): function for function in functions}


SHARED = events(
    steps,
    forward_without_backward,
    two_forwards,
    accumulation,
    only_no_sync,
    cleared_after_no_sync,
    cleared_before_finish,
    finished_twice,
    finished_without_backward,
    clipped,
    cast,
    copied,
    pickled,
    printed,
)
REPLICATED = SHARED | events(
    gradients_of_zeros,
    two_backwards,
    finished_for_each_pass,
    load_weights,
    load_weights_by_assignment,
    load_optimizer,
    goes_on_in_one_process,
)
DIVIDED = SHARED | events(
    two_forwards_with_a_backward_each,
    load_after_forward,
    update_after_forward,
    update_before_backward,
    finished_after_each,
    evaluated_between,
    read_between,
    error_in_forward,
    checkpointed,
    data_replaced,
    frozen_later,
    state_dict,
    other_world_size,
    second_derivative,
    gradient_of_inputs,
)


def events_of(way: str) -> dict[str, Callable[[Side], list[Any]]]:
    return DIVIDED if way == "fsdp" else REPLICATED


@functools.cache
def _group_of_one() -> Any:
    groups = [dist.new_group([number]) for number in range(world_size())]
    return groups[rank()]


# Cells


class Cell(NamedTuple):
    way: str
    kinds: str
    event: str


def outcomes(ways: Sequence[str]) -> dict[Cell, str]:
    """On this rank, for each cell: `equal`, `refused: …`, or what is wrong."""
    torch.backends.cudnn.allow_tf32 = False
    warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
    return {
        Cell(way, ", ".join(kinds), event): outcome(way, kinds, event)
        for way in ways
        for kinds in kinds_of(way)
        for event in events_of(way)
    }


def outcome(way: str, kinds: list[str], event: str) -> str:
    act = events_of(way)[event]
    expected = seen_by(Side, way, kinds, act)
    found = seen_by(OnRanks, way, kinds, act)
    if isinstance(found, Exception):
        if isinstance(expected, Exception) and str(expected)[:60] == str(found)[:60]:
            return "equal"
        return f"refused: {type(found).__name__}: {found}"
    if isinstance(expected, Exception):
        return f"wrong: accepts what one process refuses: {expected}"
    # FSDP may add up in another order; so does what is compared after a norm or a cast
    tolerance = 2e-5 if way == "fsdp" else 1e-6
    precise = tolerance if way != "fsdp" and event in ("cast", "clipped") else 1e-13
    wrong = list(differences(found, expected, tolerance, precise, kinds == ["float64"]))
    return f"wrong: {'; '.join(wrong[:3])}" if wrong else "equal"


def seen_by(kind_of_side: type[Side], way: str, kinds: list[str], act: Callable) -> Any:
    """Return what an event saw, or its error."""
    side = None
    try:
        side = kind_of_side(way, kinds)
        return act(side)
    except Exception as error:
        # what backward had started on either rank is finished on both
        if isinstance(side, OnRanks):
            with contextlib.suppress(Exception):
                side.recover()
        return error


def differences(
    found: Any, expected: Any, tolerance: float, precise: float, is_precise: bool, path: str = ""
) -> Iterator[str]:
    """Where two nested observations differ by more than rounding.

    Args:
        precise: the tolerance of modules that compute in float64.
    """
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            yield f"{path}: {list(found)} instead of {list(expected)}"
        for name in expected:
            is_one = is_precise or name.startswith("float64.")
            pair = found[name], expected[name]
            yield from differences(*pair, tolerance, precise, is_one, f"{path}.{name}")
    elif isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            yield f"{path}: {found} instead of {expected}"
        for index, pair in enumerate(zip(found, expected)):
            yield from differences(*pair, tolerance, precise, is_precise, f"{path}.{index}")
    elif isinstance(expected, (Tensor, float)):
        one, other = torch.as_tensor(found), torch.as_tensor(expected)
        most = precise if is_precise else tolerance
        if one.dtype != other.dtype or one.shape != other.shape:
            yield f"{path}: {one.dtype} {one.shape} instead of {other.dtype} {other.shape}"
        elif not torch.allclose(one, other, rtol=most, atol=most):
            yield f"{path}: off by {(one - other).abs().max():.3g}"
    elif found != expected:
        yield f"{path}: {found} instead of {expected}"


# Refusals: words of what ranks raise instead, by way and event, and by kind with FSDP

TORCH = ("torch_ddp", "torch_ddp, zero1 parameters")
OURS = ("naive", "flat", "overlap", "flashddp", "flashddp, zero1 parameters", "flat, zero1 flat")
FLAT = ("zero1", "zero1, overlapped", "flat, zero1 flat")
REFUSED: dict[tuple[str, str], str] = {
    ("fsdp", "copied"): "TypeError: an FSDP cannot be copied or pickled",
    ("fsdp", "pickled"): "TypeError: an FSDP cannot be copied or pickled",
    ("fsdp", "second derivative"): "backward must run without create_graph=True",
    ("zero1", "finished for each pass"): "RuntimeError: a backward pass ran after the gradients",
}
# they send in backward
for way in ("overlap", "flashddp", "flashddp, zero1 parameters"):
    REFUSED[way, "two backwards"] = "RuntimeError: the gradient of "
for way in (*OURS, *TORCH):
    words = "RuntimeError: parameter tied.layers.0.linear.weight was repl"
    REFUSED[way, "load weights by assignment"] = words
for way in TORCH:
    REFUSED[way, "two backwards"] = "RuntimeError: torch_ddp would not average a second backward"
    REFUSED[way, "only no sync"] = "RuntimeError: the last backward pass ran in no_"
    REFUSED[way, "cast"] = "RuntimeError: the module was cast after it was wrapped; wrap it again"
for way in FLAT:
    REFUSED[way, "cast"] = "RuntimeError: a parameter of shape "
for way, (wrapper, _) in WAYS.items():
    for event in ("copied", "pickled"):
        words = "TypeError: a ShardedOptimizer cannot be copied or pickled"
        of_wrapper = "on several ranks cannot be copied or pickled"
        REFUSED.setdefault((way, event), of_wrapper if wrapper else words)
for event in ("two backwards", "finished for each pass"):
    words = "RuntimeError: the gradient of a parameter of shape "
    REFUSED["zero1, overlapped", event] = words
REFUSED_KINDS = {
    "wrapped twice": "layers.0.module.linear.weight must be whole, but is divided",
    "changes a weight": "a forward pass changed one of layers.0.linear.weight",
}
# A block of FSDP is as new as the newest of its parameters: PyTorch's error comes more often.
MAY_BE_REFUSED = {"update before backward": "has been modified by an inplace operation"}


def unexpected(cells: dict[Cell, str]) -> dict[Cell, str]:
    """The cells that are neither equal to one process nor refused as they should be."""
    found = {}
    for cell, text in cells.items():
        words = REFUSED.get((cell.way, cell.event))
        others = MAY_BE_REFUSED.get(cell.event), REFUSED_KINDS.get(cell.kinds)
        # some events of a kind that is refused make no pass, or end in PyTorch's error too
        is_right = words in text if words else text == "equal"
        if not is_right and not any(other in text for other in others if other):
            found[cell] = text
    return found
