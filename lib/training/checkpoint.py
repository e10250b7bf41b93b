"""Checkpoints: folders that are whole or absent, verified when read, never unpickled.

A folder `step-00000100` holds `model.safetensors` with whole weights, `tensors.safetensors`,
`shard-<rank>-of-<ranks>.safetensors` with each rank's part of the optimizer's state (an optimizer
that is not sharded is one shard), `state.json` with the rest, and `manifest.json` with size and
hash of each file.

How a checkpoint becomes durable, even if the process is killed (`save_checkpoint`):

1. all files go into a hidden folder `.step-00000100.partial`, each flushed to the disk;
2. the manifest is written last, so that a folder with a valid manifest is whole;
3. one rename gives the folder its name, and the parent folder is flushed;
4. older checkpoints are hidden by a rename before they are deleted.

The next save removes what a killed one left (`_clean`).
"""

import contextlib
import functools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from lib.core import files
from lib.core.settings import from_json, require, settings, to_json
from lib.ddp.process_group import on_each_rank, rank, world_size
from lib.ddp.wrappers import inner_module
from lib.sharded_optimizer.saved_state import load_whole
from lib.training import old_checkpoints
from lib.training.tensor_files import (
    check_tensors,
    find_tied,
    pack,
    read_tensors,
    unpack,
    write_tensors,
)

# The second form is a checkpoint that was moved aside while another of its step replaces it.
NAME = re.compile(r"step-\d{8,}|\.step-\d{8,}\.replaced")
SHARD = "shard-{:05d}-of-{:05d}.safetensors"
T = TypeVar("T")
# Files by name: a text, or tensors and metadata.
Contents = dict[str, str | tuple[dict[str, Tensor], dict[str, str]]]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """The contents of `path` besides model and optimizer; tensors on the CPU."""

    step: int
    extra: dict[str, Any]
    tensors: dict[str, Tensor]
    path: Path


@settings
class _Manifest:
    # 1: see `old_checkpoints`
    format: Literal[1, 2]
    # size in bytes and SHA-256
    files: dict[str, tuple[int, str]]


# Saving


def save_checkpoint(
    folder: str | os.PathLike,
    *,
    step: int,
    model: nn.Module | dict[str, Tensor],
    optimizer: Optimizer | None = None,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
    keep_last: int | None = None,
    group: Any = None,
) -> Path:
    """Write the checkpoint `step-<step>` into `folder` (made if missing); return its path.

    At any moment, even if the process is killed, each folder named `step-*` is whole. One of the
    same step is replaced. Other processes that save into `folder` wait for this one.

    All ranks of a sharded optimizer call this together, and each writes its own shard; an error of
    one is raised on all. Rank 0 writes its own model, extra and tensors for all.

    Args:
        model: a module, compiled or not, or its state dict.
        extra: JSON values; tuples come back as lists, and keys as text.
        tensors: any further state, such as `rng_state(device)`.
        keep_last: keep this many checkpoints, this one included, and delete older ones.
        group: a process group whose ranks call this together, as they then do with any optimizer
            (default: that of a sharded optimizer, whose timeout a slow disk may exceed).

    Raises:
        OSError: a file cannot be written; if the disk is full, names what is needed and free.
            Earlier checkpoints stay, and nothing of this one does.
    """
    number, on_each = _ranks(optimizer, group)

    # check and collect everything before the disk is touched
    def collect() -> tuple[Path, Contents]:
        require(step >= 0, f"step must be at least 0, got {step}")
        is_count = keep_last is None or keep_last > 0
        require(is_count, f"keep_last must be at least 1, got {keep_last}")
        state = {"step": step, "extra": extra or {}}
        contents = _whole(inner_module(model), tensors or {}, state) if number == 0 else {}
        if optimizer is not None and (number == 0 or _is_sharded(optimizer)):
            contents |= _shard(inner_module(model), optimizer)
        return Path(folder) / f"step-{step:08d}", contents

    def publish() -> None:
        if number == 0:
            _publish(target, keep_last)

    target, contents = on_each(collect)

    # all or nothing, also if one rank fails
    with contextlib.ExitStack() as held:
        # rank 0 makes the folder, all write, rank 0 gives it its name
        on_each(lambda: number or held.enter_context(_partial_folder(target, contents)))
        on_each(lambda: _write(_partial(target), contents))
        on_each(publish)
    return target


