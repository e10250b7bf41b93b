"""Checkpoints: folders that are whole or absent, verified when read, never unpickled.

A folder `step-00000100` holds `model.safetensors`, `optimizer.safetensors`, `tensors.safetensors`,
`state.json` with everything that is not a tensor, and `manifest.json` with size and hash of each
file. With a sharded optimizer, each rank's `shard-<rank>-of-<ranks>.pt` has the optimizer's state.

How a checkpoint becomes durable, even if the process is killed (`_write`, then `_publish`):

1. all files go into a hidden folder `.step-00000100.partial`, each flushed to the disk;
2. the manifest is written last, so that a folder with a valid manifest is whole;
3. one rename gives the folder its name, and the parent folder is flushed;
4. older checkpoints are hidden by a rename before they are deleted.

The next save removes what a killed one left (`_clean`).
"""

import json
import logging
import operator
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from lib.core import files
from lib.core.settings import from_json, require, to_json
from lib.ddp.process_group import on_each_rank
from lib.ddp.wrappers import inner_module
from lib.sharded_optimizer.saved_state import SHARDS, load_unsharded, shard_paths

# The second form is a checkpoint that was moved aside while another of its step replaces it.
NAME = re.compile(r"step-\d{8,}|\.step-\d{8,}\.replaced")
PARTS = ("model", "optimizer", "tensors")
# How often a folder is listed again because a checkpoint was deleted before it was read.
MAX_LISTINGS = 5
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """The contents of `path` besides model and optimizer; tensors on the CPU."""

    step: int
    extra: dict[str, Any]
    tensors: dict[str, Tensor]
    path: Path


@dataclass(frozen=True)
class _Manifest:
    format: Literal[1]
    # size in bytes and SHA-256
    files: dict[str, tuple[int, str]]


# Saving


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
    """Write the checkpoint `step-<step>` into `folder` (made if missing); return its path.

    At any moment, even if the process is killed, each folder named `step-*` is whole. One of the
    same step is replaced. Other processes that save into `folder` wait for this one.

    Args:
        model: a module, compiled or not, or its state dict if no `optimizer` is given, whose
            parameters it names.
        shards: instead of `optimizer`, a folder that `ShardedOptimizer.save_shard` filled, on the
            same disk as `folder`; its files are moved into the checkpoint.
        extra: JSON values, with text as keys; tuples come back as lists.
        tensors: any further state, such as `rng_state(device)`.
        keep_last: keep this many checkpoints, this one included, and delete older ones.

    Raises:
        OSError: a file cannot be written; if the disk is full, names what is needed and free.
            Earlier checkpoints stay, and nothing of this one does.
    """
    # True is a whole number to Python
    is_number = hasattr(step, "__index__") and not isinstance(step, bool) and step >= 0
    require(is_number, f"step must be at least 0, a whole number, got {step!r}")
    step, model = operator.index(step), inner_module(model)
    is_count = keep_last is None or (type(keep_last) is int and keep_last > 0)
    require(is_count, f"keep_last must be at least 1, got {keep_last!r}")
    folder = Path(folder)
    target = folder / f"step-{step:08d}"

    # collect everything before the disk is touched
    weights = model.state_dict() if isinstance(model, nn.Module) else model
    parts = {"model": weights, "tensors": tensors or {}, "optimizer": {}}
    packed = None if optimizer is None else _pack_optimizer(optimizer, model, parts["optimizer"])
    try:
        _check_keys(extra or {})
        state = json.dumps({"step": step, "extra": extra or {}, "optimizer": packed}, indent=1)
    except (TypeError, ValueError, RecursionError) as error:
        message = f"extra and the optimizer's settings must be JSON values: {error}"
        raise ValueError(message) from error
    for part, content in parts.items():
        for name, value in content.items():
            problem = _why_not_saved(name, value)
            require(not problem, f"{part}: {name} must be {problem}")
    shard_files = [] if shards is None else shard_paths(shards)
    message = f"shards must be a folder that save_shard filled, got {shards}, which has no shards"
    require(shards is None or shard_files, message)

    with files.lock_folder(folder):
        # we hold the lock, so any process that left partial files is gone
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


def _check_keys(value: Any) -> None:
    """Raise ValueError if an object in `value` has a key that JSON would turn into text."""
    keys = value if isinstance(value, dict) else ()
    wrong = [key for key in keys if not isinstance(key, str)]
    require(not wrong, f"keys must be text, got {wrong[:3]}")
    if isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            _check_keys(item)


def _why_not_saved(name: str, value: Any) -> str:
    """Name what safetensors needs in place of `value`; "" if it can save it."""
    if not isinstance(name, str):
        return f"named by text, got a {type(name).__name__}"
    if not isinstance(value, Tensor):
        return f"a tensor, got {type(value).__name__}"
    if value.layout != torch.strided:
        return f"dense, got {value.layout}; save value.to_dense()"
    if value.is_meta:
        return "a tensor with memory, but is on device meta"
    return "under another name, which safetensors reserves" if name == "__metadata__" else ""


