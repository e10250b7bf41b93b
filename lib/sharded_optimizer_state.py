"""Saved state of a sharded optimizer, and how it is cut anew for other ranks.

A state dict is like that of any optimizer, but holds the elements of one rank only: `state` has for
the number of each parameter the state of the elements that `ranges` tells (row-major, start and
stop), in which `master` is their float32 weight where there is one. `shapes` are those of all
parameters. A state dict without `ranges` is that of an unsharded optimizer, and is the whole.
"""

from __future__ import annotations

import copy
import math
import os
import secrets
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lib.config import require
from lib.distributed import rank, world_size
from lib.files import atomic_write
from lib.optimizer import AdamW
from lib.ranks import on_each_rank, on_first_rank
from lib.sharded_optimizer_parts import Shard

Shape = tuple[int, ...]


class SavedShard(NamedTuple):
    """The state of elements `start` to `stop` of one parameter; `shape` is that of its tensors."""

    start: int
    stop: int
    shape: Shape
    state: dict[str, Any]


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """What a parameter group holds beside its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def numbered_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups as in a state dict: numbers in place of parameters."""
    first, numbered = 0, []
    for group in groups:
        last = first + len(group["params"])
        numbered.append({**settings_of(group), "params": list(range(first, last))})
        first = last
    return numbered


def shapes_of(groups: list[dict[str, Any]]) -> list[Shape]:
    return [tuple(param.shape) for group in groups for param in group["params"]]


def load_settings(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Take over the settings of saved groups; a tensor stays the same and takes the value."""
    for group, theirs in zip(groups, saved):
        for name, value in settings_of(theirs).items():
            own = group.get(name)
            if isinstance(own, Tensor):
                own.copy_(torch.as_tensor(value))
            else:
                group[name] = value.item() if isinstance(value, Tensor) else value


def loaded_groups(
    groups: list[dict[str, Any]], saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """`numbered_groups` with the settings of saved ones; `groups` stay as they are."""
    numbered = copy.deepcopy(numbered_groups(groups))
    load_settings(numbered, saved)
    return numbered


def check_fits(
    state_dict: dict[str, Any], groups: list[dict[str, Any]], what: str | os.PathLike
) -> None:
    """Raise a `ValueError` where saved groups or shapes are not those of the parameters."""
    missing = ", ".join(name for name in ("param_groups", "state") if name not in state_dict)
    require(not missing, f"{what} lacks {missing}; right is: what an optimizer's state_dict() gave")
    sizes = [len(group["params"]) for group in groups]
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    require(saved == sizes, f"{what} has groups of {saved} parameters; right is: {sizes}")
    shapes = shapes_of(groups)
    for number, (found, right) in enumerate(zip(state_dict.get("shapes", shapes), shapes)):
        message = f"{what} has parameter {number} of shape {tuple(found)}; right is: {right}"
        require(tuple(found) == right, message)


def saved_shards(
    state_dicts: list[dict[str, Any]], shapes: list[Shape]
) -> dict[int, list[SavedShard]]:
    """What the state dicts hold of each parameter, by its number and in order of the elements."""
    found = defaultdict(list)
    for state_dict in state_dicts:
        whole = {number: (0, math.prod(shapes[number])) for number in range(len(shapes))}
        for number, (start, stop) in state_dict.get("ranges", whole).items():
            is_whole = stop - start == math.prod(shapes[number])
            shape = shapes[number] if is_whole else (stop - start,)
            state = state_dict["state"].get(number, {})
            found[number].append(SavedShard(start, stop, shape, state))
    return {number: sorted(shards, key=lambda s: s.start) for number, shards in found.items()}


def state_of_range(
    number: int, start: int, stop: int, shape: Shape, shards: list[SavedShard]
) -> dict[str, Any]:
    """The state of elements `start` to `stop` of parameter `number`, put together from `shards`.

    Raises:
        ValueError: elements are missing, or a tensor of another shape than the elements' (as a sum
            over rows) would have to be cut.
    """
    parts = [shard for shard in shards if shard.start < stop and start < shard.stop]
    covered = sum(min(stop, part.stop) - max(start, part.start) for part in parts)
    require(
        covered == stop - start,
        f"elements {start:,} to {stop:,} of parameter {number} were asked for, of which "
        f"{covered:,} are there; right is: the files of all ranks, through load_shards",
    )
    state = {}
    for name, value in parts[0].state.items() if parts else ():
        if isinstance(value, Tensor) and value.shape == parts[0].shape:
            pieces = [
                part.state[name].reshape(-1)[
                    max(start, part.start) - part.start : min(stop, part.stop) - part.start
                ]
                for part in parts
            ]
            state[name] = torch.cat(pieces).view(shape)
            continue
        is_same = len(parts) == 1 and parts[0][:2] == (start, stop)
        if isinstance(value, Tensor) and value.dim() and not is_same:
            raise ValueError(
                f"state {name} of parameter {number} has shape {tuple(value.shape)} and belongs to "
                f"elements {parts[0].start:,} to {parts[0].stop:,} together; right is: the same "
                "strategy and number of ranks as when it was saved"
            )
        state[name] = value.clone() if isinstance(value, Tensor) else value
    return state


def pack_shards(
    shards: list[Shard], inner: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """The state dict of one rank, whose shards `inner` updates; `groups` have all parameters."""
    state = {}
    for shard in shards:
        found = dict(inner.state.get(shard.leaf, {}))
        if shard.has_master:
            found["master"] = (shard.weight.float() if shard.is_fresh else shard.leaf).detach()
        if found:
            state[shard.number] = found
    return {
        "param_groups": numbered_groups(groups),
        "state": state,
        "ranges": {shard.number: (shard.start, shard.stop) for shard in shards},
        "shapes": shapes_of(groups),
    }


@torch.no_grad()
def unpack_shards(
    state_dicts: list[dict[str, Any]],
    what: str | os.PathLike,
    shards: list[Shard],
    inner: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
) -> None:
    """Load the shards' part of `state_dicts`, or nothing; errors call them `what`."""
    check_fits(state_dicts[0], groups, what)
    saved = saved_shards(state_dicts, shapes_of(groups))
    state, masters = {}, []
    for index, shard in enumerate(shards):
        place = (shard.number, shard.start, shard.stop, tuple(shard.weight.shape))
        found = state_of_range(*place, saved.get(shard.number, []))
        if shard.has_master:
            masters.append((shard, found.pop("master", None)))
        elif not isinstance(inner, AdamW):
            found.pop("master", None)
        if found:
            state[index] = found
    saved_groups = state_dicts[0]["param_groups"]
    # first, since it may refuse the state
    loaded = loaded_groups(inner.param_groups, saved_groups)
    inner.load_state_dict({"state": state, "param_groups": loaded})
    load_settings(groups, saved_groups)
    for group, inner_group in zip(groups, inner.param_groups):
        inner_group.update(settings_of(group))
    for shard, master in masters:
        shard.is_fresh = master is None
        if master is not None:
            shard.leaf.copy_(master)