def _ranks(optimizer: Any, group: Any) -> tuple[int, Callable[[Callable[[], T]], T]]:
    """This process's number among those that save together, and `on_each_rank` of these."""
    if group is None and not _is_sharded(optimizer):
        return 0, lambda call: call()
    group = group or optimizer.group
    return rank(group), functools.partial(on_each_rank, group=group)


def _whole(model: Any, tensors: dict[str, Tensor], state: dict[str, Any]) -> Contents:
    """The files that rank 0 writes for all."""
    weights = model.state_dict() if isinstance(model, nn.Module) else model
    # what safetensors cannot hold would fail halfway, or lose what tensors share
    check_tensors("model", weights)
    check_tensors("tensors", tensors)
    return {
        "model.safetensors": (weights, {}),
        "tensors.safetensors": (tensors, {}),
        "state.json": _json(state, indent=1),
    }


def _shard(model: Any, optimizer: Any) -> Contents:
    """The file of this rank's part of the optimizer's state."""
    number, ranks, tensors = 0, 1, {}
    if _is_sharded(optimizer):
        number, ranks = rank(optimizer.group), world_size(optimizer.group)
    state = pack(optimizer.state_dict(), "optimizer", tensors)
    check_tensors("optimizer", tensors)
    text = _json(
        {"parameters": _parameters(optimizer, model), "state": state}, separators=(",", ":")
    )
    return {SHARD.format(number, ranks): (tensors, {"optimizer": text})}


def _json(value: Any, **layout: Any) -> str:
    try:
        return json.dumps(value, **layout)
    except (TypeError, ValueError) as error:
        message = f"extra and the optimizer's settings must be JSON values: {error}"
        raise ValueError(message) from error


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


@contextlib.contextmanager
def _partial_folder(target: Path, contents: Contents) -> Iterator[None]:
    """Make the folder for the files of `target`, and keep other processes out until they are."""
    with files.lock_folder(target.parent):
        # this process holds the lock, so the one that left partial files is gone
        _clean(target.parent)
        try:
            _partial(target).mkdir()
            yield
        except OSError as error:
            if error.errno not in files.NO_SPACE:
                raise
            _clean(target.parent)
            parts = [content[0] for content in contents.values() if not isinstance(content, str)]
            needed = sum(tensor.nbytes for part in parts for tensor in part.values())
            raise files.no_space_error(error, target, needed) from error
        finally:
            _clean(target.parent)


def _write(folder: Path, contents: Contents) -> None:
    for name, content in contents.items():
        if isinstance(content, str):
            files.write_atomically(folder / name, content)
        else:
            write_tensors(folder / name, *content)


def _publish(target: Path, keep_last: int | None) -> None:
    """Give the written folder its manifest and name, and hide the checkpoints to be deleted."""
    # last of all files the manifest; hashes are read back from the page cache
    written = _partial(target).iterdir()
    entries = {file.name: (file.stat().st_size, files.sha256_file(file)) for file in written}
    files.write_atomically(_partial(target) / "manifest.json", to_json(_Manifest(2, entries)))

    # the rename makes the checkpoint visible; a flush of the folder makes it last
    if target.exists():
        os.replace(target, target.with_name(f".{target.name}.replaced"))
    os.replace(_partial(target), target)
    files.sync_folder(target.parent)

    # older ones are hidden before they are deleted, since a name promises a whole checkpoint
    if keep_last is not None:
        older = [path for path in list_checkpoints(target.parent) if _step(path) < _step(target)]
        for path in reversed(older[keep_last - 1 :]):
            os.replace(path, path.with_name(f".{path.name}.deleted"))


def _clean(folder: Path) -> None:
    """Delete hidden folders, but put back a checkpoint whose replacement never came."""
    for path in list(folder.glob(".step-*")):
        visible = folder / path.stem[1:]
        if path.suffix == ".replaced" and not visible.exists():
            os.replace(path, visible)
        else:
            # renamed first: while it is being deleted, no name may promise a whole checkpoint
            shutil.rmtree(path.rename(path.with_suffix(".deleted")))


# Loading


def load_checkpoint(
    path: str | os.PathLike,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    verify: bool = True,
) -> Checkpoint:
    """Read the checkpoint `path`, or the newest whole one in the folder `path`.

    State is copied into `model` and `optimizer` only after all of it was found to fit. A sharded
    optimizer's state loads into an unsharded one or any other sharding, and the other way around;
    all ranks of a sharded one call this together, and an error of one is raised on all. A
    checkpoint that is damaged or does not fit is a ValueError.

    Args:
        verify: False skips hashing, for a path that `find_checkpoint` or `newest_checkpoint` just
            returned.
    """
    if optimizer is None or not _is_sharded(optimizer):
        return _load_here(path, model, optimizer, verify)
    group = optimizer.group  # type: ignore[attr-defined]  # sharded ones have it
    return on_each_rank(lambda: _load_here(path, model, optimizer, verify), group)