def _write(
    folder: Path, parts: dict[str, dict[str, Tensor]], state: str, shards: Sequence[Path]
) -> None:
    """Write all files of a checkpoint into the new `folder`; all are on the disk afterwards.

    That holds for `shards`, which are only moved, since `write_shard` waited for the disk.
    """
    folder.mkdir()
    for shard in shards:
        os.replace(shard, folder / shard.name)
    for name, tensors in parts.items():
        _save_tensors(tensors, folder / f"{name}.safetensors")
    files.write_atomically(folder / "state.json", state)
    for file in folder.iterdir():
        # safetensors makes its files readable to their owner only, whatever the umask
        file.chmod((folder / "state.json").stat().st_mode)
    # hashes are read back from the page cache: hashing while writing would copy tensors once more
    entries = {p.name: (p.stat().st_size, files.sha256_file(p)) for p in folder.iterdir()}
    files.write_atomically(folder / "manifest.json", to_json(_Manifest(1, entries)))


def _publish(target: Path, keep_last: int | None) -> None:
    """Give the finished `.partial` folder its name, and hide the checkpoints to be deleted."""
    if target.exists():
        os.replace(target, target.with_name(f".{target.name}.replaced"))
    os.replace(target.with_name(f".{target.name}.partial"), target)
    files.sync_folder(target.parent)
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
    optimizer's state loads into an unsharded one, and the other way around; all ranks of a sharded
    one call this together, and an error of one is raised on all. A checkpoint that is damaged or
    does not fit is a ValueError.

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
    """`load_checkpoint` of this rank, whatever happens on others."""
    if verify:
        return read_checkpoint(path, lambda found: _load_here(found, model, optimizer, False))
    path = Path(path)
    model = None if model is None else inner_module(model)
    state = _read_state(path)
    # clones, since tensors from safetensors stay mapped to the file
    tensors = {k: v.clone() for k, v in _load_tensors(path / "tensors.safetensors").items()}
    if model is not None:
        weights = _load_tensors(path / "model.safetensors")
        _check_model(path, model, weights)
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
        return {name: state[name] for name in ("step", "extra", "optimizer")}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path / 'state.json'}: not the state of a checkpoint") from error


def find_checkpoint(path: str | os.PathLike) -> Path:
    """The checkpoint `path`, or the newest whole one in the folder `path`; verified."""
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


def newest_checkpoint(folder: str | os.PathLike) -> Path | None:
    """The whole checkpoint of the highest step in `folder`; None if there are no checkpoints.

    A warning names each damaged one with a higher step; if all are damaged, a ValueError does. One
    that a training deletes meanwhile is not damaged: the folder is listed again.
    """
    for _ in range(MAX_LISTINGS):
        checkpoints = list_checkpoints(Path(folder))
        for path in checkpoints:
            try:
                _verify(path)
                return path
            except ValueError as error:
                if not path.exists():
                    # newer ones came, and those listed after it may be gone, too
                    break
                log.warning("refused: %s", error)
        else:
            names = ", ".join(path.name for path in checkpoints)
            require(not names, f"no checkpoint in {folder} is whole: {names}")
            return None
    raise FileNotFoundError(
        f"each checkpoint in {folder} was deleted before it was read, {MAX_LISTINGS} times"
    )


def read_checkpoint(path: str | os.PathLike, read: Callable[[Path], T]) -> T:
    """The result of `read` for the checkpoint `path`, or the newest whole one in the folder `path`.

    If a training deletes that one while it is read, `read` gets the one that is the newest then.
    """
    for _ in range(MAX_LISTINGS):
        found = find_checkpoint(path)
        try:
            return read(found)
        except (OSError, ValueError, SafetensorError):
            if found == Path(path) or found.exists():
                raise
    raise FileNotFoundError(
        f"each checkpoint in {path} was deleted while it was read, {MAX_LISTINGS} times"
    )


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
        listed = from_json(_Manifest, path / name).files
        expected = {"state.json", *(f"{part}.safetensors" for part in PARTS)}
        expected.update(shard.name for shard in path.glob(SHARDS))
        missing = ", ".join(sorted(expected - listed.keys()))
        require(not missing, f"does not list {missing}")
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
        for name, kept in _tied(both).items()
        if saved[name] is not saved[kept] and not torch.equal(saved[name], saved[kept])
    ]
    wrong += [f"{name} is on device meta, without memory" for name in both if own[name].is_meta]
    wrong += [f"{name} is missing" for name in own if name not in saved]
    wrong += [f"{name} is not in the model" for name in saved if name not in own]
    require(not wrong, f"checkpoint {path} does not fit the model: {'; '.join(wrong)}")


