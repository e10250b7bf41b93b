"""Kinds of modules × events, with each wrapper and each way of sharding the optimizer, on ranks.

An event is written once, and acts on two sides: on ranks, each with its own inputs, and on one
process with the inputs of all. A cell is right if both end with the same parameters, or if the
ranks refuse it with the words that `REFUSED` gives. The modules of all kinds are trained together,
and compared kind by kind.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import pickle
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lib.ddp.process_group import (
    broadcast_module,
    current_device,
    gather_objects,
    on_first_rank,
    rank,
    world_size,
)
from lib.ddp.wrappers import wrap
from lib.sharded_optimizer.optimizer import ShardedOptimizer
from lib.sharded_optimizer.saved_state import load_unsharded

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
# wrapper, and options of the sharded optimizer; None: there is none
LOCAL = {"strategy": "flat", "reduces_gradients": True}
SMALL = {"bucket_cap_mb": 5e-4}
WAYS: dict[str, tuple[str | None, dict[str, Any] | None]] = {
    "naive": ("naive", None),
    "flat": ("flat", None),
    "overlap": ("overlap", None),
    "flashddp": ("flashddp", None),
    "torch_ddp": ("torch_ddp", None),
    "zero1": (None, LOCAL | SMALL),
    "zero1, overlapped": (None, LOCAL | SMALL | {"overlap": True}),
    "flashddp, zero1 parameters": ("flashddp", {"strategy": "parameters"}),
    "flat, zero1 flat": ("flat", {"strategy": "flat"} | SMALL),
    "torch_ddp, zero1 parameters": ("torch_ddp", {"strategy": "parameters"}),
}


# Kinds of modules: each takes (batch, 4) inputs


def linear(*sizes: int) -> list[nn.Linear]:
    return [nn.Linear(*pair, bias=False) for pair in itertools.pairwise(sizes)]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(4, 4, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(self.a(x))))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(4, 5, 4, 3)
        self.b.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(self.a(x))))


class Uneven(nn.Module):
    """Sizes that no number of ranks divides, a single number, and no number at all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 7), nn.Linear(7, 3), nn.Linear(3, 1)
        self.scale, self.empty = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0, 3))
        # a transposed one
        self.b.weight = nn.Parameter(torch.randn(7, 3).T)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(torch.tanh(self.a(x)))
        return self.c(x) * self.scale + (x @ self.empty.T).sum()


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([torch.randn(4, 4), torch.randn(4)])
        self.dict = nn.ParameterDict({"b": torch.randn(4), "a": torch.randn(4, 3)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.list[0] + self.list[1] * self.dict["b"]) @ self.dict["a"]


class Unused(nn.Module):
    """One layer that only rank 0 uses, and one that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.sometimes, self.never, self.b = linear(4, 4, 4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        # inputs of rank 0 are below 2
        return self.b(x + self.sometimes(x) if SOMETIMES.uses else x)


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.double())


class Mixed(nn.Module):
    """Parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(torch.tanh(self.a(x.to(self.a.weight.dtype))).to(self.b.weight.dtype))
        return self.c(x.to(self.c.weight.dtype))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.a = nn.Linear(4, 4)
        self.number = nn.Parameter(torch.randn((), dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).to(self.phase.dtype) @ self.phase * self.number
        return torch.view_as_real(x)


class Integers(nn.Module):
    """Buffers and parameters of integers and truth values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(4, 4, 4)
        self.index = nn.Parameter(torch.randint(4, (4,)), requires_grad=False)
        self.is_kept = nn.Parameter(torch.rand(4) < 0.5, requires_grad=False)
        self.register_buffer("count", torch.randint(9, ()))
        self.register_buffer("mask", torch.rand(4) < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))[:, self.index] * self.is_kept
        return self.b(x * self.mask + self.count)


class Shared(nn.Module):
    """One block that is run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3)
        self.again = self.block

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.block(x)))


@dataclasses.dataclass
class Output:
    logits: Tensor
    extra: dict[str, list[Tensor]]


class Answers(Tied):
    """A module that returns a dataclass."""

    def forward(self, x: Tensor) -> Any:
        return Output(super().forward(x), {"hidden": [self.b(x)]})


class Sometimes:
    """Whether the inputs of rank 0 are in use."""

    uses = True


