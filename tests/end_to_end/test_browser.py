"""In a browser: a notebook runs in JupyterLab and its slider moves a figure; the report is whole.

A test that fails leaves a picture of what it saw in artifacts/screenshots.
"""

import functools
import json
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

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCREENSHOTS = ROOT / "artifacts/screenshots"

pytestmark = pytest.mark.browser


@dataclass
class View:
    """An open tab, and what its page says and asks for."""

    name: str
    tab: object
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def evidence(self) -> str:
        """What the page looks like and has said, for the report of a failed test."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{self.name.replace('/', '_')}.png"
        self.tab.screenshot(path=path)
        return "\n".join([f"picture: {path}", *(self.console or ["nothing on the console"])])


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
def book(tmp_path_factory, make_notebook) -> Path:
    """A workbook with a notebook of one picture and one slider, which has never been run.

    `make test` runs the cells of the real ones, without JupyterLab.
    """
    book = tmp_path_factory.mktemp("book")
    shutil.copytree(ROOT / "lib", book / "lib", ignore=shutil.ignore_patterns("__pycache__"))
    imports = "from lib.lessons.model import explorers\nfrom lib.lessons.show import show_drawing"
    cells = ('show_drawing("transformer")', "explorers.rope_slider()")
    make_notebook(book / "notebooks/99_slider.ipynb", imports, *cells)
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
        yield address.format("lab/tree/notebooks/99_slider.ipynb")
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
def lab(browser, jupyterlab) -> Iterator[View]:
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
VISIBLE = "[...cell.querySelectorAll('img')].find(image => image.offsetWidth)"
PICTURE = f"cell => {VISIBLE}?.src"
SIZE = (
    f"async cell => {{ const i = {VISIBLE}; await i.decode(); return [i.naturalWidth, i.height] }}"
)


def test_a_notebook_runs_in_jupyterlab_and_arrow_keys_move_its_figure(lab):
    tab = lab.tab
    tab.wait_for_function(KERNEL_IS_IDLE)
    tab.get_by_role("menuitem", name="Run", exact=True).click()
    tab.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    # generous: other tests may be using the processor
    tab.wait_for_function(HAS_RUN, timeout=300_000, polling=250)
    tab.wait_for_function(KERNEL_IS_IDLE)
    assert tab.evaluate(ERRORS) == []

    cell = tab.locator(".jp-CodeCell").filter(has=tab.get_by_role("slider")).first
    cell.locator(".jp-InputPrompt").click()
    # the buttons of the cell may come first
    for _ in range(10):
        tab.keyboard.press("Tab")
        if has_focus := cell.evaluate("c => c.querySelector('[role=slider]:focus') !== null"):
            break
    assert has_focus, "the Tab key does not reach the slider"
    first = cell.evaluate(PICTURE)
    changed = f"([cell, first]) => ![undefined, first].includes(({PICTURE})(cell))"
    tab.keyboard.press("ArrowRight")
    tab.wait_for_function(changed, arg=[cell.element_handle(), first])
    assert min(cell.evaluate(SIZE)) > 200
    assert "position 1" in cell.evaluate(f"cell => {VISIBLE}.alt")
    second = cell.evaluate(PICTURE)
    tab.keyboard.press("ArrowLeft")
    tab.wait_for_function(changed, arg=[cell.element_handle(), second])
    assert cell.evaluate(PICTURE) == first, "back at the start, another figure"
    here = re.match(r"http://[^/]+/", tab.url)[0]
    assert [url for url in lab.requests if not url.startswith((here, "data:", "blob:"))] == []


@pytest.fixture(scope="module")
def report(request, tmp_path_factory, make_notebook) -> Path:
    """A report: notebooks with the outputs that they are committed with, and one that is run."""
    from lib.tools.publish.cells import read_notebook
    from lib.tools.publish.execute import execute
    from lib.tools.publish.plan import Job
    from lib.tools.publish.run_notebooks import Result, keep, write_pages

    folder = tmp_path_factory.mktemp("report")
    own = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom lib.lessons.model import explorers"
    figures = ("%md $$\\frac{q \\cdot k}{\\sqrt{d}}$$", "explorers.rope_slider()")
    widgets = make_notebook(folder / "notebooks/99_widgets.ipynb", "steps = 3", *figures, first=own)
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = {NOTEBOOKS[0], *(one.params.get("page") for one in parameters if one)}
    sources = [ROOT / f"notebooks/{name}.ipynb" for name in NOTEBOOKS if name in wanted]
    names = [source.stem for source in (*sources, widgets)]
    pages = folder / "pages"
    for source in (*sources, widgets):
        notebook = read_notebook(source)
        if source == widgets:
            execute(notebook, folder)
        keep(Result(source.stem, "done", 1.0), notebook, Job(source, {}, ()), pages)
    assert write_pages(pages, names, {*names}, ROOT)
    # as it arrives by mail: alone, in another folder
    return pages.rename(folder / "mailed")


NOTEBOOKS = [path.stem for path in sorted(ROOT.glob("notebooks/*.ipynb"))]
DOCUMENTS = ["workbook/README.md", "workbook/artifacts/README.md", "workbook/lib/training/step.py"]
# Publishing all of them takes a quarter of a minute.
OTHERS = [
    pytest.param(name, marks=pytest.mark.slow) for name in NOTEBOOKS if name not in NOTEBOOKS[::3]
]
PAGES = ["index", *NOTEBOOKS[::3], *OTHERS, "99_widgets", *DOCUMENTS]


@pytest.fixture(scope="module", params=PAGES)
def page(request, browser, report) -> Iterator[View]:
    """Each page of the report, opened from disk without a network, all folds open."""
    with opened(browser, f"report_{request.param}", offline=True) as view:
        view.tab.goto((report / f"{request.param}.html").as_uri())
        view.tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        yield view


def test_a_page_asks_nothing_of_the_network_and_complains_of_nothing(page):
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
    assert page.console == []


def test_a_page_has_at_most_a_megabyte(page):
    path = Path(unquote(urlsplit(page.tab.url).path))
    assert path.stat().st_size <= 1e6


def test_every_picture_is_on_its_page_with_a_text(page):
    width = "image => image.decode().then(() => image.naturalWidth, error => 0)"
    widths = page.tab.evaluate(f"() => Promise.all([...document.images].map({width}))")
    assert min(widths, default=99) > 10
    assert page.tab.evaluate("[...document.images].filter(i => !i.alt).map(i => i.outerHTML)") == []


RAW_FORMULAS = """() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  while (walker.nextNode()) {
    const text = walker.currentNode;
    if (/\\$\\$|\\\\[a-z]+\\{/.test(text.data) && !text.parentElement.closest("pre, code, style"))
      found.push(text.data);
  }
  return found;
}"""


def test_formulas_are_set(page):
    assert page.tab.evaluate(RAW_FORMULAS) == []
    widths = "[...document.querySelectorAll('math')].map(m => m.getBoundingClientRect().width)"
    assert min(page.tab.evaluate(widths), default=99) > 3


def test_links_lead_somewhere_in_the_report(page, report):
    dead = []
    for address in page.tab.evaluate("[...document.querySelectorAll('a[href]')].map(a => a.href)"):
        parts = urlsplit(address)
        path = Path(unquote(parts.path))
        if parts.scheme != "file":
            assert parts.scheme == "https", address
            continue
        is_here = path.is_file() and path.is_relative_to(report)
        names = {parts.fragment, unquote(parts.fragment)}
        if not is_here or (parts.fragment and not names & ids_on(path)):
            dead.append(address)
    assert dead == []


@functools.cache
def ids_on(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r'\bid="([^"]+)"', path.read_text()))


# code with more lines on the screen than it has, or that cannot be moved into view
BROKEN_CODE = """() => [...document.querySelectorAll(
  ".jp-RenderedHTMLCommon pre, .jp-InputArea pre")].filter(pre => {
  const range = document.createRange();
  range.selectNodeContents(pre);
  const height = parseFloat(getComputedStyle(pre).lineHeight);
  const is_cut = pre.scrollWidth > pre.clientWidth && getComputedStyle(pre).overflowX !== "auto";
  const lines = pre.textContent.split("\\n").length;
  return is_cut || range.getBoundingClientRect().height > (lines + 0.5) * height;
}).map(pre => pre.textContent.slice(0, 60))"""


def test_on_a_phone_lines_of_code_stay_whole_and_the_page_as_wide_as_the_screen(page):
    wide = page.tab.viewport_size
    page.tab.set_viewport_size({"width": 390, "height": 844})
    try:
        assert page.tab.evaluate("document.documentElement.scrollWidth") == 390
        assert page.tab.evaluate(BROKEN_CODE) == []
    finally:
        page.tab.set_viewport_size(wide)


# text whose color is too close to what is behind it: the contrast of WCAG 2.2, from 1 to 21
FAINT = """() => {
  const channels = color => color.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= 10 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const color = channels(getComputedStyle(element).backgroundColor);
      if (color.length < 4 || color[3] > 0.5) return color;
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = new Map();
  while (walker.nextNode()) {
    const text = walker.currentNode, element = text.parentElement;
    if (!text.data.trim() || !element.getClientRects().length) continue;
    const color = getComputedStyle(element).color;
    const lights = [light(channels(color)), light(behind(element))];
    const contrast = (Math.max(...lights) + 0.05) / (Math.min(...lights) + 0.05);
    if (contrast < 4.5) found.set(color + behind(element), text.data.trim().slice(0, 60));
  }
  return [...found];
}"""


def test_search_finds_a_section_of_another_page_and_the_contents_mark_where_one_is(browser, report):
    with opened(browser, "report_search", offline=True) as view:
        view.tab.goto((report / "99_widgets.html").as_uri())
        view.tab.keyboard.press("/")
        view.tab.keyboard.type("yourself test")
        view.tab.locator("search li a", has_text="Test yourself").first.click()
        assert f"{NOTEBOOKS[0]}.html#Test-yourself" in view.tab.url
        last = view.tab.locator("nav.contents a").last
        last.click()
        view.tab.locator("nav.contents [aria-current]", has_text=last.text_content()).wait_for()
        assert view.console == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(page, scheme):
    page.tab.emulate_media(color_scheme=scheme)
    assert page.tab.evaluate(FAINT) == []
