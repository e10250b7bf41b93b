"""The metrics of a run: a line of JSON each time, a progress bar; on request W&B and TensorBoard.

tqdm, wandb and tensorboard are imported only where they are used.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from lib.core.files import NO_SPACE, make_folder, no_space_error, sync_folder
from lib.core.records import read_records
from lib.core.terminal import advance_bar, bar_size, in_notebook, one_line

# Lines of progress in total where a line can't be overwritten, as in a log file.
PLAIN_LINES = 10
# JSON has no such numbers; `float` reads each of these texts.
NOT_FINITE = ("nan", "inf", "-inf")
# Without a network, W&B would retry for 90 seconds, and forever at the end.
WANDB_INIT_TIMEOUT_S = 15
WANDB_FINISH_TIMEOUT_S = 60
log = logging.getLogger(__name__)


class MetricsLog:
    """Writes metrics to a JSONL file, shows progress, and logs to W&B on request.

    A context manager. It fails if the run can't be resumed at `path`.

    Args:
        path: the file, one JSON object per line. W&B's folder goes beside it.
        total_steps: of the whole run.
        start_step: the step that a resumed run continues from. Lines of later steps, which will be
            repeated, and a line cut short by a crash are removed. 0: start a new file.
        wandb: also log to W&B, in the mode given by WANDB_MODE (`offline` if unset). An error there
            is a warning and never ends the run.
        tensorboard: also write TensorBoard's event files, into `tensorboard` beside the file.
        run_name: the run's name in W&B; a resumed run is another one in a group of that name.
        config: JSON values that W&B shows with the run.

    Example:
        with MetricsLog(path, total_steps=100) as metrics:
            metrics.write({"step": 1, "loss": 8.3})
            metrics.advance(1, loss=8.3)
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        total_steps: int,
        start_step: int = 0,
        wandb: bool = False,
        tensorboard: bool = False,
        run_name: str | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        self.path = Path(path)
        self._file = _open_after(self.path, start_step)
        self._run = _start_wandb(self.path.parent, run_name, config) if wandb else None
        self._events = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # hides lines of steps that will be repeated
            folder = self.path.parent / "tensorboard"
            self._events = SummaryWriter(folder, purge_step=start_step + 1)
        self._progress = _Progress(total_steps, start_step)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._file.close()
        self._progress.bar.close()
        if self._events is not None:
            self._events.close()
        with self._wandb_errors_as_warnings():
            if self._run is not None:
                self._run.finish(exit_code=0 if error is None else 1)

    def write(self, record: dict[str, Any]) -> None:
        """Append `record` as one line, which the system holds when this returns.

        It has JSON values, and scalars of NumPy or PyTorch; non-finite numbers are written as the
        texts nan, inf and -inf. W&B takes its step from `step`. If the line does not fit on the
        disk, the file stays as it was.
        """
        record = _map_values(record, lambda x: x.item() if hasattr(x, "item") else x)
        line = json.dumps(_map_values(record, _to_text), ensure_ascii=False, allow_nan=False)
        data, start = f"{line}\n".encode(), self._file.tell()
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, "only a part of the line was written")
        except OSError as error:
            self._file.truncate(start)
            if error.errno in NO_SPACE:
                raise no_space_error(error, self.path, len(data)) from error
            raise OSError(error.errno, error.strerror, os.fspath(self.path)) from error
        with self._wandb_errors_as_warnings():
            if self._run is not None:
                self._run.log(record, step=record.get("step"))
        if self._events is not None:
            for name, value in record.items():
                if isinstance(value, (int, float)) and name != "step":
                    self._events.add_scalar(name, value, record.get("step"))

    def sync(self) -> None:
        """Wait until all lines are on the disk; before a checkpoint that counts on them."""
        os.fsync(self._file.fileno())
        sync_folder(self.path.parent)

    def advance(
        self,
        step: int,
        *,
        loss: float | None = None,
        validation_loss: float | None = None,
        tokens_per_s: float | None = None,
    ) -> None:
        """Show that `step` steps are done; a figure left out stays as it was last shown.

        Cheap enough for each step: the bar is drawn ten times a second at most.
        """
        figures = {
            "loss {:.3f}": loss,
            "validation loss {:.3f}": validation_loss,
            "{:,.0f} tokens/s": tokens_per_s,
        }
        self._progress.advance(step, figures)

    @contextlib.contextmanager
    def _wandb_errors_as_warnings(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            log.warning("W&B failed (%s); the run continues without it", one_line(error))
            self._run = None


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The records in the file at `path`, as `read_records`; nan, inf and -inf as numbers again."""
    return [_map_values(record, _to_number) for record in read_records(path)]


def last_evaluation(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The last of these records that has the figures of an evaluation; None without one."""
    return next((line for line in reversed(lines) if "validation_loss" in line), None)


def _open_after(path: Path, step: int) -> io.FileIO:
    """Open the file at `path` for appending, without lines of later steps or one cut short."""
    make_folder(path.parent)
    if step and not path.exists():
        raise FileNotFoundError(
            f"{path} is missing, which has the metrics of {step} steps; restore it, or train into "
            "another output"
        )
    with open(path, "ab+") as file:
        file.seek(0)
        position = 0
        for line in file if step else ():
            if not line.endswith(b"\n") or _step_of(line) > step:
                break
            position += len(line)
        file.truncate(position)
    # unbuffered, so that no line waits in this process
    return open(path, "ab", buffering=0)


def _step_of(line: bytes) -> int:
    """The step that a line of metrics belongs to; 0 for a damaged one, which a reader will name."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return int(json.loads(line)["step"])
    return 0


def _map_values(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` applied to everything that its objects and lists contain."""
    if isinstance(value, dict):
        return {key: _map_values(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_values(item, change) for item in value]
    return change(value)


def _to_text(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _to_number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and value in NOT_FINITE else value


# Progress


class _Progress:
    """tqdm's figures as one line that is overwritten, or as a few plain ones in a log file.

    A notebook's cell gets text that is updated in place, not tqdm's widget: a stored notebook
    cannot show widgets, but keeps the text as it was last.
    """

    def __init__(self, total_steps: int, start_step: int) -> None:
        from tqdm import tqdm

        self.figures: dict[str, float] = {}
        self.is_plain = False
        form = "step {n_fmt}/{total_fmt} |{bar:20}| {elapsed}, {remaining} left{postfix}"
        # miniters=1 keeps tqdm's monitor thread from writing into whichever cell is running
        options = {"total": total_steps, "initial": start_step, "miniters": 1, "bar_format": form}
        if in_notebook():
            options |= {"file": _CellText(), "ascii": False, "mininterval": 0.5}
        elif sys.stderr.isatty():
            options |= bar_size()
        else:
            # tqdm only counts and measures
            self.is_plain = True
            options |= {"file": io.StringIO(), "mininterval": float("inf")}
            options |= {"bar_format": form.replace(" |{bar:20}| ", ", ")}
        self.bar = tqdm(**options)

    def advance(self, step: int, figures: dict[str, float | None]) -> None:
        if new := {form: value for form, value in figures.items() if value is not None}:
            self.figures |= new
            shown = [f.format(float(self.figures[f])) for f in figures if f in self.figures]
            self.bar.set_postfix_str(", ".join(shown), refresh=False)
        lines_before = self.bar.n * PLAIN_LINES // self.bar.total
        advance_bar(self.bar, step - self.bar.n)
        if self.is_plain and self.bar.n * PLAIN_LINES // self.bar.total > lines_before:
            print(self.bar, file=sys.stderr, flush=True)


class _CellText:
    """A file for tqdm in a notebook: what is written replaces what the cell showed before."""

    def __init__(self) -> None:
        self.handle = None

    def write(self, text: str) -> None:
        from IPython.display import display

        if not text.strip():
            return
        data = {"text/plain": text.strip()}
        if self.handle is None:
            self.handle = display(data, raw=True, display_id=True)
        else:
            self.handle.update(data, raw=True)

    def flush(self) -> None:
        pass


# Weights & Biases


def _start_wandb(folder: Path, name: str | None, config: dict[str, Any] | None) -> Any:
    """Start a W&B run with its files in `folder`; None, with a warning, if that fails.

    Without a network, an online run becomes an offline one.
    """
    mode = os.environ.get("WANDB_MODE") or "offline"
    if mode == "disabled":
        return None
    try:
        import wandb

        settings = wandb.Settings(silent=True, console="off", init_timeout=WANDB_INIT_TIMEOUT_S)
        # missing in older releases
        if hasattr(settings, "finish_timeout"):
            settings.finish_timeout = WANDB_FINISH_TIMEOUT_S
        project = os.environ.get("WANDB_PROJECT") or "workbook"
        names = {"project": project, "name": name, "group": name}
        options = {"dir": str(folder), "config": config, "settings": settings, **names}
        if mode not in ("offline", "dryrun"):
            try:
                return wandb.init(mode=mode, **options)
            except Exception as error:
                reason = one_line(error)
                log.warning("W&B is not online (%s); `wandb sync` can upload later", reason)
        return wandb.init(mode="offline", **options)
    except Exception as error:
        log.warning("W&B does not work here (%s); the run continues without it", one_line(error))
        return None
