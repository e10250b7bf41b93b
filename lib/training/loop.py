"""The training loop, for the command line, the notebooks and the benchmarks.

`train` checks the run and holds its folder, `_take_steps` is the loop itself; below them is what
the loop does when due (log, evaluate, save), setting up and resuming, and stopping on signals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from lib.core.hardware import keep_freed_memory, peak_flops
from lib.core.settings import to_dict
from lib.data.batches import read_sequences
from lib.ddp.process_group import (
    mark_collective,
    mean_over_ranks,
    on_each_rank,
    on_first_rank,
    patient_group,
    rank,
    world_size,
)
from lib.model.costs import flops_per_token
from lib.model.transformer import TransformerLM
from lib.optimizer.schedule import cosine_lr
from lib.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    load_optimizer,
    rng_state,
    save_checkpoint,
    set_rng_state,
)
from lib.training.config import TrainConfig
from lib.training.evaluation import Evaluation, bytes_of_token, evaluate
from lib.training.metrics import MetricsLog
from lib.training.run_folder import (
    Run,
    describe_run,
    finished_checkpoint,
    hold_folder,
    is_due,
    is_evaluated,
    open_run,
)
from lib.training.step import TrainStep, numerics

log = logging.getLogger(__name__)
Status = Literal["finished", "stopped", "up to date"]


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The outcome of a call of `train`."""

    status: Status
    """`stopped`: by a signal or max_seconds, and saved. `up to date`: finished before this call."""

    step: int
    """Steps done in total."""

    evaluation: Evaluation | None
    """The last one on the validation tokens; None if this call made none."""

    output: Path
    """The run's folder."""

    checkpoint: Path
    """The last checkpoint."""


@dataclasses.dataclass
class Progress:
    """The progress of a run; saved in its checkpoints."""

    steps: int = 0
    """Optimizer steps done."""

    seconds: float = 0.0
    """Time spent in them, without evaluations and checkpoints."""

    skipped: int = 0
    """Steps whose update was skipped because the loss or a gradient was not finite."""

    skipped_in_a_row: int = 0
    """How many of the latest steps were skipped."""

    logged_seconds: float = 0.0
    """`seconds` when the last line of metrics was written."""

    unlogged: list[list[float]] = dataclasses.field(default_factory=list)
    """Loss, gradient norm and whether it was skipped, of each step since then."""


@dataclasses.dataclass
class _Training:
    """The objects of a run in progress."""

    run: Run
    step: TrainStep
    progress: Progress

    patient: dist.ProcessGroup | None
    """The group in which ranks wait for what rank 0 does alone."""

    on_metrics: Callable[[dict[str, Any]], None] | None

    checkpoint: Path | None
    """The newest one."""

    evaluation: Evaluation | None = None
    """The last one of this call."""

    metrics: MetricsLog | None = None
    """On rank 0, while steps are taken."""

    clock: float = 0.0
    """When `progress.seconds` was last brought up to date."""


def train(
    config: TrainConfig, *, on_metrics: Callable[[dict[str, Any]], None] | None = None
) -> TrainResult:
    """Train a model, or resume the run in the output folder.

    The folder gets `config.json`, `bpe.json`, `run.json`, `metrics.jsonl` and `checkpoints/`.
    An interrupted run continues from its last checkpoint when started again; in deterministic mode
    it ends bit for bit as if nothing had happened. SIGINT, SIGTERM and `max_seconds` end it after
    the current step, with a checkpoint.

    **On several GPUs** each has a process of its own, a rank, that runs this function on its part
    of the batch: `torchrun --nproc_per_node=2 -m lib train …` on one host (with `--nnodes` and
    `--node_rank` on each of many), or in a notebook `lib.ddp.launch(train, 2, config)`. A step
    takes batch_size × gradient_accumulation_steps × ranks sequences; a run may be resumed with
    other factors as long as their product stays, and then sees the same sequences, with the same
    losses up to rounding. Rank 0 writes, shows progress and calls `on_metrics`; hosts share the
    disk with the output folder. Each rank of a sharded optimizer writes its part of the state into
    the checkpoint, which can be resumed with any other sharding, or none. Signals and `max_seconds`
    take effect after a step that is a multiple of `log_interval`. If a rank is lost the job ends;
    `torchrun --max-restarts=2` restarts it from the last checkpoint.

    Args:
        on_metrics: called with each line of metrics, for a live figure.

    Raises:
        ValueError, OSError: settings, data and output folder do not fit together; found before any
            work, and raised on all ranks.
        FloatingPointError: `max_nonfinite_steps` in a row had a non-finite loss or gradient.
    """
    deadline = time.monotonic() + (config.max_seconds or math.inf)
    # ranks wait in this group while rank 0 works alone, however long a slow disk or a lock takes
    with patient_group() as patient:
        return _train(config, on_metrics, deadline, patient)


