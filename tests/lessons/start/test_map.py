"""The drawn map has all notebooks, with the titles and times that the README gives them."""

import re

import nbformat

from lib.core.files import ROOT


def test_the_map_has_every_notebook_by_its_title_and_the_times_of_the_readme():
    drawn = (ROOT / "artifacts/map.svg").read_text(encoding="utf-8")
    words = re.search(r"<desc[^>]*>(.*?)</desc>", drawn, re.DOTALL)[1]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    total = 0.0
    for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        stop = rf"{path.stem[:2]} ([\w, -]+?), (\d*½?) h to read and do, ([\d½]+) min to run"
        title, hours, minutes = re.search(stop, words).groups()
        assert title in nbformat.read(path, as_version=4).cells[0].source
        row = re.search(rf"^\| \[`{path.stem}`\].*$", readme, re.MULTILINE)[0]
        _, _, _, read, runs, *_ = row.split("|")
        assert read.strip() == f"{hours} h", row
        assert re.search({"½": "half a minute", "1": "a minute"}[minutes], runs), row
        total += float(hours.replace("½", ".5"))
    assert "](artifacts/map.svg)" in readme
    assert f"about {total:g} hours" in readme
    first = (ROOT / "notebooks/00_start_here.ipynb").read_text(encoding="utf-8")
    assert f"About {total:g} hours, exercises included" in first


def test_the_essential_sections_of_the_first_four_notebooks_take_seven_hours():
    hours = {"half an hour": 0.5, "an hour and a half": 1.5, "two hours": 2, "three hours": 3}
    heads = [
        nbformat.read(path, as_version=4).cells[0].source
        for path in sorted((ROOT / "notebooks").glob("0[0-3]_*.ipynb"))
    ]
    found = [re.search(r"\*\*It takes\*\* ([a-z ]+?)(?: to|,)", head)[1] for head in heads]
    assert sum(hours[words] for words in found) == 7
    first = (ROOT / "notebooks/00_start_here.ipynb").read_text(encoding="utf-8")
    assert "the essential sections of 00 to 03 take seven of them" in first
