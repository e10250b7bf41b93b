"""Run the notebooks and publish them as a report, in parallel; store outputs as committed.

`run_notebooks` is `python -m lib run`. `refresh_notebooks` and `clean_notebooks` are
`python -m lib notebooks refresh|clean`, which bring notebooks into the form that is committed.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import re
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from tqdm import tqdm

from lib.core.files import ROOT, claim_folder, lock_folder, write_together
from lib.core.hardware import available_cpus
from lib.core.records import provenance
from lib.core.settings import PositiveInt, require, settings
from lib.core.terminal import bar_size
from lib.lessons.guards import STRICT
from lib.lessons.notebook import workspace
from lib.tools.publish.cells import clean, read_notebook, save_notebook, static_widgets
from lib.tools.publish.execute import execute, insert_parameters, kill
from lib.tools.publish.plan import ALL, Job, NotebooksConfig, find_notebooks, next_job, plan

THREADS = "OMP_NUM_THREADS"
MARKS = {"done": "✓", "failed": "✗", "skipped": "–"}
BAR = "    {desc:<24} {bar:20} {n_fmt:>3} of {total_fmt} cells  {elapsed}<{remaining}"


@settings
class RunConfig:
    """Which notebooks to run, and with which parameters."""

    notebooks: tuple[str, ...] = ()
    """Numbers (`01`) or names (`01_tokenizer`); default: all."""

    parameters: str | None = None
    """A YAML file of parameters, or the name of one in `notebooks/parameters/`."""

    report: Path | None = None
    """Folder for the pages: new, empty or a report (default: `artifacts/report`)."""

    workers: PositiveInt | None = None
    """Notebooks to run at a time (default: one per two cores; two if there are only two cores).
    Those that report timings always run alone."""


def run_notebooks(config: RunConfig, *, root: Path = ROOT) -> int:
    """Run notebooks in parallel and write them as web pages with a front page.

    A notebook whose parameters cell says `# needs: 01` runs after 01 if both are run, and is
    skipped if 01 failed; all others go on. One that says `# runs alone` runs beside no other. Pages
    of notebooks that are not run stay. A file of parameters maps a notebook's name to a mapping of
    its parameters.

    Returns:
        The exit code: 0, or 1 if a notebook failed.

    Raises:
        ValueError: there is no such notebook, parameter file or parameter, or the report would
            replace other files.
    """
    from lib.tools.publish.front_page import REPORT

    default = (workspace(root) / "artifacts/report").resolve()
    report = (config.report or default).resolve()
    every = find_notebooks((), root)
    jobs = plan(find_notebooks(config.notebooks, root), config.parameters, root)
    is_work = report == (root / "work").resolve()
    require(not is_work, "report must be elsewhere than work/, which has your copies")
    claim_folder(report, REPORT, setting="report", is_ours=report == default)
    # two runs at a time would remove each other's notebooks
    with lock_folder(report):
        return _run_into(report, jobs, every, config, root)


def _run_into(
    report: Path, jobs: Sequence[Job], every: Sequence[Path], config: RunConfig, root: Path
) -> int:
    """Run `jobs` and write their pages among those of `every` notebook; return the exit code."""
    from lib.tools.publish.front_page import published, write_front_page
    from lib.tools.publish.pages import short_title, write_page

    names, chosen = [path.stem for path in every], {job.name for job in jobs}
    before = published(report, names, told=True)
    pages = {path.stem: path for path in every if path.stem in chosen or path.stem in before}
    titles = {name: short_title(read_notebook(path), name) for name, path in pages.items()}
    cores = available_cpus()
    run = Run(report, config.parameters or "", _now(), titles)
    try:
        results = run_all(jobs, run, config.workers or min(cores, max(2, cores // 2)))
        # pages of earlier runs may link to the new ones now
        for name in set(before) - chosen if chosen - set(before) else ():
            executed, folder = read_notebook(report / f"{name}.ipynb"), pages[name].parent
            write_page(executed, report / f"{name}.html", source_folder=folder, titles=titles)
    finally:
        # interrupted before the first page, a run leaves none at all
        if published(report, names):
            write_front_page(report, names, root=root)
    for result in results:
        if result.traceback:
            print(f"\n{result.name} failed:\n{_plain(result.traceback)}", file=sys.stderr)
    print(f"\nReport: {report / 'index.html'}")
    return int(any(result.status != "done" for result in results))


@dataclass(frozen=True)
class Run:
    """Settings shared by all notebooks of a run."""

    report: Path
    """Folder for the executed notebooks and their pages."""

    parameters: str
    """Name of the parameter file, for the pages."""

    started: str
    """Start in UTC."""

    titles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name -> title of each page that the report will have, in reading order."""