def _train(
    config: TrainConfig,
    on_metrics: Callable[[dict[str, Any]], None] | None,
    deadline: float,
    patient: dist.ProcessGroup | None,
) -> TrainResult:
    """Train or resume until `deadline`; ranks wait in the group `patient`."""
    # check settings, data and folder; a run that is finished needs nothing
    run = open_run(config, patient)
    finished = on_first_rank(lambda: finished_checkpoint(run))
    if finished is not None:
        # nothing is written, so that the disk may be read-only
        log.info("%s is up to date: %s steps", run.folder, config.steps)
        return TrainResult("up to date", config.steps, None, run.folder, finished)

    # a warm-up longer than the run is cut
    asked, taken = config.optimizer.warmup_steps, config.effective_warmup_steps
    if taken < asked and rank() == 0:
        log.info("warm-up takes %d of %d steps, not %d", taken, config.steps, asked)
    if run.device.type == "cpu":
        keep_freed_memory()

    # train, while nobody else writes into the folder
    with (
        numerics(tf32=config.tf32, deterministic=config.deterministic),
        hold_folder(run, patient) as checkpoint,
        stop_signals() as stop,
    ):
        training = _set_up(run, checkpoint, patient, on_metrics)
        status = _take_steps(training, stop, deadline)
    steps = training.progress.steps
    return TrainResult(status, steps, training.evaluation, run.folder, training.checkpoint)


