"""What a training run needs, opened and checked before any work."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lib.config_training import TrainConfig
from lib.data import BatchSampler, load_token_array, read_manifest
from lib.distributed import check_same, current_device, rank, world_size
from lib.hardware import pick_device, pick_dtype
from lib.strict_json import to_dict
from lib.tokenizer import Tokenizer
from lib.train_folder import check_same_run, identity, run_folder
from lib.train_step import check_wrapper

# Where each rank finds and leaves things, which may differ between hosts.
PLACES = ("data", "output", "runs_dir", "device")
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
    def identity(self) -> dict[str, Any]:
        """What tells it from other runs, as `lib.train_folder.identity` gives it."""
        fields = to_dict(self.config) | {"world_size": self.sampler.world_size}
        return identity(fields, self.data_sha256)

    @property
    def tokens_per_step(self) -> int:
        return self.sampler.windows_per_step * self.config.model.context_length


def prepare(config: TrainConfig) -> Run:
    """Open and check all that a run needs, without changing anything.

    Each rank does so by itself; rank 0 alone looks into the output folder, and one on each host
    hashes the data.
    """
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
    is_first_of_host = os.environ.get("LOCAL_RANK", "0") == "0"
    tokens = {
        part: load_token_array(path, tokenizer=tokenizer, verify=is_first_of_host)
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
    sampler = _sampler(config, len(tokens["train"]))
    hashes = {part: read_manifest(path).tokens_sha256 for part, path in paths.items()}
    hashes["tokenizer"] = tokenizer.sha256
    run = Run(
        config,
        config.output or run_folder(config, hashes, world_size()),
        device,
        dtype,
        tokenizer,
        tokens["train"],
        tokens["validation"],
        sampler,
        hashes,
    )
    if rank() == 0:
        check_same_run(run)
    return run


def _sampler(config: TrainConfig, num_tokens: int) -> BatchSampler:
    """Of this rank, for all passes of a step."""
    passes = config.gradient_accumulation_steps
    size = config.batch_size * passes
    length, place = config.model.context_length, {"rank": rank(), "world_size": world_size()}
    try:
        return BatchSampler(num_tokens, length, size, seed=config.seed, **place)
    except ValueError as error:
        if passes == 1:
            raise
        sizes = f"batch_size {config.batch_size} * gradient_accumulation_steps {passes} = {size}"
        raise ValueError(f"{sizes}; {error}") from error


def check_ranks_agree(run: Run) -> None:
    """Refuse, on all ranks, a run whose settings or data differ between them."""
    settings = {name: value for name, value in to_dict(run.config).items() if name not in PLACES}
    # not what was asked for, which may mean another one on another chip
    settings["dtype"] = run.dtype
    facts = settings | {f"data.{name}": sha256 for name, sha256 in run.data_sha256.items()}
    check_same({name: str(value) for name, value in facts.items()})


def check_machine(config: TrainConfig) -> tuple[torch.device, torch.dtype]:
    """The device and dtype that `config` means on this rank; refuse what cannot be done there.

    Raises:
        ValueError: device, dtype or a way to run that is not to be had.
    """
    check_wrapper(config, world_size())
    device = pick_device(config.device) if world_size() == 1 else _device_of_rank(config.device)
    dtype = pick_dtype(device, config.dtype)
    _check_device(config, device, dtype)
    return device, dtype


def _device_of_rank(name: str) -> torch.device:
    """The device that this rank of several has in their group, as long as `name` fits."""
    device = current_device()
    if name not in ("auto", device.type):
        others = ", or hide the GPUs with CUDA_VISIBLE_DEVICES=''" if name == "cpu" else ""
        raise ValueError(
            f"device is {name!r}, but the ranks' group works on {device.type}; right is: auto, "
            f"which gives each rank a device of its own{others}"
        )
    return device


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