def write_shard(
    folder: str | os.PathLike, state_dict: dict[str, Any], group: dist.ProcessGroup | None
) -> Path:
    """Write this rank's file, whole or not at all, and wait for those of the others.

    Raises:
        OSError: on all ranks, where one cannot write.
    """
    # so that files of different saves are not taken for one
    save = on_first_rank(lambda: secrets.token_hex(8), group)
    ranks = world_size(group)
    path = Path(folder) / f"shard-{rank(group):05d}-of-{ranks:05d}.pt"

    def write() -> None:
        with atomic_write(path) as file:
            torch.save({**state_dict, "save": save}, file)

    def remove_others() -> None:
        for other in Path(folder).glob("shard-*-of-*.pt"):
            if not other.stem.endswith(f"-of-{ranks:05d}"):
                other.unlink()

    on_each_rank(write, group)
    on_first_rank(remove_others, group)
    return path


def read_shards(folder: str | os.PathLike) -> list[dict[str, Any]]:
    """The state dicts of all ranks, of whose tensors only what is used is read from the disk.

    Raises:
        FileNotFoundError: there are none, or one is missing.
        ValueError: they are not of one save.
    """
    paths = sorted(Path(folder).glob("shard-*-of-*.pt"))
    if not paths:
        raise FileNotFoundError(f"no file shard-*-of-*.pt in {folder}")
    ranks = int(paths[-1].stem.rpartition("-")[2])
    expected = [paths[-1].with_name(f"shard-{n:05d}-of-{ranks:05d}.pt") for n in range(ranks)]
    missing = [path.name for path in expected if path not in paths]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}")
    others = ", ".join(path.name for path in paths if path not in expected)
    require(not others, f"{folder} holds the files of {ranks} ranks, and also {others}")
    loaded = [
        torch.load(path, map_location="cpu", mmap=True, weights_only=True) for path in expected
    ]
    saves = {state_dict["save"] for state_dict in loaded}
    require(len(saves) == 1, f"the shards in {folder} are of {len(saves)} saves; right is: one")
    return loaded


def load_unsharded(folder: str | os.PathLike, optimizer: torch.optim.Optimizer) -> None:
    """Load what a sharded optimizer saved in `folder` into one that is not sharded.

    Float32 masters are taken over by this library's AdamW; other optimizers have no place for them.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the files do not fit the optimizer, or are not of one save.
    """
    state_dicts = read_shards(folder)
    check_fits(state_dicts[0], optimizer.param_groups, folder)
    shapes = shapes_of(optimizer.param_groups)
    state = {}
    for number, shards in saved_shards(state_dicts, shapes).items():
        shape = shapes[number]
        found = state_of_range(number, 0, math.prod(shape), shape, shards)
        if not isinstance(optimizer, AdamW):
            found.pop("master", None)
        if found:
            state[number] = found
    groups = loaded_groups(optimizer.param_groups, state_dicts[0]["param_groups"])
    optimizer.load_state_dict({"state": state, "param_groups": groups})
