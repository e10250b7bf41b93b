"""The training loop: one function for the command line, the notebooks and the benchmarks."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from lib.checkpoint import (
    Checkpoint,
    load_checkpoint,
    load_optimizer,
    newest_checkpoint,
    read_extra,
    rng_state,
    save_checkpoint,
    set_rng_state,
)
from lib.config_training import TrainConfig
from lib.data import read_windows
from lib.distributed import check_same
from lib.evaluate import Evaluation, bytes_of_token, evaluate
from lib.files import sha256_file
from lib.hardware import keep_freed_memory, peak_flops
from lib.metrics import MetricsLog
from lib.model import TransformerLM
from lib.model_costs import flops_per_token
from lib.optimizer import cosine_lr
from lib.ranks import of_all_ranks, on_each_rank, on_first_rank, patient_group
from lib.strict_json import to_dict
from lib.train_folder import (
    check_same_settings,
    check_seen,
    describe_run,
    finished_checkpoint,
    saved_identity,
    take_folder,
)
from lib.train_run import Run, check_ranks_agree, prepare
from lib.train_step import TrainStep, numerics
from lib.train_stop import is_asked_to_stop, stop_signals

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What became of a training run."""

    status: Literal["finished", "stopped", "up to date"]
    """`stopped`: by a signal or its time, and saved. `up to date`: it had been finished before."""

    step: int
    """Steps done in all."""

    evaluation: Evaluation | None
    """The last one on the validation text; None where none was made in this call."""

    output: Path
    """The run's folder."""

    checkpoint: Path
    """The last checkpoint."""


def train(
    config: TrainConfig, *, on_metrics: Callable[[dict[str, Any]], None] | None = None
) -> TrainResult:
    """Train a model as `config` says, or go on with the run that its output folder holds.

    The folder gets `config.json`, `tokenizer.json`, `metrics.jsonl` and `checkpoints/`. A run that
    was interrupted in any way goes on from its last checkpoint when started again; in deterministic
    mode it ends as if nothing had happened. SIGINT, SIGTERM and `max_seconds` end it after the
    current step, with a checkpoint.

    **On several GPUs** each is trained on by a process of its own, a rank, that runs this function
    on its part of the batch: `torchrun --nproc_per_node=2 -m lib train …` on one host (and
    `--nnodes`, `--node_rank`, `--master_addr` on each of many), or in a notebook
    `lib.distributed.launch(train, 2, config)`. A step takes batch_size ×
    gradient_accumulation_steps × ranks windows; a run may go on with other numbers as long as their
    product stays, and then sees the same windows, with the same losses up to rounding. Rank 0
    writes, shows progress and calls `on_metrics`; hosts share the disk with the output folder. With
    `sharded_optimizer` or `ddp_wrapper` fsdp2 each rank writes its part of the optimizer's state
    into the checkpoint; a run goes on from it with any other way to shard, or none. Signals and
    `max_seconds` end such a run after the next step that is a multiple of `log_interval`. If a rank
    is lost the job ends; `torchrun --max-restarts=2` starts it again from its last checkpoint.

    Args:
        on_metrics: called with each line of metrics, for a live figure.

    Raises:
        ValueError, OSError: config, data and output folder do not fit; found out before any work,
            and raised on all ranks.
        FloatingPointError: `max_nonfinite_steps` in a row had a loss or gradient not finite.
    """
    end = time.monotonic() + (config.max_seconds or math.inf)
    # where one rank may take longer than others wait in a step: for a disk, or for a folder's lock
    waiting = patient_group()
    run = on_each_rank(lambda: prepare(config), waiting)
    on_each_rank(lambda: check_ranks_agree(run))
    finished = on_first_rank(lambda: finished_checkpoint(run))
    if finished is not None:
        # before anything is written, so that the disk may be read-only
        log.info("%s is up to date: %s steps", run.folder, config.steps)
        return TrainResult("up to date", config.steps, None, run.folder, finished)
    if run.device.type == "cpu":
        keep_freed_memory()
    with (
        contextlib.ExitStack() as holding,
        numerics(tf32=config.tf32, deterministic=config.deterministic),
    ):
        on_first_rank(lambda: take_folder(run, holding), waiting)
        on_each_rank(lambda: check_seen(run.folder))
        with stop_signals() as stop:
            return _Training(run, on_metrics, waiting).go_on(stop, end)


@dataclasses.dataclass
class Progress:
    """How far a run is; what a checkpoint holds beside tensors."""

    steps: int = 0
    """Optimizer steps done."""

    seconds: float = 0.0
    """Time spent in them, without evaluations and checkpoints."""

    skipped: int = 0
    """Steps whose loss or gradient was not finite, so that nothing was updated."""

    skipped_in_a_row: int = 0
    """How many of the last steps were skipped."""

    logged_seconds: float = 0.0
    """`seconds` when the last line of metrics was written."""

    unlogged: list[list[float]] = dataclasses.field(default_factory=list)
    """Loss, gradient norm and whether it was skipped, of each step since then."""

    metrics_position: int | None = None
    """Length of the metrics file at the time of the checkpoint."""


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of `step`, counted from 1: the last one's is `min_learning_rate`."""
    settings = config.optimizer
    return cosine_lr(
        step,
        max_lr=settings.learning_rate,
        min_lr=settings.min_learning_rate,
        warmup_steps=settings.warmup_steps,
        cosine_steps=config.steps,
    )