@dataclass(frozen=True)
class Result:
    """How a notebook ended; `status` is done, failed or skipped."""

    name: str
    status: str
    seconds: float = 0.0
    error: str | None = None
    traceback: str | None = None
    cell: str | None = None
    """The id of the cell that failed."""


def run_all(jobs: Sequence[Job], run: Run, workers: int) -> list[Result]:
    """Run each job after those it needs, `workers` at a time, with a progress bar for each."""
    chosen, waiting = {job.name for job in jobs}, list(jobs)
    results: dict[str, Result] = {}
    workers = max(1, min(workers, sum(not job.runs_alone for job in jobs)))
    started = _Started(run)
    try:
        while waiting or started.threads:
            failed = {name for name, result in results.items() if result.status != "done"}
            lost = next((job for job in waiting if failed.intersection(job.needs)), None)
            if lost:
                waiting.remove(lost)
                cause = next(name for name in lost.needs if name in failed)
                result = Result(lost.name, "skipped", error=f"needs {cause}, which failed")
                results[lost.name] = _published(result, read_notebook(lost.source), lost, run)
                _print_result(results[lost.name])
                continue
            while job := next_job(
                waiting, started.executing.values(), chosen - results.keys(), workers
            ):
                waiting.remove(job)
                # more threads than cores slow all of them down
                is_shared = workers > 1 and not job.runs_alone
                started.start(job, max(1, available_cpus() // workers) if is_shared else None)
            if result := started.wait():
                results[result.name] = result
                _print_result(result)
    except BaseException:
        started.stop()
        raise
    return [results[job.name] for job in jobs]


class _Started:
    """Notebooks being run, a thread and a kernel for each; the kernels do the work.

    After its cells, a notebook's page is written: a second in which the next one can start.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.threads: dict[str, threading.Thread] = {}
        self.executing: dict[str, Job] = {}
        self.events: queue.Queue[tuple[str, Result | None]] = queue.Queue()
        self.clients: set[NotebookClient] = set()
        self.is_stopped = False

    def start(self, job: Job, threads: int | None) -> None:
        """Start a notebook whose operators get as many `threads`."""
        # daemons: Python does not wait for them at its end
        thread = threading.Thread(target=self._run, args=(job, threads), daemon=True)
        self.threads[job.name], self.executing[job.name] = thread, job
        thread.start()

    def wait(self) -> Result | None:
        """Wait a moment for a notebook to get on; return the result of one that has ended."""
        try:
            # on Windows, Ctrl-C ends no wait without a limit
            name, result = self.events.get(timeout=0.5)
        except queue.Empty:
            return None
        self.executing.pop(name, None)
        if result:
            self.threads.pop(name)
        return result

    def stop(self) -> None:
        """End all kernels; what is being written is finished, and nothing else is begun."""
        self.is_stopped = True
        for client in list(self.clients):
            kill(client)
        for name, thread in self.threads.items():
            if name not in self.executing:
                thread.join()

    def _run(self, job: Job, threads: int | None) -> None:
        try:
            result, notebook = run_cells(job, threads, self.clients)
            self.events.put((job.name, None))
            if not self.is_stopped:
                result = _published(result, notebook, job, self.run)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            result = Result(job.name, "failed", 0.0, text, traceback.format_exc())
        self.events.put((job.name, result))


def run_cells(
    job: Job, threads: int | None, clients: set[NotebookClient]
) -> tuple[Result, NotebookNode]:
    """Run the cells of a notebook in its folder; return how it ended, and the notebook."""
    notebook = read_notebook(job.source)
    if job.parameters:
        lines = (f"{name} = {value!r}" for name, value in job.parameters.items())
        insert_parameters(notebook, "\n".join(("# Parameters", *lines)))
    started, total = time.monotonic(), len(notebook.cells)
    environment = {THREADS: str(threads)} if threads and THREADS not in os.environ else {}
    # disable=None: no bars in a log, where the lines of `_print_result` are enough
    options = bar_size() | {"leave": False, "disable": None}
    with tqdm(total=total, desc=job.name, bar_format=BAR, **options) as bar:
        reached = 0

        def on_cell(count: int) -> None:
            nonlocal reached
            reached = count
            bar.update(count - bar.n)

        try:
            execute(
                notebook,
                job.source.parent,
                environment=environment,
                on_cell=on_cell,
                clients=clients,
            )
            return Result(job.name, "done", time.monotonic() - started), notebook
        except CellExecutionError as error:
            # of several, the others are meant to
            cell, output = [found for cell in notebook.cells if (found := _error(cell))][-1]
            text = f"In [{cell.execution_count}]: {error.ename}: {error.evalue}"
            lines = "\n".join(output.traceback)
            seconds = time.monotonic() - started
            return Result(job.name, "failed", seconds, text, lines, cell.get("id")), notebook
        except Exception as error:  # a kernel that died or did not start, a disk that is full
            text = f"{type(error).__name__} after cell {reached} of {total}: {error}"
    return Result(job.name, "failed", time.monotonic() - started, text, text), notebook


def _error(cell: NotebookNode) -> tuple[NotebookNode, NotebookNode] | None:
    """Return the cell with its error; None if it has none."""
    outputs = cell.get("outputs", ())
    return next(((cell, output) for output in outputs if output.output_type == "error"), None)


def _published(result: Result, notebook: NotebookNode, job: Job, run: Run) -> Result:
    """`publish`; if that fails, so has the notebook, and its page is that of `job.source`."""
    for content in (notebook, read_notebook(job.source)):
        try:
            publish(result, content, job, run)
            return result
        except Exception as error:
            text = f"its page cannot be written: {type(error).__name__}: {error}"
            text = "; ".join(filter(None, (result.error, text)))
            lines = traceback.format_exc()
            result = dataclasses.replace(result, status="failed", error=text, traceback=lines)
    return result


def publish(result: Result, content: NotebookNode, job: Job, run: Run) -> None:
    """Write the notebook `content` with a note of how it ended, and its page: both or none."""
    from lib.tools.publish.links import copy_into_report
    from lib.tools.publish.pages import render_page

    root, target = job.source.parent.parent, run.report / f"{job.name}.ipynb"
    records = [copy_into_report(path, root, run.report) for path in _records_of(content, root)]
    content.metadata["workbook"] = {
        "status": result.status,
        "seconds": round(result.seconds, 3),
        "error": result.error,
        "cell": result.cell,
        "parameters": run.parameters,
        "run": run.started,
        "finished": _now(),
        "provenance": provenance(config=job.parameters) | _graphics_cards(),
        "records": records,
    }
    page = render_page(content, job.name, source_folder=job.source.parent, titles=run.titles)
    write_together({target.with_suffix(".html"): page, target: nbformat.writes(content) + "\n"})


def _records_of(notebook: NotebookNode, root: Path) -> list[Path]:
    """Return the committed records and tables that the notebook's code names."""
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    words = set(re.findall(r"\w+", code))
    files = sorted((root / "artifacts").glob("*.*"))
    return [path for path in files if path.suffix in (".csv", ".jsonl") and path.stem in words]


def _graphics_cards() -> dict[str, str]:
    """Return the GPUs' names from NVIDIA's driver: asking torch would occupy their memory."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    counts = Counter(listed.stdout.split("\n")[:-1])
    return {"device": ", ".join(f"{count} × {name}" for name, count in counts.items())}


def _print_result(result: Result) -> None:
    note = f"  {result.error}" if result.error else ""
    tqdm.write(f"  {MARKS[result.status]} {result.name:<24} {result.seconds:6.1f} s{note}")
    sys.stdout.flush()


def _plain(text: str) -> str:
    """Return `text` without terminal colors where nobody sees them."""
    return text if sys.stderr.isatty() else re.sub(r"\x1b\[[0-9;]*m", "", text)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def refresh_notebooks(config: NotebooksConfig = ALL, *, root: Path = ROOT) -> int:
    """Run notebooks one after another and store their outputs in them, as they are committed.

    Returns the exit code; a notebook that fails, or that says what its outputs do not show
    (`lib.lessons.guards`), is left as it was.
    """
    failed = 0
    for path in find_notebooks(config.notebooks, root):
        started = time.monotonic()
        try:
            executed = execute(read_notebook(path), path.parent, environment={STRICT: "1"})
        except (CellExecutionError, RuntimeError) as error:
            print(f"{path.stem} failed and is left as it was:\n{_plain(str(error))}")
            failed = 1
            continue
        save_notebook(path, clean(static_widgets(executed)))
        print(f"{path.stem}: outputs stored after {time.monotonic() - started:.1f} s", flush=True)
    return failed


def clean_notebooks(root: Path = ROOT) -> int:
    """Bring the notebooks' metadata into the form that is committed, without running them."""
    for path in find_notebooks((), root):
        notebook = read_notebook(path)
        cleaned = clean(notebook)
        if cleaned != notebook:
            save_notebook(path, cleaned)
            print(f"{path.stem}: metadata cleaned")
    return 0
