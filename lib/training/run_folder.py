"""A training run before its first step: opened, checked, and given a folder of its own.

`open_run` makes every check that needs no lock; `hold_folder` takes the run's folder. Below them:
what is checked, how a folder is named, and what makes two runs the same one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lib.core.files import lock_folder, make_folder, sha256_file, write_atomically
from lib.core.hardware import check_compiler, pick_device, pick_dtype
from lib.core.records import provenance
from lib.core.settings import to_dict, to_json
from lib.data.batches import BatchSampler
from lib.data.token_array import load_token_array, read_manifest
from lib.ddp.process_group import (
    agree,
    current_device,
    on_each_rank,
    on_first_rank,
    rank,
    world_size,
)
from lib.model.fastest_attention import pick_attention_kernel
from lib.tokenizer import files as tokenizer_files
from lib.tokenizer.bpe import Tokenizer
from lib.training.checkpoint import (
    find_checkpoint,
    list_checkpoints,
    newest_checkpoint,
    read_extra,
)
from lib.training.config import TrainConfig
from lib.training.metrics import last_evaluation, read_metrics
from lib.training.parallelism import check_wrapper

# Two runs that agree in these fields, and in the product of BATCH_FIELDS, train the same model; all
# other fields only say where and how.
IDENTITY_FIELDS = ("model", "optimizer", "steps", "seed", "dtype", "low_precision_weights")
# Their product is the number of sequences in a step; how it is split changes rounding only.
BATCH_FIELDS = ("batch_size", "gradient_accumulation_steps", "world_size")
# Paths and device may differ between hosts.
PER_HOST_FIELDS = ("data", "output", "runs_dir", "device")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that was checked: everything it needs is there, opened, and fits together."""

    config: TrainConfig
    """With the vocabulary size filled in."""

    folder: Path
    device: torch.device
    dtype: torch.dtype
    tokenizer: Tokenizer

    train_tokens: np.ndarray
    """(num_tokens,), memory-mapped; so are `validation_tokens`."""

    validation_tokens: np.ndarray

    sampler: BatchSampler
    """Draws this rank's sequences, for all passes of a step."""

    data_sha256: dict[str, str]
    """Hashes of both token arrays and of the tokenizer."""

    @property
    def identity(self) -> dict[str, Any]:
        """The settings, batch size and data that distinguish this run from others."""
        fields = to_dict(self.config) | {"world_size": self.sampler.world_size}
        return _identity(fields, self.data_sha256)

    @property
    def tokens_per_step(self) -> int:
        return self.sampler.sequences_per_step * self.config.model.context_length


def open_run(config: TrainConfig, patient: dist.ProcessGroup | None = None) -> Run:
    """Open what a run needs and check that it can run; nothing is written.

    All ranks call it together. Each checks its own machine, one on each host hashes the data, and
    rank 0 alone looks into the output folder.

    Args:
        patient: the group in which ranks wait for one another, for as long as a slow disk takes.
    """
    run = on_each_rank(lambda: _open_on_this_rank(config), patient)
    on_each_rank(lambda: _check_ranks_agree(run))
    return run


def _open_on_this_rank(config: TrainConfig) -> Run:
    device, dtype = check_machine(config)
    if config.data is None:
        raise ValueError(
            "data must be a folder made by `python -m lib tokenize`, as in --data FOLDER, or of a "
            "preset, as in --config tiny, got None"
        )
    if not tokenizer_files.find(config.data).exists():
        raise FileNotFoundError(
            f"data must be a folder made by `python -m lib tokenize`, got {str(config.data)!r}, "
            "which has no bpe.json"
        )
    tokenizer = Tokenizer.load(config.data)
    paths = {part: config.data / f"{part}.npy" for part in ("train", "validation")}
    is_first_of_host = os.environ.get("LOCAL_RANK", "0") == "0"
    tokens = {
        part: load_token_array(path, tokenizer=tokenizer, verify=is_first_of_host)
        for part, path in paths.items()
    }
    if len(tokens["validation"]) < 2:
        raise ValueError(
            f"{paths['validation']} must have at least 2 tokens, got {len(tokens['validation'])}"
        )
    hashes = {part: read_manifest(path).tokens_sha256 for part, path in paths.items()}
    hashes["tokenizer"] = tokenizer.sha256
    config = _with_vocab_size(config, tokenizer)
    kernel = pick_attention_kernel(config.model, device, dtype)
    model = dataclasses.replace(config.model, attention_kernel=kernel)
    config = dataclasses.replace(config, model=model)
    run = Run(
        config=config,
        folder=config.output or run_folder(config, hashes, world_size(), device),
        device=device,
        dtype=dtype,
        tokenizer=tokenizer,
        train_tokens=tokens["train"],
        validation_tokens=tokens["validation"],
        sampler=_sampler(config, len(tokens["train"])),
        data_sha256=hashes,
    )
    if rank() == 0:
        _check_folder(run)
    return run