# The optimizer's state


def load_optimizer(path: Path, optimizer: Optimizer, model: nn.Module | None) -> None:
    """Load the optimizer's state alone from the checkpoint `path`, which was verified before.

    Saved state and `optimizer` may each be sharded or not. For a sharded optimizer this loads the
    part of this rank, without a collective. `model` names the parameters; without it, their names
    are not compared.
    """
    packed = _read_state(path)["optimizer"]
    if packed is None and shard_paths(path):
        if _is_sharded(optimizer):
            optimizer.load_own_part(path)  # type: ignore[attr-defined]  # as `_is_sharded` saw
        else:
            load_unsharded(path, optimizer)
        return
    require(packed is not None, f"checkpoint {path} holds no optimizer state")
    for saved, own in zip_longest(packed["parameters"], _parameters(optimizer, model)):
        # names are known only if the model is given
        is_same = saved == own or (model is None and saved and own and saved[1:] == own[1:])
        message = f"checkpoint {path} does not fit the optimizer: {saved} instead of {own}"
        require(is_same, message)
    tensors = _load_tensors(path / "optimizer.safetensors")
    if _is_sharded(optimizer):
        # it copies this rank's part
        optimizer.load_state_dict(_unpack(packed["state"], tensors))
        return

    # Tensors from an accelerator move to the parameters' device; others, such as the step counts
    # of torch's AdamW, stay on the CPU unless the optimizer moves them.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = {
        name: tensor.to("cpu" if name in packed["on_cpu"] else parameters[0].device, copy=True)
        for name, tensor in tensors.items()
    }
    state = _unpack(packed["state"], tensors)
    optimizer.load_state_dict(state)
    # it rounded the float32 state of bfloat16 parameters to bfloat16
    for index, saved in state["state"].items():
        loaded = optimizer.state[parameters[index]]
        for name, value in saved.items():
            if isinstance(value, Tensor) and loaded[name].dtype != value.dtype:
                loaded[name] = value.to(loaded[name].device)


def _pack_optimizer(optimizer: Optimizer, model: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """An unsharded optimizer's state as JSON values; its tensors go into `tensors`, by name."""
    message = "optimizer must not be sharded; pass shards, a folder that its save_shard filled"
    require(not _is_sharded(optimizer), message)
    state = _pack(optimizer.state_dict(), "optimizer", tensors)
    on_cpu = [name for name, tensor in tensors.items() if tensor.is_cpu]
    return {"parameters": _parameters(optimizer, model), "state": state, "on_cpu": on_cpu}


def _is_sharded(optimizer: Optimizer) -> bool:
    """Whether each rank saves its own part of the state, with `save_shard`."""
    return hasattr(optimizer, "load_own_part")


def _parameters(optimizer: Optimizer, model: nn.Module | None) -> list[list]:
    """[name in `model` or "", optimizer class, shape] of each parameter."""
    names = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # the class that updates shards, so that sharding makes no difference
    kind = type(getattr(optimizer, "inner", optimizer)).__name__
    return [[names.get(id(p), ""), kind, list(p.shape)] for p in parameters]


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON values that `_unpack` restores; its tensors go into `tensors`, by path."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, dict):
        return {"dict": [[k, _pack(v, f"{path}.{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [_pack(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    return value


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in content}
    return {"list": list, "tuple": tuple}[kind](_unpack(item, tensors) for item in content)


# Tensors and random numbers


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write `tensors` to the disk; tied ones are stored once, with the other names as metadata."""
    tied = _tied(tensors)
    # clones, since safetensors refuses different views of one memory
    clones = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
        if name not in tied
    }
    try:
        save_file(clones, path, metadata=tied or None)
    except KeyError as error:
        raise ValueError(f"{path.stem}: safetensors has no dtype {error}") from error
    except SafetensorError as error:
        # the system's error number is in its text only, in older versions as a `code`
        number = re.search(r"(?:os error|code:) (\d+)", str(error))
        code = int(number[1]) if number else None
        raise OSError(code, os.strerror(code) if code else str(error), str(path)) from error
    # opened again, since `save_file` takes a path and closes its file unsynced
    with open(path, "rb+") as file:
        files.sync(file)


def _load_tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors | {name: tensors[kept] for name, kept in (file.metadata() or {}).items()}


def _tied(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Each name whose tensor came before under another name -> that other name."""
    first, tied = {}, {}
    for name, tensor in tensors.items():
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        # x and x.conj() share memory, and differ in how it is read
        kept = first.setdefault((*memory, tensor.is_conj(), tensor.is_neg()), name)
        if kept != name:
            tied[name] = kept
    return tied


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
