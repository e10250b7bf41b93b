"""Checkpoints: folders that are whole or absent, verified when read, never unpickled.

A folder `step-00000100` holds `model.safetensors`, `optimizer.safetensors`, `tensors.safetensors`,
`state.json` with all that is no tensor, and `manifest.json` with the size and hash of each file.
The state of a sharded optimizer is in a file `shard-<rank>-of-<ranks>.pt` of each rank instead.
"""

import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from lib import files
from lib.checkpoint_optimizer import SHARDS, is_sharded, pack_optimizer, unpack_optimizer
from lib.config import require
from lib.strict_json import from_json, to_json

# The second form is one that stands aside while it is being replaced.
NAME = re.compile(r"step-\d{8,}|\.step-\d{8,}\.replaced")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """What `path` holds beside model and optimizer: what the caller saved, tensors on the CPU."""

    step: int
    extra: dict[str, Any]
    tensors: dict[str, Tensor]
    path: Path


@dataclass(frozen=True)
class _Manifest:
    format: Literal[1]
    # size in bytes and SHA-256
    files: dict[str, tuple[int, str]]


def save_checkpoint(
    folder: str | os.PathLike,
    *,
    step: int,
    model: nn.Module | dict[str, Tensor],
    optimizer: Optimizer | None = None,
    shards: str | os.PathLike | None = None,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
    keep_last: int | None = None,
) -> Path:
    """Write the checkpoint `step-<step>` into `folder` (made when missing); return its path.

    At every moment, also when the process is killed, each folder named `step-*` is whole. One of
    the same step is replaced. Other processes that save into `folder` wait for this one.

    Args:
        model: a module; its state dict where no `optimizer` is given, whose parameters it names.
        shards: in place of `optimizer`, a folder that `ShardedOptimizer.save_shard` filled, on the
            disk of `folder`; its files move into the checkpoint.
        extra: JSON values; tuples come back as lists.
        tensors: any further state, such as `rng_state(device)`.
        keep_last: delete all checkpoints of earlier steps but the last so many, counting this one.

    Raises:
        ValueError: `step`, `keep_last`, something to save that is not a tensor, a sharded
            `optimizer`, or a folder `shards` without shards.
        TypeError: `extra` or the optimizer holds what JSON has no form for.
        OSError: names what cannot be written, and when the disk is full what is needed and free;
            earlier checkpoints stay, nothing of this one does.
    """
    require(step >= 0, f"step is {step}; right is: 0 or more")
    require(keep_last is None or keep_last > 0, f"keep_last is {keep_last}; right is: 1 or more")
    folder = Path(folder)
    target = folder / f"step-{step:08d}"
    weights = model.state_dict() if isinstance(model, nn.Module) else model
    parts = {"model": weights, "tensors": tensors or {}, "optimizer": {}}
    packed = None
    if optimizer is not None:
        message = "optimizer is sharded; right is: shards, a folder that its save_shard filled"
        require(not is_sharded(optimizer), message)
        packed = pack_optimizer(optimizer, model, parts["optimizer"])
    state = json.dumps({"step": step, "extra": extra or {}, "optimizer": packed}, indent=1)
    for part, content in parts.items():
        for name, value in content.items():
            kind = type(value).__name__
            require(isinstance(value, Tensor), f"{part}: {name} is a {kind}; right is: a tensor")
    shard_files = [] if shards is None else sorted(Path(shards).glob(SHARDS))
    message = f"shards is {shards}, which holds none; right is: what save_shard filled"
    require(shards is None or shard_files, message)
    with files.lock_folder(folder):
        # whoever left something half done is dead, for it would hold the lock
        _clean(folder)
        try:
            _write(folder / f".{target.name}.partial", parts, state, shard_files)
            _publish(target, keep_last)
        except OSError as error:
            if error.errno not in files.NO_SPACE:
                raise
            _clean(folder)
            needed = sum(tensor.nbytes for part in parts.values() for tensor in part.values())
            raise files.no_space_error(error, target, needed + len(state)) from error
        finally:
            _clean(folder)
    return target


