"""What a training run tells while it goes: a line of JSON each time, a progress bar, W&B if asked.

tqdm and wandb are imported only where they are used.
"""

from __future__ import annotations

import errno
import inspect
import io
import json
import logging
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from lib.files import NO_SPACE, make_folder, no_space_error, sync_folder

# Lines of progress in all where nothing can be overwritten, as in a log file.
PLAIN_LINES = 10
# JSON has no numbers for these; `float` reads each text back.
NOT_FINITE = ("nan", "inf", "-inf")
# Without a network W&B would try for a minute and a half, and at the end for ever.
WANDB_INIT_TIMEOUT_S = 15
WANDB_FINISH_TIMEOUT_S = 60

log = logging.getLogger(__name__)


class MetricsLog:
    """Records metrics in a JSONL file, shows progress, and tells W&B when asked.

    A context manager; the file is opened, and a failed resumption refused, on entering it.

    Args:
        path: the file, one JSON object a line. The folder of W&B is made beside it.
        total_steps: steps of the whole run.
        start_step: the step that a resumed run goes on from.
        resume_at: the `position` stored in the checkpoint that is resumed. What stands behind it
            (lines of steps that will come again, a line torn off by a crash) is cut away. None:
            the file starts anew.
        wandb: whether W&B gets the records too, in the mode that WANDB_MODE says (`offline` when
            it is unset). A fault there is a warning and never ends the run.
        run_name: the run's name in W&B; a resumed run is a further one in a group of that name.
        config: JSON values that W&B shows beside the run.

    Raises:
        ValueError: `resume_at` is behind the file's end, or not between two lines.
        OSError: the file cannot be written to; names it.

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
        resume_at: int | None = None,
        wandb: bool = False,
        run_name: str | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        self.path, self.total_steps, self.start_step = Path(path), total_steps, start_step
        self.position = resume_at or 0
        """Length of the file in bytes, all lines whole; a checkpoint stores it."""
        self._wandb, self._run_name, self._config = wandb, run_name, config

    def __enter__(self) -> MetricsLog:
        self._file = _open_at(self.path, self.position)
        self._run = None
        if self._wandb:
            self._run = _start_wandb(self.path.parent, self._run_name, self._config)
        self._progress = _Progress(self.total_steps, self.start_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._file.close()
        self._progress.close()
        self._tell_wandb(lambda run: run.finish(exit_code=0 if error is None else 1))

    def write(self, record: dict[str, Any]) -> None:
        """Add `record` as one line, which the system holds when this returns.

        Args:
            record: JSON values; also scalars of NumPy or PyTorch. Numbers that are not finite are
                written as the texts nan, inf and -inf. `step` places the record in W&B.

        Raises:
            TypeError: a value that JSON has no form for.
            OSError: the line does not fit on the disk; the file is as it was before.
        """
        record = _each(record, lambda value: value.item() if hasattr(value, "item") else value)
        line = json.dumps(_each(record, _as_text), ensure_ascii=False, allow_nan=False)
        data = f"{line}\n".encode()
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, "the line went in only in part")
        except OSError as error:
            self._file.truncate(self.position)
            if error.errno in NO_SPACE:
                raise no_space_error(error, self.path, len(data)) from error
            raise
        self.position += len(data)
        self._tell_wandb(lambda run: run.log(record, step=record.get("step")))

    def sync(self) -> None:
        """Wait until all lines are on the disk; before a checkpoint that stores `position`."""
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
        """Show that `step` steps are done; a figure left out stays as it was shown last."""
        figures = {
            "loss {:.3f}": loss,
            "validation loss {:.3f}": validation_loss,
            "{:,.0f} tokens/s": tokens_per_s,
        }
        self._progress.advance(step, figures)

    def _tell_wandb(self, tell: Callable[[Any], None]) -> None:
        if self._run is None:
            return
        try:
            tell(self._run)
        except Exception as error:
            log.warning("W&B failed (%s); the run goes on without", _one_line(error))
            self._run = None


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The records in the file at `path`, in order; the texts nan, inf and -inf as numbers again.

    A last line that was torn off, as by a crash, is left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another line is no JSON object; names it.
    """
    path = Path(path)
    *lines, last = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate([*lines, last], start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("right is: an object {…}")
        except ValueError as error:
            # nothing behind the last line end, or a torn line
            if number > len(lines):
                break
            raise ValueError(f"{path}:{number} is no record: {error}") from error
        records.append(_each(record, _as_number))
    return records


class _Progress:
    """tqdm's figures where they read well: one line that is overwritten, or a few plain ones.

    A notebook's cell gets a text that is updated in place and not tqdm's widget, since a widget
    shows nothing in a stored notebook, and a text stays as it was last.
    """

    def __init__(self, total_steps: int, start_step: int) -> None:
        from tqdm import tqdm

        self.figures: dict[str, float] = {}
        self.is_plain = False
        form = "step {n_fmt}/{total_fmt} |{bar:20}| {elapsed}, {remaining} left{postfix}"
        # miniters=1 keeps tqdm's watching thread from writing, to whichever cell is running
        options = {"total": total_steps, "initial": start_step, "miniters": 1, "bar_format": form}
        if _in_notebook():
            options |= {"file": _CellText(), "ascii": False, "mininterval": 0.5}
        elif sys.stderr.isatty():
            options |= {"dynamic_ncols": True}
        else:
            # tqdm only counts and measures
            self.is_plain = True
            options |= {"file": io.StringIO(), "mininterval": float("inf")}
            options |= {"bar_format": form.replace(" |{bar:20}| ", ", ")}
        self.bar = tqdm(**options)

    def advance(self, step: int, figures: dict[str, float | None]) -> None:
        self.figures |= {form: value for form, value in figures.items() if value is not None}
        shown = [form.format(float(self.figures[form])) for form in figures if form in self.figures]
        self.bar.set_postfix_str(", ".join(shown), refresh=False)
        lines_before = self.bar.n * PLAIN_LINES // self.bar.total
        self.bar.update(step - self.bar.n)
        if self.is_plain and self.bar.n * PLAIN_LINES // self.bar.total > lines_before:
            print(self.bar, file=sys.stderr, flush=True)

    def close(self) -> None:
        self.bar.close()


class _CellText:
    """A file for tqdm: what is written to it replaces what the cell showed before."""

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


def _in_notebook() -> bool:
    if "IPython" not in sys.modules:
        return False
    return hasattr(sys.modules["IPython"].get_ipython(), "kernel")


def _open_at(path: Path, position: int) -> io.FileIO:
    """The file at `path`, made when missing, cut off at `position` and open for more."""
    make_folder(path.parent)
    with open(path, "ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size < position:
            raise ValueError(
                f"resume_at is {position:,}, but {path} has only {size:,} bytes: lines that the "
                "checkpoint knows of are missing"
            )
        if position and (file.seek(position - 1), file.read(1))[1] != b"\n":
            raise ValueError(f"resume_at is {position:,}, which is inside a line of {path}")
        file.truncate(position)
    # unbuffered, so that no line waits in this process
    return open(path, "ab", buffering=0)


def _start_wandb(folder: Path, name: str | None, config: dict[str, Any] | None) -> Any:
    """A W&B run that keeps its files in `folder`; None, with a warning, where there can be none.

    Without a key or a network an online run becomes an offline one. Nothing is ever asked.
    """
    mode = os.environ.get("WANDB_MODE") or "offline"
    if mode == "disabled":
        return None
    try:
        import wandb

        if mode not in ("offline", "dryrun"):
            try:
                if not _has_wandb_key(wandb):
                    raise ValueError("no API key is stored")
                return _wandb_run(wandb, mode, folder, name, config)
            except Exception as error:
                reason = _one_line(error)
                log.warning("W&B is not online (%s); `wandb sync` can upload later", reason)
        return _wandb_run(wandb, "offline", folder, name, config)
    except Exception as error:
        log.warning("W&B does not work here (%s); the run goes on without", _one_line(error))
        return None


def _wandb_run(
    wandb: Any, mode: str, folder: Path, name: str | None, config: dict[str, Any] | None
) -> Any:
    settings = wandb.Settings(silent=True, console="off", init_timeout=WANDB_INIT_TIMEOUT_S)
    # older releases do not have it
    if hasattr(settings, "finish_timeout"):
        settings.finish_timeout = WANDB_FINISH_TIMEOUT_S
    project = os.environ.get("WANDB_PROJECT") or "workbook"
    return wandb.init(
        mode=mode,
        dir=str(folder),
        project=project,
        name=name,
        group=name,
        config=config,
        settings=settings,
    )


def _has_wandb_key(wandb: Any) -> bool:
    """Whether W&B knows an API key; `wandb.init` would ask for one."""
    if "prompt" in inspect.signature(wandb.login).parameters:
        return wandb.login(prompt=False, verify=False)
    return bool(wandb.api.api_key)


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` applied to all that objects and lists in it hold."""
    if isinstance(value, dict):
        return {key: _each(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each(item, change) for item in value]
    return change(value)


def _as_text(value: Any) -> Any:
    is_number = isinstance(value, float)
    return str(float(value)) if is_number and not math.isfinite(value) else value


def _as_number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and value in NOT_FINITE else value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
