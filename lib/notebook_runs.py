"""Running notebooks in parallel processes, each one once what it needs is done."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.notebook_plan import Job
from lib.parallel import available_cpus

if TYPE_CHECKING:
    from nbformat import NotebookNode

MARKS = {"done": "✓", "failed": "✗", "skipped": "–"}


@dataclass(frozen=True)
class Run:
    """What all notebooks of a run share."""

    report: Path
    """Folder for the executed notebooks and their pages."""

    parameters: str
    """Name of the parameter file, for the pages."""

    started: str
    """When, in UTC; tells runs apart."""


@dataclass(frozen=True)
class Result:
    """How a notebook ended: `status` is done, failed or skipped."""

    name: str
    status: str
    seconds: float = 0.0
    error: str | None = None
    traceback: str | None = None


def run_all(jobs: Sequence[Job], report: Path, parameters: str, workers: int) -> list[Result]:
    """Run each job once what it needs is done; show on the terminal how far each one is.

    Args:
        report: folder for the executed notebooks and their pages.
        parameters: name of the parameter file, for the pages.
        workers: jobs at a time.
    """
    run = Run(report, parameters, _now())
    chosen = {job.name for job in jobs}
    waiting, running, results, bars = list(jobs), {}, {}, {}
    # Fresh processes: papermill changes the working folder, and a fork would copy threads.
    context = multiprocessing.get_context("spawn")
    workers = min(workers, len(jobs))
    threads = max(1, available_cpus() // workers)
    pool = ProcessPoolExecutor(workers, context, initializer=_prepare, initargs=(threads,))
    with context.Manager() as manager, pool:
        events = manager.Queue()
        while waiting or running:
            for job in list(waiting):
                needed = chosen.intersection(job.needs)
                lost = [n for n in sorted(needed) if n in results and results[n].status != "done"]
                if lost:
                    waiting.remove(job)
                    results[job.name] = skip(job, f"needs {lost[0]}", run)
                    _tell(results[job.name])
                # no more than there are workers, so that a long one is not behind those after it
                elif needed <= results.keys() and len(running) < workers:
                    waiting.remove(job)
                    running[pool.submit(run_one, job, run, events)] = job
            ended, _ = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
            while not events.empty():
                _advance(bars, *events.get())
            for future in ended:
                job = running.pop(future)
                if job.name in bars:
                    bars.pop(job.name).close()
                results[job.name] = _result_of(future, job, run)
                _tell(results[job.name])
    return [results[job.name] for job in jobs]


def _prepare(threads: int) -> None:
    """Let Ctrl-C end this process in order, its kernel too, without a traceback of its own.

    And let PyTorch take `threads` threads there: more than there are cores slow all of them down.
    """
    # a notebook that has all cores shares them out among its own processes
    if threads < available_cpus():
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))


def run_one(job: Job, run: Run, events: Any) -> Result:
    """Run one notebook in its own folder, and write it and its page into the report."""
    from papermill import PapermillExecutionError

    from lib.notebook_kernel import execute

    started, reached, total = time.monotonic(), 0, len(_read(job.source).cells)
    # until it is done, the pages of an earlier run stay
    executed = run.report / f".{job.name}.ipynb"
    executed.unlink(missing_ok=True)

    def on_cell(count: int) -> None:
        nonlocal reached
        reached = count
        events.put((job.name, count, total))

    on_cell(0)
    try:
        execute(job.source, executed, job.parameters, on_cell)
        result = Result(job.name, "done", time.monotonic() - started)
    except PapermillExecutionError as error:
        text = f"In [{error.exec_count}]: {error.ename}: {error.evalue}"
        traceback = "\n".join(error.traceback)
        result = Result(job.name, "failed", time.monotonic() - started, text, traceback)
    except Exception as error:  # a kernel that died or did not start, a disk that is full
        text = f"{type(error).__name__} after cell {reached} of {total}: {error}"
        result = Result(job.name, "failed", time.monotonic() - started, text, text)
    publish(result, executed if executed.exists() else job.source, job, run)
    executed.unlink(missing_ok=True)
    return result


def publish(result: Result, notebook: Path, job: Job, run: Run) -> None:
    """Write `notebook` into the report with a note of how it ended, and its page.

    What an earlier run has left of it there moves aside.
    """
    import nbformat

    from lib.hardware import provenance
    from lib.site import write_page
    from lib.site_history import run_of, set_aside

    content, target = _read(notebook), run.report / f"{job.name}.ipynb"
    if target.exists():
        earlier = _read(target).metadata.get("workbook", {})
        set_aside(run.report, job.name, run_of(earlier))
    content.metadata["workbook"] = {
        "status": result.status,
        "seconds": round(result.seconds, 3),
        "error": result.error,
        "parameters": run.parameters,
        "run": run.started,
        "finished": _now(),
        "provenance": provenance(config=job.parameters) | _graphics_cards(),
    }
    page = target.with_suffix(".html")
    downloads = write_page(content, page, source_folder=job.source.parent)
    content.metadata["workbook"]["downloads"] = downloads
    nbformat.write(content, target)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _graphics_cards() -> dict[str, str]:
    """The GPUs' names as NVIDIA's driver tells them: asking torch would occupy their memory."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    counts = Counter(listed.stdout.split("\n")[:-1])
    return {"device": ", ".join(f"{count} × {name}" for name, count in counts.items())}


def skip(job: Job, error: str, run: Run) -> Result:
    """Put the notebook into the report as not run."""
    result = Result(job.name, "skipped", error=f"{error}, which failed")
    publish(result, job.source, job, run)
    return result


def plain(text: str) -> str:
    """`text` without colours where nobody sees them."""
    return text if sys.stderr.isatty() else re.sub(r"\x1b\[[0-9;]*m", "", text)


def _result_of(future: Future, job: Job, run: Run) -> Result:
    """The job's result; a failed one where its process ended without telling."""
    error = future.exception()
    if error is None:
        return future.result()
    text = f"{type(error).__name__}: {error}"
    result = Result(job.name, "failed", error=text, traceback=text)
    publish(result, job.source, job, run)
    return result


def _tell(result: Result) -> None:
    from tqdm import tqdm

    note = f"  {result.error}" if result.error else ""
    tqdm.write(f"  {MARKS[result.status]} {result.name:<24} {result.seconds:6.1f} s{note}")
    sys.stdout.flush()


def _advance(bars: dict[str, Any], name: str, count: int, total: int) -> None:
    from tqdm import tqdm

    if name not in bars:
        form = "    {desc:<24} {bar:20} {n_fmt:>3} of {total_fmt} cells  {elapsed}"
        # no bars in a log: there the lines of `_tell` are enough
        bars[name] = tqdm(total=total, desc=name, bar_format=form, leave=False, disable=None)
    bars[name].update(count - bars[name].n)


def _read(path: Path) -> NotebookNode:
    import nbformat

    return nbformat.read(path, as_version=4)