SOMETIMES = Sometimes()
KINDS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "frozen": Frozen,
    "uneven": Uneven,
    "lists": Lists,
    "unused": Unused,
    "float64": Double,
    "mixed": Mixed,
    "complex": Complex,
    "integers": Integers,
    "shared": Shared,
    "dataclass": Answers,
}


class Kinds(nn.ModuleDict):
    """Modules of all kinds, which get the same inputs."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__({name: KINDS[name]() for name in names})

    def forward(self, x: Tensor, uses_sometimes: bool) -> dict[str, Any]:
        SOMETIMES.uses = uses_sometimes
        return {name: module(x) for name, module in self.items()}


def loss_of(model: nn.Module, number: int, micro: int) -> Tensor:
    """The loss of rank `number`'s inputs in a micro-batch: the sum of those of all kinds."""
    generator = torch.Generator().manual_seed(10 * micro + number)
    dtype = next(param.dtype for param in model.parameters() if param.is_floating_point())
    x = torch.randn(3, 4, generator=generator).to(current_device(), dtype)
    total: Any = 0
    for output in model(x, number == 0).values():
        if isinstance(output, Output):
            output = output.logits + output.extra["hidden"][0]
        total = total + output.square().mean()
    return total


# Sides


class OnRanks:
    """This rank's side: its own inputs."""

    def __init__(self, way: str, kinds: Sequence[str]) -> None:
        self.wrapper, self.options = WAYS[way]
        # other weights on each rank
        torch.manual_seed(rank())
        self.module = self.model = Kinds(kinds).to(current_device())
        if self.wrapper:
            self.model = wrap(self.wrapper, self.module, **SMALL)
        else:
            broadcast_module(self.module)
        self.optimizer = self.make_optimizer(self.module)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        if self.options is None:
            return torch.optim.SGD(module.parameters(), **SGD)
        return ShardedOptimizer(module.parameters(), torch.optim.SGD, **self.options, **SGD)

    @property
    def syncing(self) -> Any:
        return self.model if self.wrapper else self.optimizer

    def loss(self, micro: int) -> Tensor:
        return loss_of(self.model, rank(), micro)

    def no_sync(self) -> AbstractContextManager:
        return self.syncing.no_sync()

    def finish(self) -> None:
        self.syncing.finish_gradient_synchronization()

    def clip(self, max_norm: float) -> None:
        if self.options is None:
            nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        else:
            self.optimizer.clip_grad_norm(max_norm)

    def recover(self) -> None:
        """Get in step with the other ranks again after an error in backward."""
        (self.finish if self.wrapper else self.optimizer.zero_grad)()

    def copied(self, copy_of: Callable[[Any], Any]) -> None:
        """Go on with copies of model and optimizer."""
        self.model, self.optimizer = copy_of((self.model, self.optimizer))
        self.module = self.model.module if self.wrapper else self.model

    def alone(self) -> None:
        """Go on in one process, on each rank, from saved state."""
        state = copy.deepcopy(self.model.state_dict())
        folder = Path(on_first_rank(tempfile.mkdtemp))
        if self.options is not None:
            self.optimizer.save_shard(folder)
        saved = self.optimizer.state_dict() if self.options is None else None
        module = copy.deepcopy(self.module)
        module.load_state_dict(state)
        optimizer = torch.optim.SGD(module.parameters(), **SGD)
        if saved is not None:
            optimizer.load_state_dict(saved)
        else:
            load_unsharded(folder, optimizer)
        self.module = self.model = module
        self.optimizer = optimizer
        self.loss = functools.partial(OnOne.loss, self)  # type: ignore[method-assign, arg-type]
        self.no_sync = nullcontext  # type: ignore[method-assign]
        self.finish = lambda: None  # type: ignore[method-assign]


