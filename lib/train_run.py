"""What a training run needs, opened and checked before any work, and what names its folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lib.checkpoint import find_checkpoint, read_extra
from lib.config_training import TrainConfig
from lib.data import BatchSampler, load_token_array, read_manifest
from lib.files import write_atomically
from lib.hardware import pick_device, pick_dtype, provenance
from lib.strict_json import from_json, to_dict, to_json
from lib.tokenizer import Tokenizer

# Two runs that agree in these learn the same; the rest is where and how they are run.
SETTINGS = (
    "model",
    "optimizer",
    "steps",
    "batch_size",
    "gradient_accumulation_steps",
    "seed",
    "dtype",
    "low_precision_weights",
)
# What a run's folder holds beside metrics and checkpoints.
RUN_FILES = ("config.json", "tokenizer.json", "run.json")
COMPILERS = ("c++", "g++", "clang++")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is sure to be possible: everything was opened and checked."""

    config: TrainConfig
    folder: Path
    device: torch.device
    dtype: torch.dtype
    tokenizer: Tokenizer
    train_tokens: np.ndarray
    validation_tokens: np.ndarray
    sampler: BatchSampler
    data_sha256: dict[str, str]

    @property
    def tokens_per_step(self) -> int:
        return self.sampler.windows_per_step * self.config.model.context_length


def prepare(config: TrainConfig) -> Run:
    """Open and check all that a run needs, without changing anything."""
    device, dtype = check_machine(config)
    if config.data is None:
        raise ValueError("data is None; right is: a folder that `python -m lib tokenize` made")
    tokenizer_path = config.data / "tokenizer.json"
    if not tokenizer_path.exists():
        raise FileNotFoundError(
            f"data is {str(config.data)!r}, which has no tokenizer.json; "
            "`python -m lib tokenize` makes such a folder"
        )
    tokenizer = Tokenizer.load(tokenizer_path)
    paths = {part: config.data / f"{part}.npy" for part in ("train", "validation")}
    tokens = {
        part: load_token_array(path, tokenizer=tokenizer, verify=True)
        for part, path in paths.items()
    }
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"vocab_size is {vocab_size}, but the tokenizer in {config.data} has "
            f"{tokenizer.vocab_size} ids; right is: at least as many, or none given"
        )
    if len(tokens["validation"]) < 2:
        raise ValueError(f"{paths['validation']} has fewer than 2 tokens; right is: more text")
    model = dataclasses.replace(config.model, vocab_size=vocab_size)
    config = dataclasses.replace(config, model=model)
    sampler = BatchSampler(
        len(tokens["train"]),
        model.context_length,
        config.batch_size * config.gradient_accumulation_steps,
        seed=config.seed,
    )
    hashes = {part: read_manifest(path).tokens_sha256 for part, path in paths.items()}
    hashes["tokenizer"] = tokenizer.sha256
    folder = config.output or run_folder(config, hashes)
    check_same_run(folder, config, hashes)
    return Run(
        config,
        folder,
        device,
        dtype,
        tokenizer,
        tokens["train"],
        tokens["validation"],
        sampler,
        hashes,
    )


def check_machine(config: TrainConfig) -> tuple[torch.device, torch.dtype]:
    """The device and dtype that `config` means here; refuse what this machine cannot do.

    Raises:
        ValueError: device, dtype or a way to run that is not to be had.
    """
    device = pick_device(config.device)
    dtype = pick_dtype(device, config.dtype)
    _check_device(config, device, dtype)
    return device, dtype


def run_folder(config: TrainConfig, data_sha256: dict[str, str]) -> Path:
    """The folder of a run without `output`: named by what it learns from and how."""
    content = json.dumps([_settings(config), data_sha256], sort_keys=True)
    key = hashlib.sha256(content.encode()).hexdigest()[:8]
    return config.runs_dir / f"{config.data.resolve().name}-{key}"


