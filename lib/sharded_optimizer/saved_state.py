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
import pickle
import re
import secrets
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lib.core.files import atomic_write
from lib.core.settings import require
from lib.ddp.process_group import on_each_rank, on_first_rank, rank, world_size
from lib.optimizer.adamw import AdamW
from lib.sharded_optimizer.shards import Shard, settings_of, whole_shard

Groups = list[dict[str, Any]]
# The files of all ranks; `shard_name` is that of one.
SHARDS = "shard-*-of-*.pt"
SHARD = re.compile(r"shard-\d{5,}-of-(\d{5,})\.pt")


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
        if not isinstance(inner, AdamW):
            # only this library's AdamW keeps float32 masters of low-precision weights
            found.pop("master", None)
        if found:
            state[index] = found

    # first, since it may refuse the state
    saved_groups = state_dicts[0]["param_groups"]
    numbered = copy.deepcopy(_numbered(inner.param_groups))
    _load_settings(numbered, saved_groups)
    inner.load_state_dict({"state": state, "param_groups": numbered})
    # a learning rate that is a tensor stays the same tensor
    _load_settings(groups, saved_groups)
    for group, inner_group in zip(groups, inner.param_groups):
        inner_group.update(settings_of(group))


def load_unsharded(folder: str | os.PathLike, optimizer: torch.optim.Optimizer) -> None:
    """Load what a sharded optimizer saved in `folder` into an optimizer that is not sharded.

    Float32 masters are loaded by this library's AdamW and dropped by other optimizers.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the files do not fit the optimizer, or are from different saves.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    whole = [whole_shard(param, number) for number, param in enumerate(params)]
    unpack_shards(read_shards(folder), folder, whole, optimizer, optimizer.param_groups)


def shard_name(rank: int, ranks: int) -> str:
    """The name of the file that `rank` of `ranks` writes."""
    return f"shard-{rank:05d}-of-{ranks:05d}.pt"


def write_shard(
    folder: str | os.PathLike, state_dict: dict[str, Any], group: dist.ProcessGroup | None
) -> Path:
    """Write this rank's file, whole or not at all, and wait until all ranks have.

    Raises:
        OSError: a rank cannot write; raised on all ranks.
    """
    # a random name for this save, so that files of different saves are not mixed up
    save = on_first_rank(lambda: secrets.token_hex(8), group)
    ranks = world_size(group)

    def write() -> Path:
        path = Path(folder) / shard_name(rank(group), ranks)
        with atomic_write(path) as file:
            torch.save({**state_dict, "save": save}, file)
        return path

    def remove_other_world_sizes() -> None:
        for other in Path(folder).iterdir():
            name = SHARD.fullmatch(other.name)
            if name and int(name[1]) != ranks:
                other.unlink()

    path = on_each_rank(write, group)
    on_first_rank(remove_other_world_sizes, group)
    return path


def read_shards(folder: str | os.PathLike) -> list[dict[str, Any]]:
    """Open the state dicts of all ranks; tensors are read from the disk when they are used.

    Raises:
        FileNotFoundError: there are none, or one is missing.
        ValueError: they are from different saves, or one is damaged.
    """
    paths = shard_paths(folder)
    if not paths:
        raise FileNotFoundError(f"no file {SHARDS} in {folder}")
    loaded = [_read_shard(path) for path in paths]
    saves = {state_dict["save"] for state_dict in loaded}
    require(len(saves) == 1, f"the shards in {folder} must be from one save, got {len(saves)}")
    return loaded


def shard_paths(folder: str | os.PathLike) -> list[Path]:
    """The files of all ranks in `folder`, in the order of ranks; none if there are none.

    Raises:
        FileNotFoundError: one is missing.
        ValueError: there are files of several numbers of ranks.
    """
    folder = Path(folder)
    names = [path.name for path in folder.glob(SHARDS)]
    found = {name: int(match[1]) for name in names if (match := SHARD.fullmatch(name))}
    sizes = sorted(set(found.values()))
    require(
        len(sizes) <= 1,
        f"{folder} must hold the files of one number of ranks, got those of "
        f"{' and of '.join(map(str, sizes))}: {', '.join(sorted(found))}",
    )
    expected = [shard_name(n, ranks) for ranks in sizes for n in range(ranks)]
    missing = [name for name in expected if name not in found]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}")
    return [folder / name for name in expected]


def _read_shard(path: Path) -> dict[str, Any]:
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    is_shard = isinstance(loaded, dict) and "save" in loaded
    require(is_shard, f"{path} is damaged: it is not what save_shard writes")
    return loaded


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
                group[name] = value.item() if isinstance(value, Tensor) else value


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
        f"the state has {covered:,} of them; load the files of all ranks with load_shards",
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
            state[name] = value.clone() if isinstance(value, Tensor) else value
    return state