class OnOne:
    """One process with the inputs of all ranks."""

    def __init__(self, kinds: Sequence[str]) -> None:
        torch.manual_seed(0)
        self.module = self.model = Kinds(kinds).to(current_device())
        self.optimizer = self.make_optimizer(self.module)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), **SGD)

    def loss(self, micro: int) -> Tensor:
        losses = [loss_of(self.model, number, micro) for number in range(world_size())]
        return sum(losses) / world_size()  # type: ignore[return-value]

    no_sync = nullcontext

    def finish(self) -> None:
        """Do nothing: gradients are those of all inputs."""

    def clip(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def copied(self, copy_of: Callable[[Any], Any]) -> None:
        self.model, self.optimizer = copy_of((self.model, self.optimizer))
        self.module = self.model

    def alone(self) -> None:
        """Stay alone."""


# Events


def step(side: Any, micro: int) -> None:
    side.loss(micro).backward()
    side.finish()
    update(side)


def update(side: Any, set_to_none: bool = True) -> None:
    side.optimizer.step()
    side.optimizer.zero_grad(set_to_none=set_to_none)


def steps(side: Any) -> None:
    for micro in range(3):
        step(side, micro)


def gradients_of_zeros(side: Any) -> None:
    for micro in range(3):
        side.loss(micro).backward()
        side.finish()
        update(side, set_to_none=False)


def clipping(side: Any) -> None:
    for micro in range(2):
        side.loss(micro).backward()
        side.finish()
        side.clip(0.5)
        update(side)


def two_forwards_one_backward(side: Any) -> None:
    for micro in (0, 2):
        (side.loss(micro) + side.loss(micro + 1)).backward()
        side.finish()
        update(side)


def two_backwards(side: Any) -> None:
    for micro in (0, 2):
        losses = side.loss(micro), side.loss(micro + 1)
        for loss in losses:
            loss.backward()
        side.finish()
        update(side)


def forward_without_backward(side: Any) -> None:
    for micro in range(3):
        side.loss(7)
        step(side, micro)
        with torch.no_grad():
            side.loss(8)
        side.loss(9)


def accumulation(side: Any) -> None:
    for micro in (0, 3):
        with side.no_sync():
            side.loss(micro).backward()
            side.loss(micro + 1).backward()
        step(side, micro + 2)


def zero_grad_after_no_sync(side: Any) -> None:
    for micro in (0, 2):
        with side.no_sync():
            side.loss(micro).backward()
        side.optimizer.zero_grad()
        step(side, micro + 1)


def module_zero_grad_after_no_sync(side: Any) -> None:
    for micro in (0, 2):
        with side.no_sync():
            side.loss(micro).backward()
        side.model.zero_grad()
        step(side, micro + 1)


def finish_after_no_sync_alone(side: Any) -> None:
    for micro in range(2):
        with side.no_sync():
            side.loss(micro).backward()
        side.finish()
        update(side)


def finish_twice(side: Any) -> None:
    for micro in range(2):
        side.loss(micro).backward()
        side.finish()
        side.finish()
        update(side)


def finish_for_each_pass(side: Any) -> None:
    for micro in (0, 2):
        for part in range(2):
            side.loss(micro + part).backward()
            side.finish()
        update(side)


def finish_without_backward(side: Any) -> None:
    side.finish()
    update(side)
    step(side, 0)
    side.finish()
    update(side)
    step(side, 1)


def load_weights(side: Any) -> None:
    saved = copy.deepcopy(side.model.state_dict())
    step(side, 0)
    side.model.load_state_dict(saved)
    step(side, 1)


def load_weights_by_assignment(side: Any) -> None:
    step(side, 0)
    saved = {name: value.clone() for name, value in side.model.state_dict().items()}
    side.model.load_state_dict(saved, assign=True)
    # as PyTorch's documentation asks for
    side.optimizer = side.make_optimizer(side.module)
    steps(side)


def load_optimizer(side: Any) -> None:
    step(side, 0)
    saved = copy.deepcopy(side.optimizer.state_dict())
    step(side, 1)
    side.optimizer.load_state_dict(saved)
    step(side, 2)


def copied(side: Any) -> None:
    step(side, 0)
    side.copied(copy.deepcopy)
    steps(side)


def pickled_and_shown(side: Any) -> None:
    step(side, 0)
    assert repr(side.model)
    assert repr(side.optimizer)
    side.copied(lambda pair: pickle.loads(pickle.dumps(pair)))
    steps(side)


def cast(side: Any) -> None:
    step(side, 0)
    side.model.double()
    step(side, 1)


def goes_on_in_one_process(side: Any) -> None:
    step(side, 0)
    step(side, 1)
    side.alone()
    step(side, 2)


EVENTS: dict[str, Callable[[Any], None]] = {
    event.__name__: event
    for event in (
        steps,
        gradients_of_zeros,
        clipping,
        two_forwards_one_backward,
        two_backwards,
        forward_without_backward,
        accumulation,
        zero_grad_after_no_sync,
        module_zero_grad_after_no_sync,
        finish_after_no_sync_alone,
        finish_twice,
        finish_for_each_pass,
        finish_without_backward,
        load_weights,
        load_weights_by_assignment,
        load_optimizer,
        copied,
        cast,
        pickled_and_shown,
        goes_on_in_one_process,
    )
}


def differences(side: Any, one: Any, precise: float) -> dict[str, str]:
    """By kind what differs between the parameters and buffers of both sides; "" if nothing does."""
    found, expected = (
        dict(s.module.named_parameters()) | dict(s.module.named_buffers()) for s in (side, one)
    )
    assert found.keys() == expected.keys()
    texts = dict.fromkeys(one.module, "")
    for name, value in expected.items():
        atol = precise if name.startswith("float64.") else 1e-6
        try:
            torch.testing.assert_close(found[name], value, rtol=0, atol=atol)
        except AssertionError as error:
            texts[name.split(".")[0]] += f"{name}: {' '.join(str(error).split())} "
    return texts


def outcome(way: str, kinds: Sequence[str], event: str) -> dict[str, str]:
    """By kind "" if both sides end alike, or else how they differ, or what was raised."""
    one = OnOne(kinds)
    EVENTS[event](one)
    try:
        side = OnRanks(way, kinds)
        EVENTS[event](side)
    except Exception as error:
        # what backward had started on either rank is finished on both
        with contextlib.suppress(Exception, UnboundLocalError):
            side.recover()
        return dict.fromkeys(kinds, f"{type(error).__name__}: {error}")
    return differences(side, one, 1e-6 if event in ("cast", "clipping") else 1e-13)


def outcomes(ways: Sequence[str]) -> dict[tuple[str, str], list[dict[str, str]]]:
    """The outcomes on all ranks, of each way and event."""
    cells = [(way, event) for way in ways for event in EVENTS]
    return {
        (way, event): gather_objects(outcome(way, kinds_of(way), event)) for way, event in cells
    }


def kinds_of(way: str) -> list[str]:
    """The kinds that a way takes."""
    return [kind for kind in KINDS if (way, kind) not in REFUSED_KINDS]


# The first words of what ranks raise instead, by way and kind, and by way and event

TORCH = ("torch_ddp", "torch_ddp, zero1 parameters")
OURS = ("naive", "flat", "overlap", "flashddp", "flashddp, zero1 parameters", "flat, zero1 flat")
FLAT = ("zero1", "zero1, overlapped", "flat, zero1 flat")
REFUSED_KINDS = {
    (way, "unused"): "RuntimeError: backward did not reach parameter unused." for way in TORCH
}
REFUSED: dict[tuple[str, str], str] = {}
for way in OURS:
    REFUSED[way, "two_backwards"] = "RuntimeError: the gradient of "
for way in (*OURS, *TORCH):
    REFUSED[way, "load_weights_by_assignment"] = "RuntimeError: parameter tied.a.weight was repl"
for way in TORCH:
    REFUSED[way, "two_backwards"] = "RuntimeError: torch_ddp would not average a second backward"
    REFUSED[way, "finish_after_no_sync_alone"] = "RuntimeError: the last backward pass ran in no_"
    REFUSED[way, "cast"] = "RuntimeError: the module was cast after it was wrapped; wrap it again"
for way in FLAT:
    REFUSED[way, "cast"] = "RuntimeError: a parameter of shape "
for way, (wrapper, _) in WAYS.items():
    words = "TypeError: a ShardedOptimizer cannot be copied or pickled"
    for event in ("copied", "pickled_and_shown"):
        REFUSED[way, event] = "TypeError: " if wrapper else words
REFUSED["zero1", "finish_for_each_pass"] = "RuntimeError: a backward pass ran after the gradients"
for event in ("two_backwards", "finish_for_each_pass"):
    REFUSED["zero1, overlapped", event] = "RuntimeError: the gradient of a parameter of shape "
