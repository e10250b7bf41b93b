"""In a browser: a notebook runs in JupyterLab and its slider moves a figure; the report is whole.

Each test leaves a picture of what it saw in artifacts/screenshots.
"""

import json
import os
import queue
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

from lib.notebook_cells import clean

ROOT = Path(__file__).resolve().parent.parent
SCREENSHOTS = ROOT / "artifacts/screenshots"

pytestmark = pytest.mark.browser


@dataclass
class View:
    """An open tab, and what its page says and asks for."""

    name: str
    tab: object
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def screenshot(self, suffix: str = "") -> Path:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{self.name.replace('/', '_')}{suffix}.png"
        self.tab.screenshot(path=path)
        return path

    def evidence(self) -> str:
        """What the page looks like and has said, for the report of a failed test."""
        lines = self.console or ["nothing on the console"]
        return "\n".join([f"picture: {self.screenshot('_failed')}", *lines])


@contextmanager
def opened(browser, name: str, **options) -> Iterator[View]:
    """A view without a page, in a window of its own."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000}, **options)
    context.set_default_timeout(60_000)
    view = View(name, context.new_page())
    view.tab.on("console", lambda said: view.console.append(f"{said.type}: {said.text}"))
    view.tab.on("pageerror", lambda error: view.console.append(f"error: {error}"))
    view.tab.on("request", lambda request: view.requests.append(request.url))
    yield view
    context.close()


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    """A copy of the workbook, with the notebook that is opened as if it had never been run."""
    book, source = tmp_path_factory.mktemp("book"), ROOT / "notebooks/02_model.ipynb"
    for folder in ("lib", "artifacts"):
        remade = ("__pycache__", "runs", "report", "profile", "kaggle", "screenshots", ".*.lock")
        shutil.copytree(ROOT / folder, book / folder, ignore=shutil.ignore_patterns(*remade))
    notebook = clean(nbformat.read(source, as_version=4))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    (book / "notebooks").mkdir()
    nbformat.write(notebook, book / "notebooks/02_model.ipynb")
    return book


@pytest.fixture
def jupyterlab(book, tmp_path, quiet_environment) -> Iterator[str]:
    """JupyterLab on a free port, with settings of its own; yields the address of the notebook."""
    folders = {f"JUPYTER_{name}_DIR": tmp_path / name for name in ("CONFIG", "DATA", "RUNTIME")}
    folders |= {f"JUPYTERLAB_{n}_DIR": tmp_path / n for n in ("SETTINGS", "WORKSPACES")}
    folders["IPYTHONDIR"] = tmp_path / "ipython"
    environment = quiet_environment | {name: str(path) for name, path in folders.items()}
    environment |= {"JUPYTER_NO_CONFIG": "1", "WORKBOOK_SMALL": "1", "OMP_NUM_THREADS": "1"}
    # an Agg backend, which other tests want, would keep figures out of the notebook
    environment.pop("MPLBACKEND", None)
    settings = tmp_path / "SETTINGS/@jupyterlab/notebook-extension/tracker.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    # cells out of sight stay in the page, in each version of JupyterLab
    settings.write_text('{"windowingMode": "none"}')
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--ServerApp.root_dir={book}"]
    command += ["--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    log = tmp_path / "server.txt"
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        address = server_address(server, tmp_path / "RUNTIME", log)
        yield address.format("lab/tree/notebooks/02_model.ipynb")
    finally:
        server.terminate()
        server.wait(60)


def server_address(server: subprocess.Popen, folder: Path, log: Path) -> str:
    """Where the server answers, with its token, once it does; `{}` stands for the page."""
    deadline = time.monotonic() + 120
    while server.poll() is None and time.monotonic() < deadline:
        for path in folder.glob("jpserver-*.json"):
            if text := path.read_text():
                about = json.loads(text)
                return f"{about['url']}{{}}?token={about['token']}"
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab does not start:\n{log.read_text()}")


@pytest.fixture
def view(browser, jupyterlab) -> Iterator[View]:
    with opened(browser, "lab") as view:
        view.tab.goto(jupyterlab)
        yield view


KERNEL_IS_IDLE = """
() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === "idle"
"""
CODE = """
const code = jupyterapp.shell.currentWidget.content.widgets.map(w => w.model)
  .filter(model => model.type === "code");
const outputs = code.flatMap(
  model => Array.from({length: model.outputs.length}, (_, i) => model.outputs.get(i)));
const errors = outputs.filter(output => output.type === "error").map(output => output.toJSON());
"""
HAS_RUN = f"() => {{ {CODE} return errors.length || code.every(model => model.executionCount) }}"
ERRORS = f"() => {{ {CODE} return errors.map(error => `${{error.ename}}: ${{error.evalue}}`) }}"


def test_a_notebook_runs_in_jupyterlab_and_arrow_keys_move_its_figure(view):
    from playwright.sync_api import expect

    tab = view.tab
    tab.wait_for_function(KERNEL_IS_IDLE)
    tab.get_by_role("menuitem", name="Run", exact=True).click()
    tab.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    # generous: other tests may be using the processor
    tab.wait_for_function(HAS_RUN, timeout=300_000, polling=250)
    tab.wait_for_function(KERNEL_IS_IDLE)
    assert tab.evaluate(ERRORS) == []

    cell = tab.locator(".jp-CodeCell").filter(has=tab.get_by_role("slider")).first
    slider, figure = cell.get_by_role("slider"), cell.locator("img:visible")
    expect(figure).to_have_count(1)
    cell.locator(".jp-InputPrompt").click()
    tab.keyboard.press("Tab")
    expect(slider).to_be_focused()
    first = figure.get_attribute("src")
    assert figure.evaluate("image => image.naturalWidth") > 300
    view.screenshot("_before")
    tab.keyboard.press("ArrowRight")
    expect(figure).not_to_have_attribute("src", first)
    assert figure.evaluate("image => image.decode().then(() => image.naturalWidth)") > 300
    view.screenshot("_after")
    tab.keyboard.press("ArrowLeft")
    expect(figure).to_have_attribute("src", first)
    here = re.match(r"http://[^/]+/", tab.url)[0]
    assert [url for url in view.requests if not url.startswith((here, "data:", "blob:"))] == []