class _Training:
    """A run while it goes on."""

    def __init__(
        self,
        run: Run,
        on_metrics: Callable[[dict[str, Any]], None] | None,
        waiting: dist.ProcessGroup | None,
    ) -> None:
        self.run, self.config, self.on_metrics, self.waiting = run, run.config, on_metrics, waiting
        # drawn on the CPU, so that every device starts from the same weights
        generator = torch.Generator().manual_seed(self.config.seed)
        self.model = TransformerLM(self.config.model, generator=generator).to(run.device)
        if self.config.low_precision_weights:
            self.model.use_low_precision_weights(run.dtype)
        self.bytes_of_token = bytes_of_token(run.tokenizer)
        self.progress = Progress()
        self.evaluation: Evaluation | None = None
        self.metrics: MetricsLog | None = None
        self.checkpoints = run.folder / "checkpoints"
        self.shards = run.folder / ".shards"
        self.newest = on_first_rank(lambda: newest_checkpoint(self.checkpoints), waiting)
        if self.newest is not None:
            manifest = self.newest / "manifest.json"
            on_each_rank(lambda: check_seen(manifest))
            on_each_rank(lambda: check_same({str(manifest): sha256_file(manifest)}))
            # before anything is sharded, so that files need hold whole weights only
            loaded = on_each_rank(self._load_weights, waiting)
        self.step = TrainStep(self.model, self.config, run.device, run.dtype)
        if self.newest is not None:
            on_each_rank(lambda: self._restore(loaded), waiting)

    def go_on(self, stop: threading.Event, end: float) -> TrainResult:
        """Take the steps that are left, unless `stop` is set or the clock at `end` meanwhile."""
        if self.progress.steps == self.config.steps:
            on_first_rank(lambda: describe_run(self.run))
            log.info("%s is up to date: %s steps", self.run.folder, self.progress.steps)
            return self._result("up to date")
        with contextlib.ExitStack() as files:
            on_first_rank(lambda: self._open_files(files))
            self.clock = time.perf_counter()
            while self.progress.steps < self.config.steps:
                self._take_step()
                if time.monotonic() >= end:
                    stop.set()
                if self._follow_up(stop):
                    break
        return self._result("finished" if self.progress.steps >= self.config.steps else "stopped")

    def _open_files(self, files: contextlib.ExitStack) -> None:
        """Describe the run in its folder, and open the log of metrics until `files` is left."""
        config, folder = self.config, self.run.folder
        # what a killed save left
        shutil.rmtree(self.shards, ignore_errors=True)
        metrics = MetricsLog(
            folder / "metrics.jsonl",
            total_steps=config.steps,
            start_step=self.progress.steps,
            resume_at=self.progress.metrics_position,
            wandb=config.wandb,
            run_name=folder.name,
            config=to_dict(config),
        )
        self.metrics = files.enter_context(metrics)
        describe_run(self.run)

    def _follow_up(self, stop: threading.Event) -> bool:
        """Log, evaluate and save where it is due after a step; whether the run ends here."""
        config, done = self.config, self.progress.steps
        is_last = done == config.steps
        # shown together, so that the last line of progress holds the last evaluation
        shown: dict[str, float] = {}
        if is_last or done % config.log_interval == 0:
            shown |= self._log()
        if is_last or (config.eval_interval and done % config.eval_interval == 0):
            shown |= self._evaluate()
        # asked once, so that a signal between two questions cannot end the run unsaved
        is_stopping = is_asked_to_stop(stop, done, config.log_interval)
        if self.metrics and (shown or is_stopping):
            self.metrics.advance(done, **shown)
        is_due = config.checkpointing_interval > 0 and done % config.checkpointing_interval == 0
        if is_last or is_due or is_stopping:
            self._save()
        return is_stopping

    def _take_step(self) -> None:
        run, config = self.run, self.config
        starts = run.sampler.next_starts()
        length = config.model.context_length
        windows = read_windows(run.train_tokens, starts, length, run.device)
        self.progress.steps += 1
        self.step(windows, learning_rate(config, self.progress.steps))

    def _read_log(self) -> None:
        """Take what the steps since the last call reported; end the run if it diverged."""
        progress, limit = self.progress, self.config.max_nonfinite_steps
        rows = self.step.read_log()
        for step, row in enumerate(rows, start=progress.steps - len(rows) + 1):
            progress.skipped += row.is_skipped
            progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if row.is_skipped else 0
            if progress.skipped_in_a_row >= limit:
                raise of_all_ranks(
                    FloatingPointError(
                        f"step {step}: loss {row.loss}, gradient norm {row.grad_norm} at learning "
                        f"rate {learning_rate(self.config, step):.3g}, the {limit}th step in a row "
                        "that is not finite (max_nonfinite_steps); a lower learning_rate usually "
                        "helps"
                    )
                )
        progress.unlogged += [list(row) for row in rows]

    def _log(self) -> dict[str, float]:
        """Write the mean of the steps since the last line; return what of it is shown."""
        self._read_log()
        progress = self.progress
        self._stop_clock()
        finite = [(loss, norm) for loss, norm, is_skipped in progress.unlogged if not is_skipped]
        loss, norm = np.mean(finite, axis=0) if finite else (math.nan, math.nan)
        seconds = progress.seconds - progress.logged_seconds
        rate = len(progress.unlogged) * self.run.tokens_per_step / seconds
        shown = {"loss": float(loss), "tokens_per_s": rate}
        self._write(
            {
                "loss": float(loss),
                "grad_norm": float(norm),
                "learning_rate": learning_rate(self.config, progress.steps),
                "skipped_steps": progress.skipped,
                "tokens_per_s": rate,
                "mfu": self._mfu(rate),
            }
        )
        progress.unlogged, progress.logged_seconds = [], progress.seconds
        return shown

    def _evaluate(self) -> dict[str, float]:
        """Evaluate and write it; return what of it is shown."""
        self._stop_clock()
        config, run = self.config, self.run
        self.evaluation = evaluate(
            self.step.whole_model(),
            run.validation_tokens,
            self.bytes_of_token,
            batch_size=config.batch_size,
            device=run.device,
            max_tokens=config.eval_tokens,
            autocast=None if config.low_precision_weights else run.dtype,
        )
        self._write(
            {
                "validation_loss": self.evaluation.loss,
                "validation_perplexity": self.evaluation.perplexity,
                "validation_bits_per_byte": self.evaluation.bits_per_byte,
            }
        )
        self.clock = time.perf_counter()
        return {"validation_loss": self.evaluation.loss}

    def _write(self, figures: dict[str, Any]) -> None:
        if self.metrics is None:
            return
        progress = self.progress
        record = {
            "step": progress.steps,
            "tokens": progress.steps * self.run.tokens_per_step,
            "seconds": round(progress.seconds, 3),
            **figures,
        }
        self.metrics.write(record)
        if self.on_metrics:
            self.on_metrics(record)

    def _save(self) -> None:
        self._read_log()
        self._stop_clock()
        on_first_rank(self._sync_metrics, self.waiting)
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.step.optimizer}
        if self.step.is_sharded:
            parts = {"model": self.step.weights(), "shards": self.shards}
            self.step.optimizer.save_shard(self.shards, self.waiting)
        self.newest = on_first_rank(lambda: self._write_checkpoint(parts), self.waiting)
        self.clock = time.perf_counter()

    def _sync_metrics(self) -> None:
        if not self.metrics.path.exists():
            raise FileNotFoundError(f"{self.run.folder} was removed while it was trained in")
        self.metrics.sync()
        self.progress.metrics_position = self.metrics.position

    def _write_checkpoint(self, parts: dict[str, Any]) -> Path:
        path = save_checkpoint(
            self.checkpoints,
            step=self.progress.steps,
            **parts,
            extra={
                "progress": dataclasses.asdict(self.progress),
                "sampler": self.run.sampler.state_dict(),
                "config": to_dict(self.config),
                "world_size": self.run.sampler.world_size,
                "data_sha256": self.run.data_sha256,
            },
            tensors=self.step.state_tensors() | rng_state(self.run.device),
            keep_last=self.config.keep_last,
        )
        shutil.rmtree(self.shards, ignore_errors=True)
        return path

    def _load_weights(self) -> Checkpoint:
        extra = read_extra(self.newest)
        check_same_settings(self.run, saved_identity(extra["config"], extra))
        loaded = load_checkpoint(self.newest, model=self.model, verify=False)
        self.progress = Progress(**loaded.extra["progress"])
        if self.progress.steps > self.config.steps:
            raise ValueError(
                f"steps is {self.config.steps}, but the run in {self.run.folder} has done "
                f"{self.progress.steps}; right is: at least as many, or another output"
            )
        return loaded

    def _restore(self, loaded: Checkpoint) -> None:
        run = self.run
        load_optimizer(self.newest, self.step.optimizer, self.model)
        run.sampler.load_state_dict(loaded.extra["sampler"])
        self.step.load_state_tensors(loaded.tensors)
        set_rng_state(loaded.tensors, run.device)
        log.info("going on with %s at step %s", run.folder, self.progress.steps)

    def _stop_clock(self) -> None:
        """Count the time since the clock was set as training."""
        if self.run.device.type == "cuda":
            torch.cuda.synchronize(self.run.device)
        now = time.perf_counter()
        self.progress.seconds += now - self.clock
        self.clock = now

    def _mfu(self, tokens_per_s: float) -> float | None:
        """Model FLOP/s over what the chips' maker promises; None where nothing is known."""
        limit = peak_flops(self.run.device, self.run.dtype)
        flops = flops_per_token(self.config.model) * tokens_per_s
        return limit and flops / (limit * self.run.sampler.world_size)

    def _result(self, status: Literal["finished", "stopped", "up to date"]) -> TrainResult:
        steps = self.progress.steps
        return TrainResult(status, steps, self.evaluation, self.run.folder, self.newest)