@contextlib.contextmanager
def hold_folder(run: Run, patient: dist.ProcessGroup | None) -> Iterator[Path | None]:
    """Keep other processes out of the run's folder, and yield its newest whole checkpoint.

    All ranks call it together. Rank 0 makes the folder and locks it, and waits while another
    process holds the lock; the other ranks check that they see the same folder.
    """
    with contextlib.ExitStack() as lock:
        newest, sha256 = on_first_rank(lambda: _take_folder(run, lock), patient)
        on_each_rank(lambda: _check_shared(run.folder, newest, sha256), patient)
        yield newest


def _take_folder(run: Run, lock: contextlib.ExitStack) -> tuple[Path | None, str | None]:
    """Make and lock the run's folder; return its newest checkpoint and the manifest's hash."""
    checkpoints = run.folder / "checkpoints"
    for folder in (run.folder, checkpoints):
        make_folder(folder)
    lock.enter_context(lock_folder(run.folder))
    # again, since another process may have started a run here before this one had the lock
    _check_folder(run)
    newest = newest_checkpoint(checkpoints)
    if newest is None:
        return None, None
    _check_continues(run, read_extra(newest))
    return newest, sha256_file(newest / "manifest.json")


def _check_shared(folder: Path, newest: Path | None, sha256: str | None) -> None:
    """Refuse, on a rank that does not see them, the folder and checkpoint that rank 0 found."""
    path = folder if newest is None else newest / "manifest.json"
    if not path.exists() or (newest is not None and sha256_file(path) != sha256):
        raise FileNotFoundError(
            f"output must be on a disk that all hosts share, but {path.absolute()} is not what "
            "rank 0 sees"
        )


def finished_checkpoint(run: Run) -> Path | None:
    """The last checkpoint of a run that is complete: its files and its last evaluation, too.

    None while anything is missing. Writes nothing, and refuses a run with other settings.
    """
    saved = list_checkpoints(run.folder / "checkpoints")
    files = [run.folder / "config.json", run.folder / "run.json", tokenizer_files.find(run.folder)]
    is_complete = all(path.exists() for path in files) and is_evaluated(run, run.config.steps)
    if not is_complete or not saved or saved[0].name != f"step-{run.config.steps:08d}":
        return None
    try:
        extra = read_extra(find_checkpoint(saved[0]))
    except (ValueError, FileNotFoundError):
        # damaged or gone: `newest_checkpoint` will name it and take the one before
        return None
    check_same_run(run, saved_identity(extra))
    return saved[0]


def is_evaluated(run: Run, step: int) -> bool:
    """Whether the metrics have the evaluation that is due after `step`, if any is.

    A run that was saved at `step` and then failed lacks it. Metrics that are missing are the
    concern of the code that writes to them.
    """
    path = run.folder / "metrics.jsonl"
    is_last = step == run.config.steps
    if step == 0 or not (is_last or is_due(step, run.config.eval_interval)) or not path.exists():
        return True
    last = last_evaluation(read_metrics(path))
    return last is not None and last["step"] >= step


def is_due(step: int, interval: int) -> bool:
    """Whether something that is done every `interval` steps, if that is positive, is due."""
    return interval > 0 and step % interval == 0


def describe_run(run: Run) -> None:
    """Write what a run's folder needs beside its checkpoints: config, tokenizer, provenance."""
    record = provenance(run.config.seed, device=run.device) | {"data_sha256": run.data_sha256}
    del record["config"]
    # so that run.json alone tells how a step was split
    record |= {name: run.identity[name] for name in BATCH_FIELDS}
    write_atomically(run.folder / "run.json", json.dumps(record, indent=2) + "\n")
    write_atomically(run.folder / "config.json", to_json(run.config) + "\n")
    run.tokenizer.save(tokenizer_files.find(run.folder))