def _load_here(
    path: str | os.PathLike, model: nn.Module | None, optimizer: Optimizer | None, verify: bool
) -> Checkpoint:
    """`load_checkpoint` of this rank alone."""
    if verify:
        return read_checkpoint(path, lambda found: _load_here(found, model, optimizer, False))

    # everything is read and compared first
    path = Path(path)
    model = None if model is None else inner_module(model)
    state = _read_state(path)
    # clones, since tensors from safetensors stay mapped to the file
    saved, _ = read_tensors(path / "tensors.safetensors")
    tensors = {name: tensor.clone() for name, tensor in saved.items()}
    if model is not None:
        # weights of another shape or dtype would be broadcast or rounded
        weights, _ = read_tensors(path / "model.safetensors")
        _check_model(path, model, weights)

    # then copied
    if optimizer is not None:
        # before the model, since this allocates memory and can still fail
        load_optimizer(path, optimizer, model)
    if model is not None:
        model.load_state_dict(weights)
    return Checkpoint(state["step"], state["extra"], tensors, path)


def read_extra(path: Path) -> dict[str, Any]:
    """The `extra` saved in the checkpoint `path`, which was verified before."""
    return _read_state(path)["extra"]


def _read_state(path: Path) -> dict[str, Any]:
    """Read what a checkpoint holds besides tensors.

    Raises:
        ValueError: it is not what `save_checkpoint` writes.
    """
    try:
        state = json.loads((path / "state.json").read_bytes())
        return {name: state[name] for name in ("step", "extra")}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path / 'state.json'}: not the state of a checkpoint") from error


def read_checkpoint(path: str | os.PathLike, read: Callable[[Path], T]) -> T:
    """The result of `read` for the checkpoint `path`, or the newest whole one in the folder `path`.

    A warning names each damaged one with a higher step; if all are damaged, a ValueError does. One
    that a training deletes before or while it is read is not damaged: the folder is listed again.
    """
    path = Path(path)
    if NAME.fullmatch(path.name) or (path / "manifest.json").exists():
        if not path.is_dir():
            raise FileNotFoundError(f"no checkpoint {path}")
        _verify(path)
        return read(path)

    # the newest that is whole
    checkpoints = list_checkpoints(path)
    if not checkpoints:
        raise FileNotFoundError(f"no checkpoint step-* in {path}")
    for found in checkpoints:
        is_whole = False
        try:
            _verify(found)
            is_whole = True
            return read(found)
        except (OSError, ValueError, SafetensorError) as error:
            if not found.exists():
                # a training has deleted it, for a newer one
                return read_checkpoint(path, read)
            if is_whole:
                raise
            log.warning("refused: %s", error)
    names = ", ".join(found.name for found in checkpoints)
    raise ValueError(f"no checkpoint in {path} is whole: {names}")


def find_checkpoint(path: str | os.PathLike) -> Path:
    """The checkpoint `path`, or the newest whole one in the folder `path`; verified."""
    return read_checkpoint(path, lambda found: found)