def load_checkpoint(
    path: str | os.PathLike,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    strict: bool = True,
    verify: bool = True,
) -> Checkpoint:
    """Read the checkpoint `path`, or the newest whole one in the folder `path`.

    State is copied into `model` and `optimizer` only after all of it was found to fit. What a
    sharded optimizer saved loads into one that is not, and the other way round; all ranks of a
    sharded one call this together.

    Args:
        strict: when false, `model` may lack names or have further ones, and dtypes are converted.
        verify: false for what `find_checkpoint` or `newest_checkpoint` has just returned, whose
            files need not be hashed again.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: the checkpoint is damaged, or does not fit; says in what.
    """
    path = find_checkpoint(path) if verify else Path(path)
    state = json.loads((path / "state.json").read_bytes())
    # copies, since what safetensors returns stays tied to the file
    tensors = {k: v.clone() for k, v in _load_tensors(path / "tensors.safetensors").items()}
    if model is not None:
        weights = _load_tensors(path / "model.safetensors")
        _check_model(path, model, weights, strict)
    if optimizer is not None:
        # before the model, since this takes memory and so can still fail
        load_optimizer(path, optimizer, model)
    if model is not None:
        model.load_state_dict(weights, strict=strict)
    return Checkpoint(state["step"], state["extra"], tensors, path)


def find_checkpoint(path: str | os.PathLike) -> Path:
    """The checkpoint `path`, or the newest whole one in the folder `path`; verified.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: the checkpoint, or each of those in the folder, is damaged.
    """
    path = Path(path)
    if NAME.fullmatch(path.name) or (path / "manifest.json").exists():
        if not path.is_dir():
            raise FileNotFoundError(f"no checkpoint {path}")
        _verify(path)
        return path
    newest = newest_checkpoint(path)
    if newest is None:
        raise FileNotFoundError(f"no checkpoint step-* in {path}")
    return newest


def load_optimizer(path: Path, optimizer: Optimizer, model: nn.Module | None) -> None:
    """Read the state of `model`'s optimizer alone from the checkpoint `path`, verified before.

    Args:
        model: names the parameters; when None, their names are not compared.

    Raises:
        ValueError: as `load_checkpoint`.
    """
    packed = json.loads((path / "state.json").read_bytes())["optimizer"]
    tensors = _load_tensors(path / "optimizer.safetensors")
    unpack_optimizer(path, packed, tensors, optimizer, model)


def read_extra(path: Path) -> dict[str, Any]:
    """What the caller saved as `extra` in the checkpoint `path`, which was verified before."""
    return json.loads((path / "state.json").read_bytes())["extra"]


def newest_checkpoint(folder: str | os.PathLike) -> Path | None:
    """The checkpoint of the highest step in `folder` whose files are as they were written.

    Each damaged one before it is named in a warning. None when there is no checkpoint at all.

    Raises:
        ValueError: there are checkpoints, and none is whole.
    """
    checkpoints = _checkpoints(Path(folder))
    for path in checkpoints:
        try:
            _verify(path)
            return path
        except ValueError as error:
            log.warning("refused: %s", error)
    names = ", ".join(path.name for path in checkpoints)
    require(not names, f"no checkpoint in {folder} is whole: {names}")
    return None


def rng_state(device: str | torch.device) -> dict[str, Tensor]:
    """States of torch's global generators, uint8: the CPU's and, if CUDA, that of `device`."""
    state = {"rng_cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        state["rng_cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Tensor], device: str | torch.device) -> None:
    """Put back what `rng_state` gave for a `device` of this kind; ignore other names in `state`.

    Raises:
        ValueError: `state` lacks the state of one of the generators.
    """
    name = "rng_cuda" if torch.device(device).type == "cuda" else "rng_cpu"
    missing = {"rng_cpu", name} - state.keys()
    require(not missing, f"state lacks {missing}; right is: what rng_state({str(device)!r}) gave")
    torch.set_rng_state(state["rng_cpu"])
    if name == "rng_cuda":
        torch.cuda.set_rng_state(state[name], device)


