"""Saving a sharded optimizer's state, and loading it on any number of ranks.

A state dict looks like that of any optimizer, but holds one rank's elements only: `state` maps a
parameter's number to the state of its elements `ranges[number]` (start and stop, row-major), and
`shapes` has the shapes of all parameters. Without `ranges` it is an unsharded optimizer's, and
holds everything. A rank that loads cuts what it needs out of the state dicts of all saved ranks.
"""

from __future__ import annotations

import copy
import math
import os
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lib.core.settings import require
from lib.optimizer.adamw import AdamW
from lib.sharded_optimizer.shards import Shard, settings_of, whole_shards

Groups = list[dict[str, Any]]


def pack_shards(shards: list[Shard], inner: torch.optim.Optimizer, groups: Groups) -> dict:
    """The state dict of one rank, whose shards `inner` updates; `groups` hold all parameters."""
    params = [param for group in groups for param in group["params"]]
    states = {shard.number: _in_shape(inner.state.get(shard.leaf, {}), shard) for shard in shards}
    return {
        "param_groups": _numbered(groups),
        "state": {number: state for number, state in states.items() if state},
        "ranges": {shard.number: (shard.start, shard.stop) for shard in shards},
        "shapes": [tuple(param.shape) for param in params],
    }


def _in_shape(state: dict[str, Any], shard: Shard) -> dict[str, Any]:
    """State of a whole parameter in its shape, also where its elements are a flat shard."""
    if shard.stop - shard.start < shard.param.numel():
        return dict(state)
    flat, shape = shard.leaf.shape, shard.param.shape
    is_flat = {name: isinstance(v, Tensor) and v.shape == flat for name, v in state.items()}
    return {name: v.view(shape) if is_flat[name] else v for name, v in state.items()}


@torch.no_grad()
def unpack_shards(
    state_dicts: list[dict[str, Any]],
    source: str | os.PathLike,
    shards: list[Shard],
    inner: torch.optim.Optimizer,
    groups: Groups,
) -> None:
    """Load the shards' part of `state_dicts` into `inner`, or change nothing.

    Args:
        source: where they come from, for error messages.
        shards: in the order of the parameters of `inner`.
        groups: the parameter groups of all ranks together.

    Raises:
        ValueError: they do not fit.
    """
    shapes = [tuple(param.shape) for group in groups for param in group["params"]]
    _check_fits(state_dicts[0], groups, shapes, source)
    pieces = _pieces_by_parameter(state_dicts, shapes)
    state = {}
    for index, shard in enumerate(shards):
        found = _assemble(shard, pieces[shard.number])
        if isinstance(inner, torch.optim.AdamW):
            # PyTorch's keeps no float32 masters of low-precision weights
            found.pop("master", None)
        if found:
            state[index] = found

    # first, since it may refuse the state
    saved_groups = state_dicts[0]["param_groups"]
    numbered = copy.deepcopy(_numbered(inner.param_groups))
    _load_settings(numbered, saved_groups)
    inner.load_state_dict({**state_dicts[0], "state": state, "param_groups": numbered})
    if not isinstance(inner, AdamW):
        # PyTorch rounds the float32 state of bfloat16 parameters to bfloat16
        for index, found in state.items():
            loaded = inner.state[shards[index].leaf]
            for name, value in found.items():
                if isinstance(value, Tensor) and value.dtype != loaded[name].dtype:
                    loaded[name] = value.to(loaded[name].device)
    # a learning rate that is a tensor stays the same tensor
    _load_settings(groups, saved_groups)
    for group, inner_group in zip(groups, inner.param_groups):
        inner_group.update(settings_of(group))