def _take_steps(training: _Training, stop: threading.Event, deadline: float) -> Status:
    """Take the steps that are left, unless `stop` is set or the time is up before."""
    run, step, progress = training.run, training.step, training.progress
    config = run.config

    was_evaluated = on_first_rank(lambda: is_evaluated(run, progress.steps))
    with contextlib.ExitStack() as files:
        on_first_rank(lambda: _open_files(training, files))
        _start_clock(training)
        if not was_evaluated:
            # the step of the checkpoint was saved, and ended before its evaluation did
            _evaluate(training)

        is_stopping = False
        while progress.steps < config.steps and not is_stopping:
            # Batch: this rank's sequences of the next step, (sequences, context_length + 1).
            starts = run.sampler.next_starts()
            length = config.model.context_length
            sequences = read_sequences(run.train_tokens, starts, length, run.device)

            # Step: forward, backward, update; the host does not wait for it.
            progress.steps += 1
            step(sequences, learning_rate(config, progress.steps))
            if time.monotonic() >= deadline:
                stop.set()

            # Log, save and evaluate when due; first save, so that an evaluation that fails loses
            # nothing.
            is_last = progress.steps == config.steps
            is_saved = is_last or is_due(progress.steps, config.checkpointing_interval)
            shown: dict[str, float] = {}
            if is_last or is_due(progress.steps, config.log_interval):
                shown |= _log(training)

            if is_saved:
                _save(training)
            if is_last or is_due(progress.steps, config.eval_interval):
                shown |= _evaluate(training)

            # Stop if asked to. Asked only once a step, so that no signal ends the run unsaved.
            is_stopping = _must_stop(stop, progress.steps, config.log_interval)
            if training.metrics:
                training.metrics.advance(progress.steps, **shown)
            if is_stopping and not is_saved:
                _save(training)
    return "finished" if progress.steps == config.steps else "stopped"


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of `step`, counted from 1; that of the last is `min_learning_rate`."""
    settings = config.optimizer
    return cosine_lr(
        step,
        max_lr=settings.learning_rate,
        min_lr=settings.min_learning_rate,
        warmup_steps=config.effective_warmup_steps,
        cosine_steps=config.steps,
    )


# Logging and evaluation


def _log(training: _Training) -> dict[str, float]:
    """Write a line with the means of the steps since the last one; return what is shown."""
    run, progress = training.run, training.progress
    # the device has finished all steps up to here
    _read_log(training)
    _count_time(training)

    # means over the steps whose update was not skipped
    finite = [(loss, norm) for loss, norm, is_skipped in progress.unlogged if not is_skipped]
    loss, norm = map(float, np.mean(finite, axis=0)) if finite else (math.nan, math.nan)

    # speed, without evaluations and checkpoints
    seconds = progress.seconds - progress.logged_seconds
    tokens_per_s = len(progress.unlogged) * run.tokens_per_step / seconds
    _write(
        training,
        {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": learning_rate(run.config, progress.steps),
            "skipped_steps": progress.skipped,
            "tokens_per_s": tokens_per_s,
            "mfu": _mfu(run, tokens_per_s),
        },
    )
    progress.unlogged, progress.logged_seconds = [], progress.seconds
    return {"loss": loss, "tokens_per_s": tokens_per_s}


def _read_log(training: _Training) -> None:
    """Collect what the steps since the last call reported; abort the run if it diverged."""
    config, progress = training.run.config, training.progress
    rows = training.step.read_log()

    # a few skipped steps are normal with float16; many in a row mean that training has diverged
    for step, row in enumerate(rows, start=progress.steps - len(rows) + 1):
        progress.skipped += row.is_skipped
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if row.is_skipped else 0
        if progress.skipped_in_a_row >= config.max_nonfinite_steps:
            raise mark_collective(
                FloatingPointError(
                    f"step {step}: loss {row.loss}, gradient norm {row.grad_norm} at learning rate "
                    f"{learning_rate(config, step):.3g}; this is consecutive non-finite step "
                    f"{progress.skipped_in_a_row} (max_nonfinite_steps); a lower learning_rate "
                    "usually helps"
                )
            )
    progress.unlogged += [list(row) for row in rows]


def _mfu(run: Run, tokens_per_s: float) -> float | None:
    """Model FLOP/s as a fraction of the chips' peak; None if the peak is not known."""
    peak = peak_flops(run.device, run.dtype)
    flops = flops_per_token(run.config.model) * tokens_per_s
    return peak and flops / (peak * run.sampler.world_size)


def _evaluate(training: _Training) -> dict[str, float]:
    """Evaluate on the validation tokens and write a line; return what is shown."""
    config, run, progress = training.run.config, training.run, training.progress

    # the clock stands still meanwhile
    _count_time(training)
    try:
        found = evaluate(
            training.step.parallel,
            run.validation_tokens,
            bytes_of_token(run.tokenizer),
            batch_size=config.batch_size,
            device=run.device,
            max_tokens=config.eval_tokens,
        )
    except Exception:
        if rank() == 0:
            saved = training.checkpoint or "nothing yet"
            log.error("the evaluation after step %s failed; saved: %s", progress.steps, saved)
        raise
    _write(
        training,
        {
            "validation_loss": found.loss,
            "validation_perplexity": found.perplexity,
            "validation_bits_per_byte": found.bits_per_byte,
        },
    )
    training.evaluation = found
    _start_clock(training)
    return {"validation_loss": found.loss}


def _write(training: _Training, figures: dict[str, Any]) -> None:
    """Write a line of metrics, on rank 0."""
    if training.metrics is None:
        return
    progress = training.progress
    record = {
        "step": progress.steps,
        "tokens": progress.steps * training.run.tokens_per_step,
        "seconds": round(progress.seconds, 3),
        **figures,
    }
    training.metrics.write(record)
    if training.on_metrics:
        training.on_metrics(record)


def _start_clock(training: _Training) -> None:
    training.clock = time.perf_counter()


def _count_time(training: _Training) -> None:
    """Count the time since the clock was started, or last counted, as time of training."""
    if training.run.device.type == "cuda":
        torch.cuda.synchronize(training.run.device)
    now = time.perf_counter()
    training.progress.seconds += now - training.clock
    training.clock = now


# Checkpoints


