"""Notebooks run beside or after one another, and are reported; outputs are stored."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup

from lib.core.hardware import available_cpus
from lib.tools.publish.cells import clean
from lib.tools.publish.plan import Job, NotebooksConfig
from lib.tools.publish.run_notebooks import (
    THREADS,
    Result,
    RunConfig,
    refresh_notebooks,
    run_all,
    run_notebooks,
)

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"notebooks": ["07"]}, "no notebook is called '07'; there are: 01_one, 02_two"),
        ({"parameters": "gpu"}, "no parameter file is called 'gpu'; there are: bad"),
        ({"parameters": "bad"}, "01_one has no parameter 'step'; there are: size, steps"),
    ],
)
def test_unknown_names_are_refused_before_anything_runs(shelf, arguments, message):
    (shelf / "notebooks/parameters/bad.yaml").write_text("01_one:\n  step: 4\n")
    with pytest.raises(ValueError, match=message):
        run_notebooks(RunConfig(**arguments), root=shelf)
    assert not (shelf / "artifacts").exists()


BROKEN_PICTURE = """\
from IPython.display import display
display({"image/png": "bm8gcGljdHVyZQ=="}, raw=True)"""


def test_a_page_that_cannot_be_written_fails_the_run_and_no_other_page(
    tmp_path, make_notebook, capsys
):
    for name, cell in {"01_good": "1", "02_bad": BROKEN_PICTURE}.items():
        make_notebook(tmp_path / f"notebooks/{name}.ipynb", "steps = 3", cell, first="1")
    assert run_notebooks(RunConfig(report=tmp_path / "report"), root=tmp_path) == 1
    said = "02_bad: its page cannot be written: UnidentifiedImageError"
    assert said in capsys.readouterr().err
    assert [a.text.strip() for a in page(tmp_path, "index").select(".number")] == ["01"]


@pytest.fixture
def run_as(monkeypatch):
    """Run jobs by calling a function with each; return their names and how they ended."""

    def results(run_cells, *jobs: Job, kept=lambda *_: None) -> list:
        monkeypatch.setattr("lib.tools.publish.run_notebooks.run_cells", run_cells)
        monkeypatch.setattr("lib.tools.publish.run_notebooks.read_notebook", lambda path: {})
        monkeypatch.setattr("lib.tools.publish.run_notebooks.keep", kept)
        return [(found.name, found.status) for found in run_all(jobs, Path(), "", 2)]

    return results


def job(name, alone=False):
    return Job(Path(f"{name}.ipynb"), {}, runs_alone=alone)


def test_one_that_runs_alone_starts_when_all_others_have_finished(run_as):
    running, most = [], {}

    def run_cells(job, threads, clients):
        running.append(job.name)
        most[job.name] = len(running)
        time.sleep(0.1)
        most[job.name] = max(most[job.name], len(running))
        running.remove(job.name)
        return Result(job.name, "done"), {}

    jobs = job("a", alone=True), job("b"), job("c"), job("d", alone=True)
    names = [name for name, _ in run_as(run_cells, *jobs)]
    assert names == list("abcd")
    assert max(most["b"], most["c"]) == 2
    assert [most[name] for name in "ad"] == [1, 1]


def test_ctrl_c_ends_what_runs_and_starts_nothing_else(run_as, monkeypatch):
    ran, killed = [], threading.Event()
    # whoever runs ends when it is killed, which is after all others were called off
    monkeypatch.setattr("lib.tools.publish.run_notebooks.kill", lambda client: killed.set())

    def run_cells(job, threads, clients):
        ran.append(job.name)
        if job.name != "a":
            clients.add(job.name)
            assert killed.wait(120)
        return Result(job.name, "done"), {}

    jobs = [job(name) for name in "abcd"] + [job("e", alone=True)]
    with pytest.raises(KeyboardInterrupt):
        run_as(run_cells, *jobs, kept=lambda *_: signal.raise_signal(signal.SIGINT))
    assert not {"d", "e"} & set(ran)


RUN = """\
import sys
from pathlib import Path
from lib import __main__ as command_line
from lib.tools.publish import run_notebooks as runs

root = Path(sys.argv[1])
run = runs.run_notebooks
def run_there(config: runs.RunConfig):
    return run(config, root=root)