# Checks before a run


def check_machine(config: TrainConfig) -> tuple[torch.device, torch.dtype]:
    """The device and dtype that `config` selects on this rank, checked against all it asks for."""
    check_wrapper(config, world_size())
    device = pick_device(config.device) if world_size() == 1 else _device_of_rank(config.device)
    dtype = pick_dtype(device, config.dtype)
    if config.cuda_graph and device.type != "cuda":
        raise ValueError(f"cuda_graph must be False on device {device}, got True")
    if config.low_precision_weights and dtype == torch.float32:
        raise ValueError(
            "dtype must be bfloat16 or float16 with low_precision_weights, got float32 on device "
            f"{device}"
        )
    if config.low_precision_weights and config.gradient_accumulation_steps > 1:
        raise ValueError(
            "gradient_accumulation_steps must be 1 with low_precision_weights, which would add up "
            f"gradients in {dtype}, got {config.gradient_accumulation_steps}"
        )
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "tensorboard must be False without its package (pip install tensorboard), got True"
        )
    kernel = config.model.attention_kernel
    if config.compile or kernel.endswith("_compiled"):
        asked = "compile True" if config.compile else f"attention_kernel {kernel!r}"
        check_compiler(asked, device)
    return device, dtype


def _device_of_rank(name: str) -> torch.device:
    """This rank's device in a group of several, provided that `name` allows it."""
    device = current_device()
    if name not in ("auto", device.type):
        others = " (CUDA_VISIBLE_DEVICES='' hides the GPUs)" if name == "cpu" else ""
        raise ValueError(
            f"device must be auto on several ranks, whose group runs on {device.type}, got "
            f"{name!r}{others}"
        )
    return device


def _with_vocab_size(config: TrainConfig, tokenizer: Tokenizer) -> TrainConfig:
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"vocab_size must be at least {tokenizer.vocab_size}, the size of the tokenizer in "
            f"{config.data}, got {vocab_size}"
        )
    model = dataclasses.replace(config.model, vocab_size=vocab_size)
    return dataclasses.replace(config, model=model)


def _sampler(config: TrainConfig, num_tokens: int) -> BatchSampler:
    passes = config.gradient_accumulation_steps
    size = config.batch_size * passes
    ranks = {"rank": rank(), "world_size": world_size()}
    try:
        return BatchSampler(
            num_tokens, config.model.context_length, size, seed=config.seed, **ranks
        )
    except ValueError as error:
        if passes == 1:
            raise
        sizes = f"batch_size {config.batch_size} * gradient_accumulation_steps {passes} = {size}"
        raise ValueError(f"{sizes}; {error}") from error


def _check_ranks_agree(run: Run) -> None:
    fields = to_dict(run.config)
    facts = {name: value for name, value in fields.items() if name not in PER_HOST_FIELDS}
    # the dtype that was picked, since "auto" may pick another one on another chip
    facts["dtype"] = run.dtype
    facts |= {f"data.{name}": sha256 for name, sha256 in run.data_sha256.items()}
    agree(lambda: {name: str(value) for name, value in facts.items()})


# Which run a folder belongs to


def run_folder(
    config: TrainConfig, data_sha256: dict[str, str], num_ranks: int, device: torch.device
) -> Path:
    """The folder of a run without `output`, named after its data and a hash of its identity."""
    fields = _identity(to_dict(config) | {"world_size": num_ranks}, data_sha256)
    settings = {name: fields[name] for name in IDENTITY_FIELDS}
    # one name for all attention kernels, which give the same up to rounding
    settings["model"] = fields["model"] | {"attention_kernel": "sdpa"}
    # one name for the dtype of this device, whether it was chosen or picked
    if pick_dtype(device, config.dtype) == pick_dtype(device):
        settings["dtype"] = "auto"
    # one name for all ways to split the same step
    settings |= {"batch_size": _sequences_per_step(fields), "gradient_accumulation_steps": 1}
    content = json.dumps([settings, data_sha256], sort_keys=True)
    key = hashlib.sha256(content.encode()).hexdigest()[:8]
    return config.runs_dir / f"{config.data.resolve().name}-{key}"