def finished_checkpoint(run: Run) -> Path | None:
    """The whole checkpoint of a run that has all its steps and files; nothing is written.

    Raises:
        ValueError: it belongs to a run with other settings.
    """
    path = run.folder / "checkpoints" / f"step-{run.config.steps:08d}"
    names = [other.name.removeprefix("step-") for other in path.parent.glob("step-*")]
    steps = [int(name) for name in names if name.isdigit()]
    has_files = all((run.folder / name).exists() for name in RUN_FILES)
    if not has_files or max(steps, default=None) != run.config.steps:
        return None
    try:
        find_checkpoint(path)
    except ValueError:
        # whoever looks for the one before it names this one
        return None
    extra = read_extra(path)
    before = extra["config"], extra["data_sha256"]
    check_same_settings(run.folder, *before, run.config, run.data_sha256)
    return path


def describe_run(run: Run) -> None:
    """Write what a run's folder needs beside its checkpoints: config, tokenizer, provenance."""
    write_atomically(run.folder / "config.json", to_json(run.config) + "\n")
    run.tokenizer.save(run.folder / "tokenizer.json")
    record = provenance(run.config.seed, device=run.device) | {"data_sha256": run.data_sha256}
    del record["config"]
    write_atomically(run.folder / "run.json", json.dumps(record, indent=2) + "\n")


def _settings(config: TrainConfig) -> dict[str, Any]:
    fields = to_dict(config)
    return {name: fields[name] for name in SETTINGS}


def check_same_run(folder: Path, config: TrainConfig, data_sha256: dict[str, str]) -> None:
    """Refuse a folder that holds another run, or any run where none is to go on."""
    paths = folder / "config.json", folder / "run.json"
    if not config.resume and (paths[0].exists() or any(folder.glob("checkpoints/step-*"))):
        raise ValueError(f"output {folder} holds a run, and resume is False; give another output")
    # a checkpoint knows its settings too, so that nothing is mixed when one of these is missing
    if all(path.exists() for path in paths):
        try:
            data = json.loads(paths[1].read_text())["data_sha256"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{paths[1]} is damaged; remove it to go on without it") from error
        check_same_settings(
            folder, to_dict(from_json(TrainConfig, paths[0])), data, config, data_sha256
        )


def check_same_settings(
    folder: Path,
    config_before: dict[str, Any],
    data_before: dict[str, str],
    config: TrainConfig,
    data_sha256: dict[str, str],
) -> None:
    """Refuse to go on with a run that learns from other data or in another way."""
    before = {name: config_before[name] for name in SETTINGS} | {"data": data_before}
    now = _settings(config) | {"data": data_sha256}
    # a run may be made longer
    del before["steps"], now["steps"]
    differences = _differences(before, now)
    if differences:
        raise ValueError(
            f"output {folder} holds a run with other settings: {'; '.join(differences)}; "
            "give another output, or remove that folder"
        )


def _differences(before: dict[str, Any], now: dict[str, Any], path: str = "") -> list[str]:
    """What changed from `before` to `now`, each as `name: old, now new`."""
    lines = []
    for name in now:
        old, new = before.get(name), now[name]
        if isinstance(old, dict) and isinstance(new, dict):
            lines += _differences(old, new, f"{path}{name}.")
        elif old != new:
            lines.append(f"{path}{name} was {old}, now {new}")
    return lines


def _check_device(config: TrainConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse what `device` cannot do."""
    if config.cuda_graph and device.type != "cuda":
        raise ValueError(f"cuda_graph is True, but device is {device}; right is: False there")
    if config.low_precision_weights and dtype == torch.float32:
        raise ValueError(
            f"low_precision_weights is True, but dtype is float32 on {device}; right is: False, "
            "or dtype bfloat16 or float16"
        )
    if config.low_precision_weights and config.gradient_accumulation_steps > 1:
        raise ValueError(
            "low_precision_weights is True and gradient_accumulation_steps is "
            f"{config.gradient_accumulation_steps}, which would add up gradients in {dtype}; "
            "right is: one of the two"
        )
    kernel = config.model.attention_kernel
    compiled = "compile is True" if config.compile else f"attention_kernel is {kernel!r}"
    needs_compiler = device.type == "cpu" and (config.compile or kernel.endswith("_compiled"))
    if needs_compiler and not any(map(shutil.which, COMPILERS)):
        raise ValueError(
            f"{compiled}, which on a CPU needs a C++ compiler, and there is none of "
            f"{', '.join(COMPILERS)}; right is: without, or one of them installed"
        )
