"""The first cell finds the workbook however a notebook is run; runs, report and storing hold."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_notebook, new_output

from lib import notebook
from lib.notebook import FIRST_CELL
from lib.notebook_cells import clean, static_widgets
from lib.notebook_kernel import execute
from lib.site import mathml, mathml_errors, page_link, write_page

ROOT = Path(__file__).resolve().parent.parent

# One cell that leaves behind which `lib` it got, and where results would go.
PROBE = """\
import os
from pathlib import Path
report = [lib.__file__, os.getcwd(), lib.notebook.workspace()]
Path({marker!r}).write_text("\\n".join(map(str, report)))
"""


@pytest.fixture
def book(tmp_path) -> Path:
    """A copy of the workbook without notebooks."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "lib", tmp_path / "book/lib", ignore=ignored)
    (tmp_path / "book/notebooks").mkdir()
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "book"


def jupyterlab(path: Path, elsewhere: Path) -> None:
    """As JupyterLab does: a kernel whose working folder is the notebook's."""
    from nbclient import NotebookClient

    content = nbformat.read(path, as_version=4)
    NotebookClient(content, resources={"metadata": {"path": str(path.parent)}}).execute()


def papermill(path: Path, elsewhere: Path) -> list:
    return ["papermill", path, elsewhere / "out.ipynb", "--cwd", path.parent]


def nbval(path: Path, elsewhere: Path) -> list:
    return ["pytest", "--nbval-lax", "--nbval-current-env", "-p", "no:cacheprovider", path]


def nbconvert(path: Path, elsewhere: Path) -> list:
    output = ["--output-dir", elsewhere]
    return ["nbconvert", "--execute", "--to", "html", path, *output]


@pytest.mark.parametrize("way", [jupyterlab, papermill, nbval, nbconvert])
def test_first_cell_finds_lib(way, book, tmp_path, make_notebook, quiet_environment):
    marker = tmp_path / "marker.txt"
    path = make_notebook(book / "notebooks/01_probe.ipynb", "", PROBE.format(marker=str(marker)))
    command = way(path, tmp_path / "elsewhere")
    if command is not None:
        run_module(command, tmp_path / "elsewhere", quiet_environment)
    library, folder, workspace = marker.read_text().splitlines()
    assert Path(library) == book / "lib/__init__.py"
    assert Path(folder) == book / "notebooks"
    assert Path(workspace) == book


def test_first_cell_finds_lib_in_a_read_only_bundle(
    book, tmp_path, make_notebook, quiet_environment
):
    """As on Kaggle: the bundle is mounted read-only, the notebook runs in another folder.

    /kaggle/input itself cannot be made on every machine, so the cell's name for it is replaced.
    """
    read_only = read_only_shell(book)
    (tmp_path / "input/owner").mkdir(parents=True)
    first = FIRST_CELL.replace("/kaggle/input", str(tmp_path / "input"))
    assert first != FIRST_CELL
    elsewhere, marker = tmp_path / "elsewhere", tmp_path / "marker.txt"
    probe = PROBE.format(marker=str(marker))
    path = make_notebook(elsewhere / "01_probe.ipynb", "", probe, first=first)
    (tmp_path / "input/owner/bundle").symlink_to(book)
    run_module(
        ["papermill", path, elsewhere / "out.ipynb"], elsewhere, quiet_environment, read_only
    )
    library, folder, workspace = marker.read_text().splitlines()
    assert Path(library).resolve() == book / "lib/__init__.py"
    assert Path(folder) == Path(workspace) == elsewhere
    assert not list(book.rglob("__pycache__"))


def run_module(command: list, folder: Path, environment: dict, shell: tuple = ()) -> None:
    words = [*shell, sys.executable, "-m", *map(str, command)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def read_only_shell(folder: Path) -> tuple[str, ...]:
    """The beginning of a command for which `folder` is mounted read-only.

    Where mounts are not allowed, the folder's write permission is taken away instead, which does
    not bind root.
    """
    script = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    shell = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, str(folder))
    if (
        shutil.which("unshare")
        and not subprocess.run([*shell, "true"], capture_output=True).returncode
    ):
        return shell
    if os.geteuid() == 0:
        pytest.skip("root, and no mount namespaces: nothing can be made read-only")
    for path in [folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    return ()


def test_first_cell_says_what_to_do_when_there_is_no_workbook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="give papermill --cwd"):
        exec(FIRST_CELL, {})


@pytest.mark.parametrize(("value", "is_small"), [(None, False), ("0", False), ("1", True)])
def test_small_is_what_the_environment_says(monkeypatch, value, is_small):
    monkeypatch.delenv("WORKBOOK_SMALL", raising=False)
    if value is not None:
        monkeypatch.setenv("WORKBOOK_SMALL", value)
    assert notebook.small() is is_small


