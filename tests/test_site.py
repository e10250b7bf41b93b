"""The report: what each run was like, files to download, links that lead somewhere, runs before."""

import base64
import csv
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from lib.notebook import KEY_FIGURES
from lib.notebook_kernel import execute
from lib.report import to_markdown
from lib.site import mathml, write_page
from lib.site_downloads import save_downloads, table_rows
from lib.site_history import KEPT_RUNS, earlier_runs, run_of, two_deeper, with_live_links
from lib.site_index import key_figures_of, write_index

ROOT = Path(__file__).resolve().parent.parent

RUN = """\
import sys
from pathlib import Path
from lib.notebook import run_notebooks
root = Path(sys.argv[1])
sys.exit(run_notebooks(sys.argv[2:], root=root, report=root / "report"))
"""
FIRST = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport lib.notebook\nlib.notebook.setup()"
TABLE = """\
from IPython.display import Markdown
Markdown("| size | speed |\\n|:--|--:|\\n| a\\\\|b | 1,234.5 |\\n| `c` | 12,34 |\\n")"""
FIGURE = """\
import matplotlib.pyplot as plt
plt.plot([1, 2])
plt.gca().set(title="Speed", xlabel="size", ylabel="time")
plt.show()"""


def run(root: Path, *names: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", RUN, str(root), *names]
    # as where nobody names one: a kernel shows what a cell has drawn
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def reports(tmp_path_factory, make_notebook) -> Path:
    """Two notebooks run, then the first changed and run alone."""
    root = tmp_path_factory.mktemp("book")
    (root / "lib").mkdir()
    (root / "lib/x.py").write_text("")

    def first(number: int) -> None:
        links = "%md [code](../lib/x.py), [next](02_bad.ipynb), "
        links += "[third](03_unrun.ipynb#2), [web](https://example.org)"
        told = f"lib.notebook.key_figures(tokens_per_s=12345.6, kernel='sdpa', run={number})"
        cells = ("", links, TABLE, FIGURE, told)
        make_notebook(root / "notebooks/01_good.ipynb", *cells, first=FIRST)

    first(1)
    told = "lib.notebook.key_figures(loss=1.5)"
    make_notebook(root / "notebooks/02_bad.ipynb", "", told, "1 / 0", first=FIRST)
    assert run(root).returncode == 1
    first(2)
    assert run(root, "01").returncode == 0
    return root / "report"


def soup(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


def entry(page: BeautifulSoup, number: str) -> BeautifulSoup:
    (found,) = [li for li in page.select("ol > li") if li.select_one(".number").text == number]
    return found


def figures(entry: BeautifulSoup) -> dict[str, str]:
    return {div.dt.text: div.dd.text for div in entry.select("dl.figures div")}


def test_key_figures_are_shown_and_kept_in_their_order(make_notebook, tmp_path):
    told = "lib.notebook.key_figures(tokens_per_s=12345.6, bits_per_byte=0.25312, device='x')"
    path = make_notebook(tmp_path / "01_x.ipynb", "", told, first=FIRST)
    nbformat.write(execute(path, None), path)
    executed = nbformat.read(path, as_version=4)
    (output,) = executed.cells[3].outputs
    expected = [("tokens/s", "12,346"), ("bits per byte", "0.253"), ("device", "x")]
    assert key_figures_of(executed) == expected
    assert output.data["text/plain"] == (
        "Key figures. tokens/s: 12,346 · bits per byte: 0.253 · device: x"
    )


def test_the_front_page_shows_status_time_device_and_key_figures(reports):
    page = soup(reports / "index.html")
    good, bad = entry(page, "01"), entry(page, "02")
    assert figures(good) == {"tokens/s": "12,346", "kernel": "sdpa", "run": "2"}
    # told before the error
    assert figures(bad) == {"loss": "1.50"}
    assert good.select_one(".status").text == "✓ done"
    assert bad.select_one(".status").text == "✗ failed"
    assert "In [3]: ZeroDivisionError: division by zero" in bad.pre.text
    about = nbformat.read(reports / "01_good.ipynb", as_version=4).metadata["workbook"]
    detail = good.select_one(".more").text
    assert detail.startswith(f"{about['seconds']:.1f} s · {about['provenance']['device']} · ")


def test_a_notebook_that_is_run_again_leaves_its_earlier_page(reports):
    (earlier,) = soup(reports / "index.html").select("h2 + ul > li")
    index = reports / earlier.a["href"]
    page = soup(index)
    assert figures(entry(page, "01"))["run"] == "1"
    assert entry(page, "01").a["href"] == "01_good.html"
    assert (index.parent / page.a["href"]).resolve() == reports / "index.html"
    assert not soup(reports / "index.html").find(string=re.compile("newest run"))


def test_an_earlier_run_tells_of_its_notebooks_that_were_not_run_again(reports):
    (earlier,) = soup(reports / "index.html").select("h2 + ul > li")
    assert "2 notebooks · 1 done · 1 failed · run again since: 01" in earlier.text
    bad = entry(soup(reports / earlier.a["href"]), "02")
    assert [a["href"] for a in bad.select("a")] == ["../../02_bad.html", "../../02_bad.ipynb"]


def test_a_failed_page_tells_its_error_once_on_top_and_where_it_happened(reports):
    page = soup(reports / "02_bad.html")
    (top,) = page.select(".report-error")
    assert top.text.strip() == "In [3]: ZeroDivisionError: division by zero"
    assert "An Exception was encountered" not in page.text
    assert page.find(id=top.a["href"].removeprefix("#"))


def test_an_error_outside_of_all_cells_leads_nowhere(tmp_path):
    notebook = new_notebook(cells=[new_markdown_cell("# One")])
    notebook.metadata["workbook"] = {"error": "needs <01>, which failed"}
    write_page(notebook, tmp_path / "02_x.html", source_folder=tmp_path)
    (top,) = soup(tmp_path / "02_x.html").select(".report-error")
    assert top.text.strip() == "needs <01>, which failed"
    assert not top.select("a")


def test_a_link_to_a_page_that_there_is_not_keeps_its_words(reports):
    link = soup(reports / "01_good.html").find("a", string="third")
    assert link.attrs == {"data-page": "03_unrun.html#2"}


def test_links_follow_the_pages_that_there_are(tmp_path):
    before = tmp_path / "previous/one"
    before.mkdir(parents=True)
    link, above, gone = (
        f'<a {attribute}="{at}02_b.html#c">b</a> <a href="table.html">'
        for attribute, at in (("href", ""), ("href", "../../"), ("data-page", ""))
    )
    assert {with_live_links(page, before, tmp_path) for page in (link, above, gone)} == {gone}
    (tmp_path / "02_b.html").touch()
    assert {with_live_links(page, before, tmp_path) for page in (link, above, gone)} == {above}
    assert {with_live_links(page, tmp_path, tmp_path) for page in (link, gone)} == {link}
    (before / "02_b.html").touch()
    assert {with_live_links(page, before, tmp_path) for page in (link, above, gone)} == {link}


def test_a_prime_stands_beside_its_letter():
    beside = "<mrow><mi>m</mi><mo>′</mo></mrow>"
    assert mathml("m'") == f"<math>{beside}</math>"
    power = mathml("e^{m - m'}")
    assert beside in power
    assert power.count("<msup>") == 1
    assert mathml("m^2") == "<math><msup><mi>m</mi><mn>2</mn></msup></math>"


def test_no_link_is_dead(reports):
    for path in reports.rglob("*.html"):
        for link in soup(path).select("a[href]"):
            href = link["href"]
            if not href.startswith(("https:", "#")):
                target = path.parent / unquote(href.split("#")[0])
                assert target.is_file(), f"{path.relative_to(reports)}: {href}"


def test_pages_lead_to_the_ones_before_and_after(reports):
    names = {
        path.stem: [a["href"] for a in soup(path).select("nav .pages a")]
        for path in reports.glob("0*.html")
    }
    assert names == {"01_good": ["02_bad.html"], "02_bad": ["01_good.html"]}


def test_figures_and_tables_are_there_as_files(reports):
    links = {a.text: a["href"] for a in soup(reports / "01_good.html").select("a.download")}
    assert links == {
        "CSV": "01_good_files/table_01.csv",
        "PNG": "01_good_files/figure_01.png",
    }
    rows = list(csv.reader(io.StringIO((reports / links["CSV"]).read_text())))
    assert rows == [["size", "speed"], ["a|b", "1234.5"], ["c", "12,34"]]
    shown = soup(reports / "01_good.html").select_one("main img")["src"]
    assert base64.b64decode(shown.split(",")[1]) == (reports / links["PNG"]).read_bytes()
    listed = entry(soup(reports / "index.html"), "01").select("details li")
    assert [li.text.strip() for li in listed] == [
        "CSV Notebook 01_good: size, speed",
        "PNG Speed: time against size.",
    ]


def test_an_interrupted_run_leaves_the_pages_of_the_one_before(reports):
    from lib.notebook_plan import Job
    from lib.notebook_runs import Run, run_one

    class Full:
        def put(self, event):
            raise KeyboardInterrupt

    source = reports.parent / "notebooks/01_good.ipynb"
    before = (reports / "01_good.html").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        run_one(Job(source, {}, ()), Run(reports, "", "2026-01-01T00:00:00+00:00"), Full())
    assert (reports / "01_good.html").read_bytes() == before


def test_downloads_of_an_earlier_run_do_not_stay(tmp_path):
    (tmp_path / "01_x_files").mkdir()
    (tmp_path / "01_x_files/figure_07.png").write_bytes(b"old")
    assert save_downloads(new_notebook(), tmp_path / "01_x_files") == []
    assert not (tmp_path / "01_x_files").exists()


@pytest.mark.parametrize(
    "text",
    ["", "words", "| a |", "| a |\nnot a table", "```python\n| a |\n|--|\n```", "| a |\n| b |"],
)
def test_what_is_no_table_makes_no_csv(text):
    assert table_rows(text) == []


def test_a_table_of_records_comes_back_as_numbers():
    rows = [{"name": "a | b", "count": 1234567, "share": -0.5}, {"name": None, "count": 3}]
    text = to_markdown(rows, ["name", "count", "share"])
    assert table_rows(text) == [
        ["name", "count", "share"],
        ["a | b", "1234567", "-0.500"],
        ["–", "3", "–"],
    ]


def test_a_table_is_titled_by_the_last_heading_above_it(tmp_path):
    def cell(kind):
        data = {"image/png": "iVBORw==", "text/plain": "a loss"}
        table = {"text/markdown": "| step | ms |\n|--|--:|\n| a | 1 |"}
        outputs = [new_output("display_data", data if kind == "figure" else table)]
        return new_code_cell("x", outputs=outputs)

    source = "# 04 · Title\n\n## 2. Not `one` number\n\nwords\n\n```python\n# a comment\n```"
    cells = [cell("table"), new_markdown_cell(source), cell("figure"), new_markdown_cell("more")]
    found = save_downloads(new_notebook(cells=[*cells, cell("table")]), tmp_path / "files")
    titles = [each["title"] for each in found]
    assert titles == ["step, ms", "a loss", "Not one number: step, ms"]


def test_tables_that_would_have_the_same_title_have_the_line_above_in_it(tmp_path):
    table = new_output("display_data", {"text/markdown": "| step | ms |\n|--|--:|\n| a | 1 |"})
    other = new_output("display_data", {"text/markdown": "| step | s |\n|--|--:|\n| a | 1 |"})

    def printed(text):
        return new_output("stream", text=text)

    outputs = [printed("a note\nforward:\n"), table, printed("backward\n"), table, table]
    cells = [
        new_markdown_cell("## 8. The sweep"),
        new_code_cell("x", outputs=[*outputs, printed("on a CPU"), other, printed("last")]),
        new_code_cell("x", outputs=[table]),
    ]
    found = save_downloads(new_notebook(cells=cells), tmp_path / "files")
    assert [each["title"] for each in found] == [
        "The sweep: forward: step, ms",
        "The sweep: backward: step, ms",
        "The sweep: step, ms",
        "The sweep: step, s",
        "The sweep: step, ms",
    ]


def test_long_titles_end_at_a_word(tmp_path):
    text = "loss " * 60
    outputs = [new_output("display_data", {"image/png": "iVBORw==", "text/plain": text})] * 2
    (found, _) = save_downloads(
        new_notebook(cells=[new_code_cell("x", outputs=outputs)]), tmp_path / "files"
    )
    assert found["title"].endswith("loss …")
    assert len(found["title"]) < 100


def test_links_upward_get_two_steps_more():
    page = (
        '<a href="../../lib/x.py">a</a> <a href="02_b.html#c">b</a> <a href="https://e.org">c</a>'
    )
    assert two_deeper(page) == page.replace("../../lib", "../../../../lib")


def test_only_the_newest_runs_are_kept(tmp_path):
    names = [f"2026-01-{day:02}T00-00-00" for day in range(1, KEPT_RUNS + 4)]
    for name in names:
        (tmp_path / "previous" / name).mkdir(parents=True)
    assert [path.name for path in earlier_runs(tmp_path)] == names[: -KEPT_RUNS - 1 : -1]
    assert sorted(path.name for path in (tmp_path / "previous").iterdir()) == names[-KEPT_RUNS:]


@pytest.mark.parametrize(
    ("about", "name"),
    [
        ({"run": "2026-11-22T07:15:13+00:00"}, "2026-11-22T07-15-13"),
        ({"finished": "2026-11-22T07:15:13+00:00"}, "2026-11-22T07-15-13"),
        ({}, "unknown"),
    ],
)
def test_a_run_has_a_name_that_every_file_system_takes(about, name):
    assert run_of(about) == name


def test_an_index_of_nothing_says_so(tmp_path):
    assert "0 notebooks" in write_index(tmp_path, ["01_x"]).read_text()


def test_figures_of_a_notebook_without_any_are_none():
    assert key_figures_of(new_notebook(cells=[new_code_cell("1")])) == []
    assert KEY_FIGURES.endswith("+json")
