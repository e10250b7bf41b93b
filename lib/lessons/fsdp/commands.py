"""Trainings from the command line, for notebook 09."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from lib.core.files import ROOT
from lib.core.settings import to_json
from lib.data.prepare import TokenizeConfig, tokenize_corpus
from lib.model.config import ModelConfig
from lib.training.config import OptimizerConfig, TrainConfig


def prepare(folder: Path, steps: int) -> Path:
    """Make a small corpus in `folder`, and the settings of a short training; return their file."""
    corpus = TokenizeConfig(corpus="stories", corpus_bytes=200_000, vocab_size=512, data_dir=folder)
    tokenize_corpus(corpus, progress_bar=lambda *_: contextlib.nullcontext(lambda _: None))
    shape = ModelConfig(context_length=64, d_model=64, num_layers=2, num_heads=4, d_ff=176)
    settings = TrainConfig(
        data=Path(corpus.output_dir.name),
        output=Path("run"),
        batch_size=4,
        steps=steps,
        model=shape,
        optimizer=OptimizerConfig(warmup_steps=2),
        log_interval=1,
        eval_interval=0,
        checkpointing_interval=-1,
        dtype="float32",
    )
    file = folder / "train.json"
    file.write_text(to_json(settings), encoding="utf-8")
    return file


def train(file: Path, ranks: int, words: str) -> list[float]:
    """Run `torchrun … -m lib train` with further flags, as in a terminal; return its losses.

    Raises:
        RuntimeError: the command failed; the text has its output.
    """
    folder = file.parent / words.replace("--", "").replace(" ", "-")
    shown = f"torchrun --nproc_per_node={ranks} -m lib train --config {file.name} {words}"
    print(f"$ {shown}")
    command = [sys.executable, "-m", "torch.distributed.run", *shown.split()[1:]]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    quiet: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(
        [*command, "--output", folder.name], cwd=file.parent, env=environment, **quiet
    )
    if done.returncode:
        raise RuntimeError(done.stdout[:2000])
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]
