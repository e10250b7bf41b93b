"""Run the notebooks and publish them as a report, in parallel; store outputs as committed.

`run_notebooks` is `python -m lib run`. `refresh_notebooks` and `clean_notebooks` are
`python -m lib notebooks refresh|clean`, which bring notebooks into the form that is committed.
"""

from __future__ import annotations

import concurrent.futures as futures
import contextlib
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Generator, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from tqdm import tqdm

from lib.core.files import ROOT, claim_folder, lock_folder
from lib.core.hardware import available_cpus, output_of
from lib.core.records import provenance
from lib.core.settings import PositiveInt, require, settings
from lib.core.terminal import bar_size
from lib.lessons.guards import STRICT
from lib.lessons.notebook import workspace
from lib.tools.publish.cells import clean, read_notebook, save_notebook, static_widgets
from lib.tools.publish.execute import execute, insert_parameters, kill
from lib.tools.publish.plan import Job, NotebooksConfig, find_notebooks, plan

Ended = Generator[tuple["Job", "Result", NotebookNode], None, None]
THREADS = "OMP_NUM_THREADS"
MARKS = {"done": "✓", "failed": "✗"}
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

    If one fails, the others go on. One whose parameters cell says `# runs alone` runs beside no
    other. Pages of notebooks that are not run stay. A file of parameters maps a notebook's name to
    a mapping of its parameters.

    Returns:
        The exit code: 0, or 1 if a notebook failed.

    Raises:
        ValueError: there is no such notebook, parameter file or parameter, or the report would
            replace other files.
    """
    from lib.tools.publish.front_page import REPORT

    default = (workspace(root) / "artifacts/report").resolve()
    report = (config.report or default).resolve()
    jobs = plan(find_notebooks(config.notebooks, root), config.parameters, root)
    names = [path.stem for path in find_notebooks((), root)]
    is_work = report == (root / "work").resolve()
    require(not is_work, "report must be elsewhere than work/, which has your copies")
    claim_folder(report, REPORT, setting="report", is_ours=report == default)
    cores = available_cpus()
    workers = config.workers or min(cores, max(2, cores // 2))
    # two runs at a time would remove each other's notebooks
    with lock_folder(report):
        try:
            results = run_all(jobs, report, config.parameters or "", workers)
        finally:
            # also of a run that was interrupted
            is_whole = write_pages(report, names, {job.name for job in jobs}, root)
    for result in results:
        if result.traceback:
            print(f"\n{result.name} failed:\n{_plain(result.traceback)}", file=sys.stderr)
    print(f"\nReport: {report / 'index.html'}")
    return int(not is_whole or any(result.status != "done" for result in results))


def write_pages(report: Path, names: Sequence[str], ran: Set[str], root: Path) -> bool:
    """Write the pages of the notebooks `ran`, and the front page over all of `names` in `report`.

    Where a page is new, all are written, since they link to one another. Returns whether each could
    be written.
    """
    from lib.tools.publish.front_page import write_front_page
    from lib.tools.publish.pages import short_title, write_page

    names = [name for name in names if (report / f"{name}.ipynb").exists()]
    found = {name: read_notebook(report / f"{name}.ipynb") for name in names}
    titles = {name: short_title(notebook, name) for name, notebook in found.items()}
    is_new = any(not (report / f"{name}.html").exists() for name in names)
    broken = set()
    for name in names if is_new else ran & {*names}:
        page = report / f"{name}.html"
        try:
            write_page(found[name], page, source_folder=root / "notebooks", titles=titles)
        except Exception as error:
            traceback.print_exc()
            text = f"its page cannot be written: {type(error).__name__}: {error}"
            print(f"{name}: {text}", file=sys.stderr)
            broken.add(name)
    if names:
        write_front_page(report, [name for name in names if name not in broken], root=root)
    return not broken


@dataclass(frozen=True)
class Result:
    """How a notebook ended; `status` is done or failed."""

    name: str
    status: str
    seconds: float = 0.0
    error: str | None = None
    traceback: str | None = None
    cell: str | None = None
    """The id of the cell that failed."""


def run_all(jobs: Sequence[Job], report: Path, parameters: str, workers: int) -> list[Result]:
    """Run jobs, `workers` at a time, keep each in `report`, and print how it ended."""
    results: dict[str, Result] = {}
    with contextlib.closing(executed(jobs, workers)) as ended:
        for job, result, notebook in ended:
            keep(result, notebook, job, report, parameters)
            results[job.name] = result
            note = f"  {result.error}" if result.error else ""
            tqdm.write(f"  {MARKS[result.status]} {result.name:<24} {result.seconds:6.1f} s{note}")
            sys.stdout.flush()
    return [results[job.name] for job in jobs]


def executed(jobs: Sequence[Job], workers: int) -> Ended:
    """Yield each job with how it ended and its notebook, as soon as its cells have run.

    A thread for each, since their kernels do the work. Those that run alone come last.
    """
    shared = [job for job in jobs if not job.runs_alone]
    alone = [job for job in jobs if job.runs_alone]
    clients: set[NotebookClient] = set()
    for group, most in ((shared, workers), (alone, 1)):
        size = max(1, min(most, len(group)))
        # more threads than cores slow all of them down
        threads = max(1, available_cpus() // size) if size > 1 else None
        with futures.ThreadPoolExecutor(size) as pool:
            waiting = {pool.submit(run_cells, job, threads, clients): job for job in group}
            try:
                while waiting:
                    # on Windows, Ctrl-C ends no wait without a limit
                    for future in futures.wait(waiting, 0.5, futures.FIRST_COMPLETED).done:
                        yield waiting.pop(future), *future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                # some may only be starting their kernel
                while any(future.running() for future in waiting):
                    for client in list(clients):
                        kill(client)
                    time.sleep(0.1)


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
    # disable=None: no bars in a log, where a line for each notebook is enough
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


def keep(
    result: Result, notebook: NotebookNode, job: Job, report: Path, parameters: str = ""
) -> None:
    """Write `notebook` into `report` with a note of how it ended, and the records that it shows.

    Args:
        parameters: the name of the file that they are from, for the page.
    """
    from lib.tools.publish.links import copy_into_report

    root = job.source.parent.parent
    records = [copy_into_report(path, root, report) for path in _records_of(notebook, root)]
    gpus = output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    counts = Counter(gpus.splitlines() if gpus else ())
    # from NVIDIA's driver: asking torch would occupy their memory
    device = {"device": ", ".join(f"{n} × {name}" for name, n in counts.items())} if gpus else {}
    notebook.metadata["workbook"] = {
        "status": result.status,
        "seconds": round(result.seconds, 3),
        "error": result.error,
        "cell": result.cell,
        "parameters": parameters,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "provenance": provenance(config=job.parameters) | device,
        "records": records,
    }
    save_notebook(report / job.source.name, notebook)


def _records_of(notebook: NotebookNode, root: Path) -> list[Path]:
    """Return the committed records and tables that the notebook's code names."""
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    words = set(re.findall(r"\w+", code))
    files = sorted((root / "artifacts").glob("*.*"))
    return [path for path in files if path.suffix in (".csv", ".jsonl") and path.stem in words]


def _plain(text: str) -> str:
    """Return `text` without terminal colors where nobody sees them."""
    return text if sys.stderr.isatty() else re.sub(r"\x1b\[[0-9;]*m", "", text)


def refresh_notebooks(config: NotebooksConfig, *, root: Path = ROOT) -> int:
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
