"""Shards: the elements of a parameter that one rank updates."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn


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


def whole_shards(params: list[nn.Parameter], first: int = 0) -> list[Shard]:
    """The shards of all elements of parameters, which are numbered from `first`."""
    return [whole_shard(param, number) for number, param in enumerate(params, first)]


def whole_shard(param: nn.Parameter, number: int) -> Shard:
    """The shard of all elements, whose leaf is the parameter itself."""
    return Shard(param, number, 0, param.numel(), param)