def _save(training: _Training) -> None:
    """Write a checkpoint; all ranks call it together."""
    run, step, patient = training.run, training.step, training.patient
    _read_log(training)
    _count_time(training)
    # metrics first, since a resumed run goes on from their lines
    on_first_rank(lambda: _sync_metrics(training), patient)
    training.checkpoint = save_checkpoint(
        run.folder / "checkpoints",
        step=training.progress.steps,
        model=step.parallel.weights(),
        optimizer=step.optimizer,
        extra={
            "progress": dataclasses.asdict(training.progress),
            "sampler": run.sampler.state_dict(),
            "config": to_dict(run.config),
            "world_size": run.sampler.world_size,
            "data_sha256": run.data_sha256,
        },
        tensors=step.state_tensors() | rng_state(run.device),
        keep_last=run.config.keep_last,
        group=patient,
    )
    _start_clock(training)


def _sync_metrics(training: _Training) -> None:
    if not training.metrics.path.exists():
        raise FileNotFoundError(f"{training.run.folder} was removed during training")
    training.metrics.sync()


# Setting up and resuming


def _set_up(
    run: Run,
    checkpoint: Path | None,
    patient: dist.ProcessGroup | None,
    on_metrics: Callable[[dict[str, Any]], None] | None,
) -> _Training:
    """Make the model and its training step, and restore `checkpoint` if there is one."""
    config, progress, loaded = run.config, Progress(), None

    # Model: drawn on the CPU, so that every device starts from the same weights
    generator = torch.Generator().manual_seed(config.seed)
    model = TransformerLM(config.model, device="cpu", generator=generator).to(run.device)
    if config.low_precision_weights:
        model.use_low_precision_weights(run.dtype)

    # Weights of the checkpoint.
    if checkpoint is not None:
        # before the model is sharded, since checkpoints hold whole weights
        load = functools.partial(load_checkpoint, checkpoint, model=model, verify=False)
        loaded = on_each_rank(load, patient)
        # checkpoints of earlier releases hold more
        names = [field.name for field in dataclasses.fields(Progress)]
        progress = Progress(**{name: loaded.extra["progress"][name] for name in names})

    # Step, with the optimizer, whose state is of the checkpoint too.
    step = TrainStep(model, config, run.device, run.dtype)
    if loaded is not None:
        on_each_rank(lambda: _restore(run, step, loaded), patient)
    return _Training(run, step, progress, patient, on_metrics, checkpoint)


def _restore(run: Run, step: TrainStep, loaded: Checkpoint) -> None:
    """Restore all but the weights: optimizer, data order, loss scale and random numbers."""
    load_optimizer(loaded.path, step.optimizer)
    run.sampler.load_state_dict(loaded.extra["sampler"])
    step.load_state_tensors(loaded.tensors)
    set_rng_state(loaded.tensors, run.device)
    log.info("resuming %s at step %s", run.folder, loaded.step)
    kernels = [
        m.get("attention_kernel") for m in (loaded.extra["config"]["model"], run.identity["model"])
    ]
    if kernels[0] != kernels[1]:
        log.info("attention_kernel was %s, now %s", *kernels)


def _open_files(training: _Training, files: contextlib.ExitStack) -> None:
    """Describe the run in its folder, and open its metrics until `files` closes."""
    run, progress = training.run, training.progress
    metrics = MetricsLog(
        run.folder / "metrics.jsonl",
        total_steps=run.config.steps,
        start_step=progress.steps,
        wandb=run.config.wandb,
        tensorboard=run.config.tensorboard,
        run_name=run.folder.name,
        config=to_dict(run.config),
    )
    training.metrics = files.enter_context(metrics)
    describe_run(run)


# Stopping


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets; a second SIGINT interrupts as usual.

    A notebook's stop button sends SIGINT. Outside the main thread signals are left alone.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: Any) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()
        log.warning("%s: finishing this step and saving it", signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _must_stop(stop: threading.Event, step: int, log_interval: int) -> bool:
    """Whether the run ends after `step`.

    A single rank looks at `stop` after each step. Several must end after the same one, and compare
    only where they wait for one another anyway: after multiples of `log_interval`.
    """
    if world_size() == 1:
        return stop.is_set()
    return step % log_interval == 0 and mean_over_ranks(float(stop.is_set())) > 0