def _write(
    folder: Path, parts: dict[str, dict[str, Tensor]], state: str, shards: list[Path]
) -> None:
    """Make `folder` with all files of a checkpoint, everything on disk."""
    folder.mkdir()
    for file in shards:
        os.replace(file, folder / file.name)
    for name, tensors in parts.items():
        _save_tensors(tensors, folder / f"{name}.safetensors")
    files.write_atomically(folder / "state.json", state)
    for file in folder.iterdir():
        # safetensors lets nobody else read its files, whatever the user's umask
        file.chmod((folder / "state.json").stat().st_mode)
    # read back from the page cache: hashing on the way would take one more copy in memory
    entries = {p.name: (p.stat().st_size, files.sha256_file(p)) for p in folder.iterdir()}
    files.write_atomically(folder / "manifest.json", to_json(_Manifest(1, entries)))


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write `tensors`; of names for one memory the first is stored, the rest are metadata."""
    tied = _tied(tensors)
    # clones, since safetensors refuses different views of one memory
    clones = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
        if name not in tied
    }
    try:
        save_file(clones, path, metadata=tied or None)
    except SafetensorError as error:
        # it tells the system's error number in its text only, older versions as a `code`
        number = re.search(r"(?:os error|code:) (\d+)", str(error))
        code = int(number[1]) if number else None
        raise OSError(code, os.strerror(code) if code else str(error), str(path)) from error
    with open(path, "rb+") as file:
        files.sync(file)


def _load_tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors | {name: tensors[kept] for name, kept in (file.metadata() or {}).items()}


def _tied(tensors: dict[str, Tensor]) -> dict[str, str]:
    """For each name whose tensor stands before it under another name: that other name."""
    first, tied = {}, {}
    for name, tensor in tensors.items():
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        kept = first.setdefault(memory, name)
        if kept != name:
            tied[name] = kept
    return tied


def _publish(target: Path, keep_last: int | None) -> None:
    """Give the folder just written its name, and take theirs from those no longer kept."""
    if target.exists():
        os.replace(target, target.with_name(f".{target.name}.replaced"))
    os.replace(target.with_name(f".{target.name}.partial"), target)
    files.sync_folder(target.parent)
    if keep_last is not None:
        older = [path for path in _checkpoints(target.parent) if _step(path) < _step(target)]
        for path in reversed(older[keep_last - 1 :]):
            os.replace(path, path.with_name(f".{path.name}.deleted"))


def _clean(folder: Path) -> None:
    """Remove what is hidden, and put back a checkpoint that was moved aside for no other."""
    for path in list(folder.glob(".step-*")):
        visible = folder / path.stem[1:]
        if path.suffix == ".replaced" and not visible.exists():
            os.replace(path, visible)
        else:
            # from now on the name says that files may be missing
            shutil.rmtree(path.rename(path.with_suffix(".deleted")))


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, the newest first."""
    found = [path for path in folder.glob("*") if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (_step(path), path.name), reverse=True)


def _step(path: Path) -> int:
    return int(re.sub(r"\D", "", path.name))


def _verify(path: Path) -> None:
    """Raise ValueError unless every file of the checkpoint `path` is as it was written."""
    name = "manifest.json"
    try:
        listed = from_json(_Manifest, path / name).files
        require("state.json" in listed, "does not list state.json")
        for name, (size, sha256) in listed.items():
            found = (path / name).stat().st_size
            require(found == size, f"has {found:,} bytes and not {size:,}")
            require(files.sha256_file(path / name) == sha256, "was altered: its hash differs")
    except (OSError, ValueError) as error:
        problem = "is missing" if isinstance(error, FileNotFoundError) else error
        raise ValueError(f"checkpoint {path} is damaged: {name} {problem}") from error


def _check_model(path: Path, model: nn.Module, saved: dict[str, Tensor], strict: bool) -> None:
    """Raise ValueError unless the tensors `saved` can be copied into `model` as they are."""
    own = model.state_dict()
    both = {name: tensor for name, tensor in own.items() if name in saved}
    wrong = [
        f"{name} is {saved[name].dtype} {tuple(saved[name].shape)}, not {t.dtype} {tuple(t.shape)}"
        for name, t in both.items()
        if saved[name].shape != t.shape or (strict and saved[name].dtype != t.dtype)
    ]
    wrong += [
        f"{name} and {kept} are tied in the model and differ"
        for name, kept in _tied(both).items()
        if saved[name] is not saved[kept] and not torch.equal(saved[name], saved[kept])
    ]
    if strict:
        wrong += [f"{name} is missing" for name in own if name not in saved]
        wrong += [f"{name} is not in the model" for name in saved if name not in own]
    require(not wrong, f"checkpoint {path} does not fit the model: {'; '.join(wrong)}")