def _identity(fields: dict[str, Any], data_sha256: dict[str, str]) -> dict[str, Any]:
    return {name: fields[name] for name in (*IDENTITY_FIELDS, *BATCH_FIELDS)} | {
        "data": data_sha256
    }


def saved_identity(extra: dict[str, Any]) -> dict[str, Any]:
    """The identity of the run that saved a checkpoint with this `extra`."""
    # old checkpoints of one process lack the world size
    fields = extra["config"] | {"world_size": extra.get("world_size", 1)}
    return _identity(fields, extra["data_sha256"])


def _sequences_per_step(fields: dict[str, Any]) -> int:
    return math.prod(fields[name] for name in BATCH_FIELDS)


def _split(fields: dict[str, Any]) -> str:
    """How a step's sequences are split, such as `batch_size 4 × … × world_size 2`."""
    return " × ".join(f"{name} {fields[name]}" for name in BATCH_FIELDS)


def _check_folder(run: Run) -> None:
    """Refuse a folder of something else, or one that holds a run if `resume` is false."""
    folder = run.folder
    config_path, record_path = folder / "config.json", folder / "run.json"
    if not run.config.resume and (config_path.exists() or any(folder.glob("checkpoints/step-*"))):
        raise ValueError(f"output must hold no run when resume is False, got {folder}")
    if not record_path.exists() and not any(folder.glob("checkpoints/step-*")):
        # a run that was not saved yet has run.json before it has any of these
        for path in (config_path, folder / "metrics.jsonl", folder / "train.npy"):
            if path.exists() and path.stat().st_size:
                raise ValueError(
                    f"output must be new or the folder of a run, got {folder}, which has "
                    f"{path.name} but neither run.json nor checkpoints"
                )


def _check_continues(run: Run, extra: dict[str, Any]) -> None:
    """Refuse to resume from a checkpoint with this `extra` unless the run goes on from it."""
    if "imported_from" in extra:
        raise ValueError(
            f"output must be the folder of a training run or a new one, got {run.folder}, which "
            "holds an imported model"
        )
    check_same_run(run, saved_identity(extra))
    steps = extra["progress"]["steps"]
    if steps > run.config.steps:
        raise ValueError(
            f"steps must be at least {steps}, which the run in {run.folder} has done, got "
            f"{run.config.steps}"
        )


def check_same_run(run: Run, before: dict[str, Any]) -> None:
    """Refuse to resume a run that was trained on other data or with other settings.

    More steps are allowed, and what changes losses and gradients by rounding only: another split of
    the same number of sequences per step among ranks and passes, and another attention kernel. The
    dtype `auto` is the one that it picks on this device.

    Args:
        before: the saved run's identity.
    """
    now, hint = run.identity, ""
    names = [name for name in now if name not in ("steps", *BATCH_FIELDS)]
    old, new = ({name: identity[name] for name in names} for identity in (before, now))
    # another kernel only computes attention in another order, which changes rounding
    kernel = old["model"].get("attention_kernel")
    new["model"] = new["model"] | {"attention_kernel": kernel}
    for identity in (old, new):
        identity["dtype"] = _dtype_in_effect(identity["dtype"], run.device)
    differences = _differences(old, new)
    old_size, new_size = _sequences_per_step(before), _sequences_per_step(now)
    if old_size != new_size:
        differences.append(
            f"a step was {old_size} sequences = {_split(before)}, now {new_size} = {_split(now)}"
        )
        size, rest = divmod(old_size, new_size // now["batch_size"])
        hint = "" if rest else f"batch_size {size} would fit, else "
    if differences:
        raise ValueError(
            f"output {run.folder} holds a run with other settings: {'; '.join(differences)}; "
            f"{hint}give another output"
        )


def _dtype_in_effect(name: str, device: torch.device) -> str:
    """The name of the dtype that trains on `device`: for `auto` the one that it picks."""
    return str(pick_dtype(device)).removeprefix("torch.") if name == "auto" else name


def _differences(before: dict[str, Any], now: dict[str, Any], path: str = "") -> list[str]:
    """The changes from `before` to `now`, each as `name was OLD, now NEW`."""
    lines = []
    for name in now:
        old, new = before.get(name), now[name]
        if isinstance(old, dict) and isinstance(new, dict):
            lines += _differences(old, new, f"{path}{name}.")
        elif old != new:
            lines.append(f"{path}{name} was {old}, now {new}")
    return lines