RUN = """\
import sys
from pathlib import Path
from lib.notebook import run_notebooks
root = Path(sys.argv[1])
settings = {"parameters": root / "settings.yaml", "overrides": {"ratio": 10}}
sys.exit(run_notebooks(root=root, report=root / "report", **settings))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory, make_notebook) -> tuple[int, Path, str]:
    """The exit code, folder and terminal output of one run of notebooks good and bad."""
    root = tmp_path_factory.mktemp("book")

    def make(name: str, *cells: str) -> None:
        make_notebook(root / f"notebooks/{name}.ipynb", *cells, first="1")

    slider = "import ipywidgets\nipywidgets.interact(lambda n: print('square', n * n), n=(0, 8));"
    formulas = "%md Inline $x^2$, [next](02_bad.ipynb).\n\n$$\\frac{a}{b}$$"
    folded = "%md <details>\n<summary>Hint</summary>\n\nHidden words.\n\n</details>"
    cells = (formulas, folded, slider, "open('made', 'w').write(str(steps))")
    make("01_good", "steps = 3", *cells)
    make("02_bad", "", "1 / 0", "print('never')")
    make("03_after_good", "# needs: 01\nratio = 2", "int(open('made').read()) * ratio")
    make("04_after_bad", "# needs: 02", "print('never')")
    make("05_dead", "", "import os\nos._exit(1)")
    (root / "settings.yaml").write_text("01_good: {steps: 7}\n")
    command = [sys.executable, "-c", RUN, str(root)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, root / "report", done.stdout + done.stderr


def page(report: tuple, name: str) -> str:
    return (report[1] / f"{name}.html").read_text()


def test_a_failed_notebook_makes_the_exit_code_1_and_others_finish(report):
    code, folder, output = report
    assert code == 1
    for name, mark in {"01_good": "✓", "02_bad": "✗", "03_after_good": "✓", "05_dead": "✗"}.items():
        assert f"{mark} {name}" in output
    assert "In [2]: ZeroDivisionError: division by zero" in output
    assert "----> 1 1 / 0" in output
    assert f"Report: {folder / 'index.html'}" in output


def test_a_notebook_waits_for_what_it_needs_and_is_skipped_without_it(report):
    assert "– 04_after_bad" in report[2]
    assert "needs 02_bad, which failed" in page(report, "index")
    # 7 comes from the parameter file through 01, 10 from the override
    assert ">70<" in re.sub(r"\s", "", page(report, "03_after_good"))


def test_the_index_names_each_notebook_its_state_and_its_error(report):
    index = page(report, "index")
    states = re.findall(r'class="status (\w+)"', index)
    assert states == ["done", "failed", "done", "skipped", "failed"]
    assert "5 notebooks · 2 done · 2 failed · 1 not run" in index
    assert "ZeroDivisionError: division by zero" in index
    assert "DeadKernelError" in index
    for href in re.findall(r'href="([^"]+)"', index):
        assert (report[1] / href).is_file()


def test_pages_hold_everything_and_no_script(report):
    for path in report[1].glob("*.html"):
        text = path.read_text()
        assert "<script" not in text
        assert not re.search(r'(?:src|href)="(?:https?:)?//|url\(["\']?https?:|@import', text)
    good = page(report, "01_good")
    assert good.count("<math") == 2
    assert "n: 4" in good
    assert "square 16" in good
    assert 'href="02_bad.html"' in good


def test_pictures_on_a_page_have_a_text(make_notebook, book, tmp_path, monkeypatch):
    # as where nobody names one: a kernel shows what a cell has drawn
    monkeypatch.delenv("MPLBACKEND", raising=False)
    draw = (
        "import matplotlib.pyplot as plt\n"
        "plt.plot([1, 2], label='\"a\"')\n"
        "plt.gca().set(title='Speed', xlabel='size', ylabel='time')\n"
        "plt.legend();"
    )
    # another shown by hand, a picture that is no figure, and a figure without anything
    others = (
        "figure, axes = plt.subplots()\naxes.set(title='Once more', xlabel='x', ylabel='y')\n"
        "display(figure)\nplt.close()",
        "import io\nfrom IPython.display import Image\nfile = io.BytesIO()\n"
        "figure.savefig(file, format='png')\nImage(file.getvalue(), alt='By hand')",
        "plt.figure();",
    )
    path = make_notebook(book / "notebooks/01_figure.ipynb", "", draw, *others)
    executed = execute(path, None)
    write_page(executed, tmp_path / "page.html", source_folder=path.parent)
    page = BeautifulSoup((tmp_path / "page.html").read_text(), "html.parser")
    alts = [image["alt"] for image in page.find_all("img")]
    assert alts == ['Speed: time against size, for "a".', "Once more: y against x.", "By hand"]
    metadata = executed.cells[3].outputs[-1].metadata["image/png"]
    assert (metadata["alt"], metadata["width"]) == (alts[0], 711)


def test_a_failed_page_shows_its_error_first(report):
    bad = page(report, "02_bad")
    assert bad.index("In [2]: ZeroDivisionError") < bad.index("<main>")
    assert "never" not in re.sub(r"<[^>]+>", "", bad).split("division by zero")[0]


def test_pages_open_from_disk_in_light_and_dark(report, browser):
    backgrounds = {}
    for scheme in ("light", "dark"):
        context = browser.new_context(offline=True, color_scheme=scheme)
        for name in ("index", "01_good"):
            tab, requests, messages = context.new_page(), [], []
            tab.on("request", lambda request, found=requests: found.append(request.url))
            tab.on("console", lambda message, found=messages: found.append(message.text))
            tab.goto((report[1] / f"{name}.html").as_uri())
            assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
            assert messages == []
            color = tab.evaluate("getComputedStyle(document.body).backgroundColor")
            backgrounds[name, scheme] = sum(map(int, re.findall(r"\d+", color)[:3]))
        assert tab.locator("math").first.bounding_box()["width"] > 5
        assert tab.get_by_text("Hint").is_visible()
        assert not tab.get_by_text("Hidden words.").is_visible()
        context.close()
    for name in ("index", "01_good"):
        assert backgrounds[name, "dark"] < 150 < 600 < backgrounds[name, "light"]


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
    assert notebook.refresh_notebooks(root=tmp_path) == 1
    assert "02_bad failed and is left as it was" in capsys.readouterr().out
    assert bad.read_bytes() == before
    stored = nbformat.read(good, as_version=4)
    nbformat.validate(stored)
    counts = [cell.execution_count for cell in stored.cells if cell.cell_type == "code"]
    assert counts == [1, 2, 3, 4]
    assert stored.cells[3].outputs[0].data["text/plain"].startswith("loop: 100%  2/2 [")
    assert stored.cells[4].outputs[0].data["text/plain"] == "4"
    assert stored == clean(stored)


def test_output_widgets_do_not_talk_back_to_the_kernel(tmp_path, make_notebook):
    """The kernel sees no outputs; a run whose client sends them can wait for ever."""
    cells = [
        "import ipywidgets\nout = ipywidgets.Output()\nwith out:\n    print('inside')\nout",
        "print(len(out.outputs))",
    ]
    path = make_notebook(tmp_path / "01_x.ipynb", "steps = 3", *cells, first="1")
    executed = static_widgets(execute(path, None))
    assert executed.cells[3].outputs[0].text == "inside\n"
    assert executed.cells[4].outputs[0].text == "0\n"


def test_text_printed_piece_by_piece_is_one_block_on_a_page():
    pieces = [new_output("stream", text=text) for text in ("Once ", "upon ", "a time")]
    notebook = new_notebook(cells=[new_code_cell("tell()", outputs=pieces)])
    (output,) = static_widgets(notebook).cells[0].outputs
    assert output.text == "Once upon a time"
    assert len(notebook.cells[0].outputs) == 3


def test_clean_joins_streams_and_keeps_the_last_state_of_a_line():
    pieces = ["10%\r", "50%\r", "100%\n", "do", "ne\n", "a\r\nb\n"]
    streams = [new_output("stream", name="stderr", text=text) for text in pieces]
    cell = new_code_cell("train()", outputs=[*streams, new_output("stream", text="end")])
    cell.metadata.update({"tags": ["nbval-skip"], "execution": {"shell": "now"}})
    cleaned = clean(new_notebook(cells=[cell], metadata={"papermill": {}, "widgets": {}}))
    assert [output.text for output in cleaned.cells[0].outputs] == ["100%\ndone\na\r\nb\n", "end"]
    assert cleaned.cells[0].metadata == {"tags": ["nbval-skip"]}
    assert set(cleaned.metadata) == {"kernelspec", "language_info"}


def test_a_widget_without_saved_state_keeps_its_text_form():
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "x"}, "text/plain": "Slider()"}
    cell = new_code_cell("slider", outputs=[new_output("display_data", view)])
    (output,) = static_widgets(new_notebook(cells=[cell])).cells[0].outputs
    assert output.data["text/plain"] == "Slider()"
    assert "application/vnd.jupyter.widget-view+json" not in output.data


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("02_model.ipynb#loss", "02_model.html#loss"),
        ("../lib/tokenizer.py", "../../lib/tokenizer.py"),
        ("#top", "#top"),
        ("https://example.org/a.ipynb", "https://example.org/a.ipynb"),
    ],
)
def test_links_lead_to_pages_and_files(url, expected):
    assert page_link(url, Path("/book/notebooks"), Path("/book/artifacts/report")) == expected


def test_a_formula_without_mathml_is_shown_as_source_and_found_by_lint():
    assert "<math" in mathml(r"\frac{a}{b}")
    assert r"\nothing" in mathml(r"\nothing{a}")
    assert "<math" not in mathml(r"\nothing{a}")
    ((formula, reason),) = mathml_errors(r"Good $a_1$, bad $\nothing{a}$, a price of 5\$.")
    assert formula == r"\nothing{a}"
    assert "nothing" in reason