def load_whole(
    state_dicts: list[dict[str, Any]], source: str | os.PathLike, optimizer: torch.optim.Optimizer
) -> None:
    """`unpack_shards` for an optimizer that is not sharded."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    unpack_shards(state_dicts, source, whole_shards(params), optimizer, optimizer.param_groups)


def _numbered(groups: Groups) -> Groups:
    """Parameter groups as in a state dict, with numbers instead of parameters."""
    first, numbered = 0, []
    for group in groups:
        last = first + len(group["params"])
        numbered.append({**settings_of(group), "params": list(range(first, last))})
        first = last
    return numbered


def _load_settings(groups: Groups, saved: Groups) -> None:
    """Copy settings of saved groups; a setting that is a tensor stays the same tensor."""
    for group, saved_group in zip(groups, saved):
        for name, value in settings_of(saved_group).items():
            own = group.get(name)
            if isinstance(own, Tensor):
                own.copy_(torch.as_tensor(value))
            else:
                group[name] = copy.deepcopy(value)


def _check_fits(
    state_dict: dict[str, Any], groups: Groups, shapes: list[tuple], source: str | os.PathLike
) -> None:
    """Raise a `ValueError` if saved groups or shapes are not those of the parameters."""
    missing = ", ".join(name for name in ("param_groups", "state") if name not in state_dict)
    require(not missing, f"{source} must be an optimizer's state_dict(), but lacks {missing}")
    sizes = [len(group["params"]) for group in groups]
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    require(saved == sizes, f"{source} must have groups of {sizes} parameters, got {saved}")
    for number, (found, expected) in enumerate(zip(state_dict.get("shapes", shapes), shapes)):
        message = f"{source}: parameter {number} must have shape {expected}, got {tuple(found)}"
        require(tuple(found) == expected, message)


class _Piece(NamedTuple):
    """Saved state of elements `start` to `stop` of one parameter, in tensors of `shape`."""

    start: int
    stop: int
    shape: tuple[int, ...]
    state: dict[str, Any]


def _pieces_by_parameter(
    state_dicts: list[dict[str, Any]], shapes: list[tuple]
) -> dict[int, list[_Piece]]:
    """The state of each parameter in all state dicts, by its number, in order of the elements."""
    pieces = defaultdict(list)
    everything = {number: (0, math.prod(shape)) for number, shape in enumerate(shapes)}
    for state_dict in state_dicts:
        for number, (start, stop) in state_dict.get("ranges", everything).items():
            is_whole = (start, stop) == everything[number]
            shape = shapes[number] if is_whole else (stop - start,)
            state = state_dict["state"].get(number, {})
            pieces[number].append(_Piece(start, stop, shape, state))
    for parts in pieces.values():
        parts.sort(key=lambda piece: piece.start)
    return pieces


def _assemble(shard: Shard, pieces: list[_Piece]) -> dict[str, Any]:
    """The state of a shard, put together from the pieces that overlap it.

    Raises:
        ValueError: elements are missing, or a tensor would have to be cut whose elements are not
            those of the parameter, such as Adafactor's sums over rows.
    """
    parts = [piece for piece in pieces if piece.start < shard.stop and shard.start < piece.stop]
    cuts = [
        slice(max(shard.start, part.start) - part.start, min(shard.stop, part.stop) - part.start)
        for part in parts
    ]
    covered = sum(cut.stop - cut.start for cut in cuts)
    require(
        covered == shard.stop - shard.start,
        f"elements {shard.start:,} to {shard.stop:,} of parameter {shard.number} are needed, but "
        f"the state has {covered:,} of them; load_checkpoint loads the state of all ranks",
    )
    is_uncut = len(parts) == 1 and parts[0][:2] == (shard.start, shard.stop)
    state = {}
    for name, value in parts[0].state.items() if parts else ():
        if isinstance(value, Tensor) and value.shape == parts[0].shape:
            # a value per element
            cut_out = [part.state[name].reshape(-1)[cut] for part, cut in zip(parts, cuts)]
            state[name] = torch.cat(cut_out).view(shard.leaf.shape)
        elif isinstance(value, Tensor) and value.dim() and not is_uncut:
            raise ValueError(
                f"state {name} of parameter {shard.number} has shape {tuple(value.shape)}, which "
                "cannot be cut by elements; load it with the strategy and number of ranks that "
                "saved it"
            )
        else:
            # a value for the whole parameter, such as Adam's step count
            state[name] = copy.deepcopy(value)
    return state