def newest_checkpoint(folder: str | os.PathLike) -> Path | None:
    """The whole checkpoint of the highest step in `folder`; None if there are no checkpoints."""
    return find_checkpoint(folder) if list_checkpoints(Path(folder)) else None


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints in `folder`, whole or not, the highest step first."""
    found = [path for path in folder.glob("*") if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (_step(path), path.name), reverse=True)


def _step(path: Path) -> int:
    return int(re.sub(r"\D", "", path.name))


def _verify(path: Path) -> None:
    """Raise ValueError unless every file of the checkpoint `path` is as it was written."""
    name = "manifest.json"
    try:
        # a manifest that lists too few files would let damage pass
        listed = from_json(_Manifest, path / name).files
        expected = {"state.json", "model.safetensors", "tensors.safetensors"}
        expected.update(shard.name for shard in path.glob("shard-*"))
        missing = ", ".join(sorted(expected - listed.keys()))
        require(not missing, f"does not list {missing}")

        # every file has the bytes that were written
        for name, (size, sha256) in listed.items():
            found = (path / name).stat().st_size
            require(found == size, f"must have {size:,} bytes, got {found:,}")
            require(files.sha256_file(path / name) == sha256, "was altered: its hash differs")
    except (OSError, ValueError) as error:
        problem = "is missing" if isinstance(error, FileNotFoundError) else error
        raise ValueError(f"checkpoint {path} is damaged: {name} {problem}") from error


def _check_model(path: Path, model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Raise ValueError unless the tensors `saved` can be copied into `model` as they are."""
    own = model.state_dict()
    both = {name: tensor for name, tensor in own.items() if name in saved}
    wrong = [
        f"{name} is {saved[name].dtype} {tuple(saved[name].shape)}, not {t.dtype} {tuple(t.shape)}"
        for name, t in both.items()
        if (saved[name].shape, saved[name].dtype) != (t.shape, t.dtype)
    ]
    wrong += [
        f"{name} and {kept} are tied in the model and differ"
        for name, kept in find_tied(both).items()
        if saved[name] is not saved[kept] and not torch.equal(saved[name], saved[kept])
    ]
    wrong += [f"{name} is on device meta, without memory" for name in both if own[name].is_meta]
    wrong += [f"{name} is missing" for name in own if name not in saved]
    wrong += [f"{name} is not in the model" for name in saved if name not in own]
    require(not wrong, f"checkpoint {path} does not fit the model: {'; '.join(wrong)}")


# The optimizer's state


def load_optimizer(path: Path, optimizer: Any, model: nn.Module | None = None) -> None:
    """Load the optimizer's state alone from the checkpoint `path`, which was verified before.

    Saved state and `optimizer` may each be sharded or not. For a sharded optimizer this loads the
    part of this rank, without a collective. `model` names the parameters, whose names are compared
    with those saved, if there are any.
    """
    saved, states = _read_shards(path) or old_checkpoints.read_optimizer(path)
    require(states, f"checkpoint {path} holds no optimizer state")

    # parameter by parameter the same class and shape, and the same name where both have names
    own = _parameters(optimizer, model)
    for there, here in zip_longest(own if saved is None else saved, own):
        is_same = there and here and there[1:] == here[1:]
        is_same = is_same and (there[0] == here[0] or not (there[0] and here[0]))
        message = f"checkpoint {path} does not fit the optimizer: {there} instead of {here}"
        require(is_same, message)

    # each rank takes its part of the shards, however many ranks wrote them
    if _is_sharded(optimizer):
        optimizer.load_state_dicts(states, path)
    else:
        load_whole(states, path, optimizer)


def _read_shards(path: Path) -> tuple[list, list[dict[str, Any]]] | None:
    """The saved `_parameters`, and the state dict of each rank; None if there are no shards."""
    # one file for each rank that saved, none missing
    shards = sorted(path.glob("shard-*.safetensors"))
    states = []
    for number, shard in enumerate(shards):
        expected = SHARD.format(number, len(shards))
        message = f"checkpoint {path} is damaged: it needs {expected}, got {shard.name}"
        require(shard.name == expected, message)
        tensors, metadata = read_tensors(shard)
        packed = json.loads(metadata["optimizer"])
        states.append(unpack(packed["state"], tensors))
    return (packed["parameters"], states) if shards else None


def _is_sharded(optimizer: Any) -> bool:
    """Whether each rank has its own part of the state, as in `ShardedOptimizer`."""
    return hasattr(optimizer, "load_state_dicts")


def _parameters(optimizer: Any, model: Any) -> list[list]:
    """[name in `model` or "", optimizer class, shape] of each parameter."""
    named = model.named_parameters() if isinstance(model, nn.Module) else ()
    names = {id(param): name for name, param in named}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # the class that updates shards, so that sharding makes no difference
    kind = type(getattr(optimizer, "inner", optimizer)).__name__
    return [[names.get(id(param), ""), kind, list(param.shape)] for param in params]


# Random numbers


def rng_state(device: str | torch.device) -> dict[str, Tensor]:
    """The states of torch's global generators, uint8: the CPU's, and `device`'s if it is CUDA."""
    state = {"rng_cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        state["rng_cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Tensor], device: str | torch.device) -> None:
    """Restore what `rng_state` returned for a `device` of this kind; other names are ignored."""
    name = "rng_cuda" if torch.device(device).type == "cuda" else "rng_cpu"
    missing = {"rng_cpu", name} - state.keys()
    require(not missing, f"state must be that of rng_state({str(device)!r}), but lacks {missing}")
    torch.set_rng_state(state["rng_cpu"])
    if name == "rng_cuda":
        torch.cuda.set_rng_state(state[name], device)
