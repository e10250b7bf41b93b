"""Shards of parameters, and the interface of sharding strategies to `ShardedOptimizer`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.ddp.flat import not_dense


@dataclasses.dataclass(eq=False)
class Shard:
    """The elements of one parameter that this rank updates."""

    param: nn.Parameter
    """The whole parameter."""

    number: int
    """Index among all parameters of the optimizer."""

    start: int
    """First element of the shard, counted in row-major order."""

    stop: int
    """One past its last element."""

    leaf: nn.Parameter
    """These elements, in the parameter's memory, for the inner optimizer to update.

    In the parameter's shape if they are all that it has. Its `.grad` is their averaged gradient."""

    def slice_of(self, grad: Tensor | None) -> Tensor | None:
        """This shard's part of the whole parameter's gradient, a view where possible."""
        if grad is None or grad.shape == self.leaf.shape:
            return grad
        if grad.layout != torch.strided:
            raise not_dense(name_of(self.param), grad)
        return grad.reshape(-1)[self.start : self.stop]  # (stop - start,)


def name_of(param: Tensor) -> str:
    """A parameter in words, for an optimizer that was given no names."""
    return f"a parameter of shape {tuple(param.shape)}"


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group, without its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def make_shard(param: nn.Parameter, number: int, start: int, stop: int, weight: Tensor) -> Shard:
    """The shard of elements `start` to `stop` of `param`, whose memory is the 1-dim `weight`."""
    if stop - start == param.numel():
        weight = weight.view(param.shape)
    return Shard(param, number, start, stop, nn.Parameter(weight))


def whole_shard(param: nn.Parameter, number: int) -> Shard:
    """The shard of all elements, whose leaf is the parameter itself."""
    return Shard(param, number, 0, param.numel(), param)


class ShardingStrategy:
    """Splits parameters into shards, averages gradients, and gathers the updated parameters.

    The methods here do nothing: they suit gradients that something else has averaged and left in
    the shards' leaves, and parameters that are complete when `gather_parameters` returns.
    """

    # gradients that have arrived to be averaged, and whether others would be too late
    arrived: Any = ()
    is_closed = False
    # whether forward passes start `gather_parameters`, in a CUDA graph, and whether one must still
    starts_in_forward = must_gather = False

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.shards: list[Shard] = []
        # shards of parameters that all ranks hold whole and update in the same way
        self.copies: list[Shard] = []

    def add(self, params: list[nn.Parameter], first: int) -> list[Shard]:
        """Shard `params`, numbered from `first`; return the shards of this rank."""
        raise NotImplementedError

    def finish_gradient_synchronization(self) -> None:
        """Set each shard's `.grad` to its averaged gradient."""

    def gather_parameters(self) -> None:
        """Send each rank the parameters that the others updated."""

    def wait_for_parameters(self, params: Iterable[Tensor] | None = None) -> None:
        """Wait until `params` (default: all) are complete."""

    def overlap_gather_with_forward(
        self, parts: Sequence[nn.Module], *, in_graph: bool
    ) -> Callable[[nn.Module], None]:
        """See `ShardedOptimizer.overlap_gather_with_forward`."""
        return lambda part: None

    def no_sync(self) -> contextlib.AbstractContextManager:
        """In the block, backward passes only add up gradients on this rank."""
        return contextlib.nullcontext()
