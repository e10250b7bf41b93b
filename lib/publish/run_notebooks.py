"""Run the notebooks and publish them as a report: find them, plan, run in parallel, report.

`run_notebooks` is `python -m lib run`. `refresh_notebooks` and `clean_notebooks` are
`python -m lib notebooks refresh|clean`, which bring notebooks into the form that is committed.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import logging
import math
import multiprocessing
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import nbformat
import papermill
from nbclient import NotebookClient
from nbclient.output_widget import OutputWidget
from nbformat import NotebookNode
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm
from traitlets.config import Config

from lib.core.files import ROOT, claim_folder, folder_for_sockets, lock_folder, write_together
from lib.core.hardware import available_cpus
from lib.core.records import provenance
from lib.core.settings import check, check_fields, require
from lib.core.terminal import bar_size
from lib.lessons.guards import STRICT
from lib.lessons.notebook import workspace
from lib.publish.cells import clean, read_notebook, save_notebook, static_widgets
from lib.publish.kernels import KERNEL_ARGUMENTS, NO_TERMINAL, UTF8, connection

THREADS = "OMP_NUM_THREADS"
MARKS = {"done": "✓", "failed": "✗", "skipped": "–"}
# Ends the name of a new version beside a copy that the reader changed: 07_ddp.new.ipynb
NEW = ".new"


@dataclass(frozen=True)
class RunConfig:
    """Which notebooks to run, and with which parameters."""

    notebooks: tuple[str, ...] = ()
    """Numbers (`01`) or names (`01_tokenizer`); default: all."""

    parameters: str | None = None
    """A YAML file of parameters, or the name of one in `notebooks/parameters/`."""

    report: Path | None = None
    """Folder for the pages: new, empty or a report (default: `artifacts/report`)."""

    workers: int | None = None
    """Notebooks to run at a time (default: one per two cores; two if there are only two cores).
    Those that report timings always run alone."""

    def __post_init__(self) -> None:
        check_fields(self)
        check(self, "workers", self.workers is None or self.workers > 0, "at least 1")


def run_notebooks(config: RunConfig, *, root: Path = ROOT) -> int:
    """Run notebooks in parallel processes and write them as web pages with a front page.

    A notebook whose parameters cell says `# needs: 01` runs after 01 if both are run, and is
    skipped if 01 failed; all others go on. One that says `# runs alone` runs beside no other. The
    report as it was before is kept in `previous/`. A file of parameters maps a notebook's name to a
    mapping of its parameters.

    Returns:
        The exit code: 0, or 1 if a notebook failed.

    Raises:
        ValueError: there is no such notebook, parameter file or parameter, or the report would
            replace other files.
    """
    from lib.publish.front_page import REPORT

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
    from lib.publish import front_page
    from lib.publish.pages import short_title, write_page

    names, chosen = [path.stem for path in every], {job.name for job in jobs}
    before = front_page.published(report, names)
    for name, what in front_page.damaged(report, names).items():
        again = "" if name in chosen else f"; make run NOTEBOOKS={name[:2]} writes it again"
        print(f"{name} in {report} is damaged and left out ({what}){again}", file=sys.stderr)
    front_page.keep_earlier_run(report, names)
    pages = {path.stem: path for path in every if path.stem in chosen or path.stem in before}
    titles = {name: short_title(read_notebook(path), name) for name, path in pages.items()}

    # run and report
    cores = available_cpus()
    run = Run(report, config.parameters or "", _now(), titles)
    try:
        results = run_all(jobs, run, config.workers or min(cores, max(2, cores // 2)))
        # pages of earlier runs may link to the new ones now
        for name in set(before) - chosen if chosen - set(before) else ():
            executed, folder = read_notebook(report / f"{name}.ipynb"), pages[name].parent
            write_page(executed, report / f"{name}.html", source_folder=folder, titles=titles)
    finally:
        for name in chosen:
            _unfinished(report, name).unlink(missing_ok=True)
        # interrupted before the first page, a run leaves none at all
        done = front_page.published(report, names)
        index = front_page.write_front_page(report, names, root=root) if done else None
    for result in results:
        if result.traceback:
            print(f"\n{result.name} failed:\n{_plain(result.traceback)}", file=sys.stderr)
    print(f"\nReport: {index}")
    return int(any(result.status != "done" for result in results))


def find_notebooks(selection: Sequence[str], root: Path, name: str = "notebooks") -> list[Path]:
    """Return the numbered notebooks in reading order, or only those that `selection` names.

    They are in the folder called `name` of the workbook at `root`.
    """
    known = sorted((root / name).glob("[0-9][0-9]_*.ipynb"))
    known = [path for path in known if not path.stem.endswith(NEW)]
    if not known:
        raise ValueError(f"no notebook is named like 01_topic.ipynb in {root / name}")
    chosen = set()
    for wanted in selection:
        stem = Path(wanted).name.removesuffix(".ipynb")
        found = {
            path for path in known if stem in (path.stem, path.stem[:2], path.stem[:2].lstrip("0"))
        }
        if not found:
            names = _known(path.stem for path in known)
            raise ValueError(f"no notebook is called {wanted!r}; {names}")
        chosen |= found
    return [path for path in known if path in chosen or not selection]


@dataclass(frozen=True)
class Job:
    """One notebook to run."""

    source: Path
    parameters: dict[str, Any]

    needs: tuple[str, ...]
    """Names of the notebooks whose results it reads."""

    runs_alone: bool = False
    """Whether no other notebook may run beside it, because its numbers are timings."""

    @property
    def name(self) -> str:
        return self.source.stem


def plan(notebooks: Sequence[Path], parameters: str | os.PathLike | None, root: Path) -> list[Job]:
    """Return what to run with which parameters (see `run_notebooks`), with every name checked."""
    known = {path.stem: path for path in find_notebooks((), root)}
    sections = read_parameters(parameters, root) if parameters else {}
    for name, values in sections.items():
        if name not in known:
            raise ValueError(f"{parameters}: no notebook is called {name!r}; {_known(known)}")
        has = parameter_names(known[name])
        for unknown in sorted(values.keys() - has):
            raise ValueError(f"{parameters}: {name} has no parameter {unknown!r}; {_known(has)}")
    return [
        Job(
            path,
            sections.get(path.stem, {}),
            _needed_by(path, list(known)),
            bool(re.search(r"^# runs alone\b", _parameters_cell(path), re.MULTILINE)),
        )
        for path in notebooks
    ]


def _known(names: Iterable[str]) -> str:
    return f"there are: {', '.join(sorted(names)) or 'none'}"


def read_parameters(name: str | os.PathLike, root: Path) -> dict[str, dict[str, Any]]:
    """Return the parameter file called `name`, or at that path: notebook name -> parameters.

    Raises:
        ValueError: there is no such file, or it has another form.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML's own takes the last of two equal names."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            names = [key.value for key, _ in node.value]
            twice = sorted({str(name) for name in names if names.count(name) > 1})
            require(not twice, f"each name must be there once, got twice: {', '.join(twice)}")
            return super().construct_mapping(node, deep=deep)

    folder = root / "notebooks/parameters"
    path = Path(name) if str(name).endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file():
        names = sorted(file.stem for file in folder.glob("*.yaml"))
        raise ValueError(f"no parameter file is called {str(name)!r}; {_known(names)}")
    try:
        sections = yaml.load(path.read_text(encoding="utf-8-sig"), Loader) or {}
        require(isinstance(sections, dict), "must map notebook names to parameters")
        for section, values in sections.items():
            right = f"{section} must be a mapping of parameters, got {values!r}"
            require(isinstance(values, dict), right)
            _check_values(values, str(section))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    return sections