runs.run_notebooks = run_there
sys.exit(command_line.main(["run", "--report", str(root / "report")]))
"""


@pytest.mark.skipif(os.name != "posix", reason="sends a signal to a group of processes")
def test_ctrl_c_ends_all_kernels_and_what_they_started_and_keeps_finished_pages(
    tmp_path, make_notebook
):
    endless = (
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "open('pids.new', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "os.rename('pids.new', 'pids')\n"
        "time.sleep(600)"
    )
    make_notebook(tmp_path / "notebooks/01_done.ipynb", "", "1", first="1")
    make_notebook(tmp_path / "notebooks/02_long.ipynb", "# runs alone", endless, first="1")
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)
    pids, kept = tmp_path / "notebooks/pids", tmp_path / "report/01_done.ipynb"
    # the second notebook is in its endless cell, and the first one is kept
    while not (pids.exists() and kept.exists()) and process.poll() is None:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130, output
    assert "stopped; finished pages are in the report" in output
    assert "Traceback" not in output
    for pid in map(int, pids.read_text().split()):
        # gone, or dead and waiting to be collected
        status = Path(f"/proc/{pid}/status")
        assert not status.exists() or "Z (zombie)" in status.read_text()
    pages = {"01_done.html", "01_done.ipynb", "index.html", "report.js", "search.js"}
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert names == pages | {".workbook", ".lock"}


@pytest.fixture(scope="module")
def done(tmp_path_factory, make_notebook) -> tuple[int, str, Path]:
    """Exit code, output and folder of one run of notebooks good and bad."""
    root = tmp_path_factory.mktemp("book")

    def make(name: str, *cells: str) -> None:
        make_notebook(root / f"notebooks/{name}.ipynb", *cells, first="1")

    slider = "import ipywidgets\nipywidgets.interact(lambda n: print('square', n * n), n=(0, 8));"
    links = "%md [next](02_bad.ipynb), [code](../lib/x.py), [later](06_later.ipynb)"
    read = "name = 'records.jsonl'"
    threads = f"import os\nprint('threads', os.environ.get({THREADS!r}))"
    stray = "import os\nos.system('echo from a child; echo error of a child >&2');"
    reached = (
        "import ipykernel\nprint('by', ipykernel.get_connection_info(unpack=True)['transport'])"
    )
    make("01_good", "steps = 3", links, slider, read, threads, "f'{steps} steps'", stray, reached)
    make("02_bad", "", "1 / 0", "print('never')")
    make("03_alone", "# runs alone", threads)
    make("05_dead", "", "import os\nos._exit(1)")
    make("06_later", "", "1")
    for path in ("lib/x.py", "artifacts/records.jsonl", "artifacts/others.csv"):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text("")
    (root / "settings.yaml").write_text("01_good: {steps: 7}\n")
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        # as if nobody had set it
        patch.delenv(THREADS, raising=False)
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, text)
        return run(root, "1", "2", "3", "5"), text.getvalue(), root


def run(root: Path, *names: str) -> int:
    sizes = str(root / "settings.yaml")
    return run_notebooks(RunConfig(names, sizes, root / "report", workers=2), root=root)


def page(root: Path, name: str) -> BeautifulSoup:
    return BeautifulSoup((root / f"report/{name}.html").read_text(), "html.parser")


def about(root: Path, name: str) -> dict:
    return nbformat.read(root / f"report/{name}.ipynb", as_version=4).metadata["workbook"]


def test_a_failed_notebook_makes_the_exit_code_1_and_others_finish(done):
    code, output, root = done
    assert code == 1
    for line in ("✓ 01_good", "✗ 02_bad", "✓ 03_alone", "✗ 05_dead"):
        assert line in output
    assert "In [2]: ZeroDivisionError: division by zero" in output
    assert "----> 1 1 / 0" in output
    assert f"Report: {root / 'report/index.html'}" in output
    index = page(root, "index")
    states = [found["class"][1] for found in index.select(".status")]
    assert states == ["done", "failed", "done", "failed"]
    assert "DeadKernelError" in index.text


def test_one_that_runs_alone_comes_last_with_all_cores_which_the_others_share(done):
    _, _, root = done
    finished = {name: about(root, name)["finished"] for name in ("01_good", "02_bad", "05_dead")}
    assert about(root, "03_alone")["finished"] >= max(finished.values())
    # and has all cores, which the others share
    assert "threads None" in page(root, "03_alone").text
    assert f"threads {max(1, available_cpus() // 2)}" in page(root, "01_good").text


def test_a_page_shows_widgets_links_records_and_its_error(done):
    _, _, root = done
    good = page(root, "01_good")
    assert "n: 4" in good.text
    # as the parameter file says
    assert "7 steps" in good.text
    assert "square 16" in good.text
    links = {a.text: a["href"] for a in good.select(".jp-Cell p a")}
    assert links == {"next": "02_bad.html", "code": "workbook/lib/x.py.html"}
    # which is only named, with what to do
    assert "later (not in this report)" in good.text
    assert good.select_one("main p span[title]")["title"] == "make run NOTEBOOKS=06 adds it"
    assert about(root, "01_good")["records"] == ["workbook/artifacts/records.jsonl"]
    bad = page(root, "02_bad")
    (top,) = bad.select(".report-error")
    assert top.text.strip() == "In [2]: ZeroDivisionError: division by zero"
    assert bad.find(id=top.a["href"].removeprefix("#"))


def test_kernels_are_reached_through_files_and_what_their_children_print_is_on_the_page(done):
    _, output, root = done
    # ports may be taken before a kernel starts
    assert "by ipc" in page(root, "01_good").text
    for text in ("from a child", "error of a child"):
        assert text in page(root, "01_good").text
        assert text not in output


def test_two_runs_into_one_report_come_one_after_the_other(shelf, monkeypatch, caplog):
    order = []

    def run(*_):
        order.append("starts")
        time.sleep(0.3)
        order.append("ends")
        return []

    monkeypatch.setattr("lib.tools.publish.run_notebooks.run_all", run)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run_notebooks, RunConfig(), root=shelf) for _ in range(2)]
        assert [future.result() for future in runs] == [0, 0]
    assert order == ["starts", "ends"] * 2
    assert "waiting for another process that writes to" in caplog.text


@pytest.mark.parametrize("folder", ["new/../work", "notebooks", "mine"])
def test_a_report_never_goes_where_the_readers_files_are(shelf, folder):
    # to work/ not even before the first copies
    (shelf / "mine").mkdir()
    (shelf / "mine/thesis.tex").write_text("an answer")
    before = {path: path.read_bytes() for path in shelf.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="report must be"):
        run_notebooks(RunConfig(("01",), report=shelf / folder), root=shelf)
    assert before == {path: path.read_bytes() for path in shelf.rglob("*") if path.is_file()}


def test_a_later_run_keeps_other_pages_and_links_them_to_its_own(done):
    _, _, root = done
    assert run(root, "06") == 0
    assert "5 notebooks" in page(root, "index").text
    assert {a.text for a in page(root, "01_good").select(".jp-Cell p a")} == {
        "next",
        "code",
        "later",
    }


def test_refresh_stores_outputs_and_leaves_a_failing_notebook(tmp_path, make_notebook, capsys):
    good = make_notebook(
        tmp_path / "notebooks/01_good.ipynb",
        "steps = 3",
        "from tqdm.auto import tqdm\nfor _ in tqdm(range(2), desc='loop'):\n    pass",
        "steps + 1",
        first="1",
    )
    bad = make_notebook(tmp_path / "notebooks/02_bad.ipynb", "steps = 3", "1 / 0", first="1")
    before = bad.read_bytes()
    assert refresh_notebooks(NotebooksConfig(), root=tmp_path) == 1
    assert "02_bad failed and is left as it was" in capsys.readouterr().out
    assert bad.read_bytes() == before
    stored = nbformat.read(good, as_version=4)
    nbformat.validate(stored)
    counts = [cell.execution_count for cell in stored.cells if cell.cell_type == "code"]
    assert counts == [1, 2, 3, 4]
    assert stored.cells[3].outputs[0].data["text/plain"].startswith("loop: 100%  2/2 [")
    assert stored.cells[4].outputs[0].data["text/plain"] == "4"
    assert stored == clean(stored)