def _check_values(value: Any, name: str) -> None:
    """Check that a parameter is a value that both Python's source and JSON can express.

    Raises:
        ValueError: it is not, such as a date or a set of YAML's; the message has its `name`.
    """
    if isinstance(value, dict):
        for key, each in value.items():
            require(isinstance(key, str), f"{name} must have names in quotes, got {key!r}")
            _check_values(each, f"{name}.{key}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            _check_values(each, f"{name}[{index}]")
    else:
        is_plain = value is None or type(value) in (str, bool, int)
        is_plain |= type(value) is float and math.isfinite(value)
        right = "text (in quotes), a finite number, true, false, null, a list or a mapping"
        require(is_plain, f"{name} must be {right}, got {value!r}")


def parameter_names(notebook: Path) -> set[str]:
    """Return the names that the notebook's cell tagged `parameters` assigns.

    Raises:
        ValueError: that cell is not Python.
    """
    try:
        nodes = ast.walk(ast.parse(_parameters_cell(notebook)))
    except (SyntaxError, ValueError) as error:
        reason = f"its cell tagged `parameters` must be Python: {error}"
        raise ValueError(f"{notebook}: {reason}") from error
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _needed_by(notebook: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Return the notebooks that a line `# needs: 01, 02` in the parameters cell lists."""
    found = re.search(r"^# needs: *(.+)$", _parameters_cell(notebook), re.MULTILINE)
    needed = []
    for wanted in re.findall(r"\w+", found[1]) if found else []:
        matches = [name for name in names if wanted in (name, name[:2])]
        # a lower number only, so that no two can wait for each other
        if not matches or matches[0] >= notebook.stem:
            earlier = [name for name in names if name < notebook.stem]
            raise ValueError(f"{notebook.name}: needs {wanted!r}; earlier ones: {_known(earlier)}")
        needed += matches
    return tuple(needed)


def _parameters_cell(notebook: Path) -> str:
    cells = read_notebook(notebook).cells
    return next((c.source for c in cells if "parameters" in (c.metadata.get("tags") or [])), "")


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


def run_all(jobs: Sequence[Job], run: Run, workers: int) -> list[Result]:
    """Run each job after those it needs, `workers` at a time, with a progress bar for each."""
    chosen, waiting = {job.name for job in jobs}, list(jobs)
    running: dict[Future, Job] = {}
    results: dict[str, Result] = {}
    executed: set[str] = set()
    bars: dict[str, Any] = {}
    workers = max(1, min(workers, sum(not job.runs_alone for job in jobs)))
    # fresh processes: papermill changes the working folder, and a fork would copy threads
    context = multiprocessing.get_context("spawn")
    # Ctrl-C ends them without a word from the start, while they still import what they need
    quiet: dict = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_DFL)}
    pool = None
    # in a folder whose name is short enough for a socket
    address = (
        f"{folder_for_sockets()}/notebooks-{secrets.token_hex(8)}" if os.name == "posix" else None
    )
    with SyncManager(address, ctx=context) as manager, contextlib.ExitStack() as pools:
        events = manager.Queue()
        while waiting or running:
            # skip jobs that need a failed one, and start those that can start
            failed = {name for name, result in results.items() if result.status != "done"}
            for job in [job for job in waiting if failed.intersection(job.needs)]:
                waiting.remove(job)
                results[job.name] = _skip(job, failed, run)
            # writing its page takes a second, in which the next one only starts and imports
            busy = [job for job in running.values() if job.name not in executed]
            # one that had to wait for a process would still start after Ctrl-C
            while len(running) < workers and (
                job := next_job(waiting, busy, chosen - results.keys(), workers)
            ):
                waiting.remove(job)
                pool = pool or pools.enter_context(ProcessPoolExecutor(workers, context, **quiet))
                # more threads than cores slow all of them down
                shared = workers > 1 and not job.runs_alone
                threads = max(1, available_cpus() // workers) if shared else None
                running[pool.submit(_run_in_pool, job, run, events, threads)] = job
                busy.append(job)

            # show progress, and collect those that have ended
            ended, _ = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
            while not events.empty():
                name, count, total = events.get()
                if count is None:
                    executed.add(name)
                else:
                    _update_bar(bars, name, count, total)
            for future in ended:
                job = running.pop(future)
                if job.name in bars:
                    bars.pop(job.name).close()
                if error := future.exception():
                    # its process died, and the others of its pool with it
                    pool = None if isinstance(error, BrokenProcessPool) else pool
                    text = f"{type(error).__name__}: {error}"
                    results[job.name] = Result(job.name, "failed", error=text, traceback=text)
                    results[job.name] = _published(results[job.name], job.source, job, run)
                else:
                    results[job.name] = future.result()
                _print_result(results[job.name])
    return [results[job.name] for job in jobs]


def _skip(job: Job, failed: set[str], run: Run) -> Result:
    lost = next(name for name in job.needs if name in failed)
    result = Result(job.name, "skipped", error=f"needs {lost}, which failed")
    result = _published(result, job.source, job, run)
    _print_result(result)
    return result


def next_job(
    waiting: Sequence[Job], running: Iterable[Job], unfinished: set[str], workers: int
) -> Job | None:
    """Return the job to start now: the first that may run beside those running, or None.

    Jobs that run alone come last, when nothing else is running.
    """
    running = list(running)
    if len(running) >= workers or any(job.runs_alone for job in running):
        return None
    ready = [job for job in waiting if unfinished.isdisjoint(job.needs)]
    shared = [job for job in ready if not job.runs_alone]
    alone = [job for job in ready if job.runs_alone and not running]
    return next(iter([*shared, *alone]), None)


def _run_in_pool(job: Job, run: Run, events: Any, threads: int | None) -> Result:
    """`run_one` in a process of its own, which Ctrl-C ends in order, its kernel too."""

    def end(*_: Any) -> None:
        # asyncio would tell of the kernel that dies with it
        logging.disable()
        sys.exit(130)

    signal.signal(signal.SIGINT, end)
    return run_one(job, run, events, threads)


def run_one(job: Job, run: Run, events: Any, threads: int | None) -> Result:
    """Run one notebook in its own folder, and write it and its page into the report.

    Args:
        events: a queue for (name, cells done, cells), with None once only its page is missing.
        threads: see `execute`.
    """
    started, reached, total = time.monotonic(), 0, len(read_notebook(job.source).cells)
    # until it is done, the pages of an earlier run stay
    executed = _unfinished(run.report, job.name)
    executed.unlink(missing_ok=True)

    def on_cell(count: int) -> None:
        nonlocal reached
        reached = count
        events.put((job.name, count, total))

    on_cell(0)
    try:
        try:
            execute(job.source, executed, job.parameters, on_cell, threads)
            result = Result(job.name, "done", time.monotonic() - started)
        except PapermillExecutionError as error:
            text = f"In [{error.exec_count}]: {error.ename}: {error.evalue}"
            lines = "\n".join(error.traceback)
            result = Result(job.name, "failed", time.monotonic() - started, text, lines)
        except Exception as error:  # a kernel that died or did not start, a disk that is full
            text = f"{type(error).__name__} after cell {reached} of {total}: {error}"
            result = Result(job.name, "failed", time.monotonic() - started, text, text)
        events.put((job.name, None, total))
        return _published(result, executed if executed.exists() else job.source, job, run)
    finally:
        # also after Ctrl-C
        executed.unlink(missing_ok=True)


def _unfinished(report: Path, name: str) -> Path:
    """The notebook as executed, until its page is written."""
    return report / f".{name}.ipynb"


def execute(
    source: Path,
    output: Path | None,
    parameters: Mapping[str, Any] | None = None,
    on_cell: Callable[[int], None] | None = None,
    threads: int | None = None,
    strict: bool = False,
) -> NotebookNode:
    """Run the notebook at `source` in its own folder with papermill; return it executed.

    Args:
        output: where the executed notebook is written, also where a cell failed.
        parameters: names from its cell tagged `parameters` -> values.
        on_cell: called with the number of cells done.
        threads: of PyTorch's operators, unless the environment says; default: the notebook decides.
        strict: whether each sentence that the notebook guards must hold.

    Raises:
        papermill.PapermillExecutionError: a cell failed; `output` has its traceback.
        RuntimeError: the kernel did not start, or died.
    """
    return papermill.execute_notebook(
        source,
        output,
        parameters,
        cwd=source.parent,
        engine_name="workbook",
        kernel_name="python3",
        progress_bar=False,
        on_cell=on_cell or (lambda count: None),
        env=({THREADS: str(threads)} if threads else {})
        | os.environ
        | UTF8
        | ({STRICT: "1"} if strict else {}),
    )


def run_past_errors(source: Path, environment: Mapping[str, str]) -> NotebookNode:
    """Run the notebook at `source` in its own folder, to its end even where cells fail.

    Args:
        environment: variables that the kernel gets beside those of this process.

    Returns:
        The executed notebook; nothing is written.
    """
    client = NotebookClient(
        read_notebook(source),
        kernel_name="python3",
        allow_errors=True,
        resources={"metadata": {"path": str(source.parent)}},
        extra_arguments=KERNEL_ARGUMENTS,
        config=Config(KernelManager=connection()),
    )
    client.widget_registry["@jupyter-widgets/output"]["OutputModel"] = _OneWayOutput
    # one line per notebook that it runs
    client.log.setLevel(logging.WARNING)
    return client.execute(env=os.environ | UTF8 | dict(environment), **NO_TERMINAL)


class _OneWayOutput(OutputWidget):
    """Collects what an `Output` widget shows without sending it back to the kernel.

    nbclient sends it over the socket on which it waits for the cell's end. Now and then that
    swallows the wake-up, and it waits for ever (seen with nbclient 0.11, pyzmq 27, ipykernel 7).
    """

    def send(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Engine(Engine):
    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, *, on_cell, env, **_):
        client = PapermillNotebookClient(
            nb_man,
            kernel_name=kernel_name,
            extra_arguments=KERNEL_ARGUMENTS,
            config=Config(KernelManager=connection()),
            on_cell_executed=lambda cell, cell_index, **_: on_cell(cell_index + 1),
        )
        client.widget_registry["@jupyter-widgets/output"]["OutputModel"] = _OneWayOutput
        # papermill would write the whole notebook twice for each cell; it does so at the end, too
        path, nb_man.output_path = nb_man.output_path, None
        try:
            return client.execute(env=env, **NO_TERMINAL)
        finally:
            nb_man.output_path = path


papermill_engines.register("workbook", _Engine)
# five lines for each notebook that it runs
logging.getLogger("papermill").setLevel(logging.WARNING)


def _published(result: Result, notebook: Path, job: Job, run: Run) -> Result:
    """`publish`; if that fails, so has the notebook, and its page is that of `job.source`."""
    for each in dict.fromkeys((notebook, job.source)):
        try:
            publish(result, each, job, run)
            return result
        except Exception as error:
            text = f"its page cannot be written: {type(error).__name__}: {error}"
            error_text = "; ".join(filter(None, (result.error, text)))
            result = dataclasses.replace(
                result, status="failed", error=error_text, traceback=traceback.format_exc()
            )
    return result


def publish(result: Result, notebook: Path, job: Job, run: Run) -> None:
    """Write `notebook` with a note of how it ended, and its page, into the report: both or none."""
    from lib.publish.links import copy_into_report
    from lib.publish.pages import render_page

    content, target = read_notebook(notebook), run.report / f"{job.name}.ipynb"
    root = job.source.parent.parent
    records = [copy_into_report(path, root, run.report) for path in _records_of(content, root)]
    content.metadata["workbook"] = {
        "status": result.status,
        "seconds": round(result.seconds, 3),
        "error": result.error,
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


def _update_bar(bars: dict[str, Any], name: str, count: int, total: int) -> None:
    if name not in bars:
        form = "    {desc:<24} {bar:20} {n_fmt:>3} of {total_fmt} cells  {elapsed}"
        # disable=None: no bars in a log, where the lines of `_print_result` are enough
        options = bar_size() | {"leave": False, "disable": None}
        bars[name] = tqdm(total=total, desc=name, bar_format=form, **options)
    bars[name].update(count - bars[name].n)


def _plain(text: str) -> str:
    """Return `text` without terminal colors where nobody sees them."""
    return text if sys.stderr.isatty() else re.sub(r"\x1b\[[0-9;]*m", "", text)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def refresh_notebooks(notebooks: Sequence[str] = (), *, root: Path = ROOT) -> int:
    """Run notebooks one after another and store their outputs in them, as they are committed.

    Returns the exit code; a notebook that fails, or that says what its outputs do not show
    (`lib.lessons.guards`), is left as it was.
    """
    failed = 0
    for path in find_notebooks(notebooks, root):
        started = time.monotonic()
        try:
            executed = execute(path, None, strict=True)
        except (PapermillExecutionError, RuntimeError) as error:
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
