"""The map of the workbook: all notebooks, as they call themselves, and no word outside its card."""

import io
import json
import re

import nbformat
import pytest
from matplotlib.patches import FancyBboxPatch
from PIL import Image

from lib.core.files import ROOT
from lib.lessons.start.map import (
    STOPS,
    in_halves,
    map_figure,
    map_words,
    save_map,
    show_map,
    total_hours,
)

NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))}
# How the first cell of a notebook puts the minutes on the map.
TIMES = {
    "½": "half a minute",
    "1": r"(about |less than )?a minute",
    "1–2": "one or two minutes",
    "2–3": "between two and three minutes",
}

NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
# By somebody who worked through it: words do not count derivations, and a kernel or a ring takes
# longer than 15 minutes.
TRIED = {"06_flash_attention": 8, "07_ddp": 5}
# Of a figure and of a table, in an output.
SIGNS = ("image/png|<svg|<img", r"\|--|\| --|<table")


def seconds_of(cell) -> float:
    """How long a reader takes for a cell: what is folded is not read, an exercise takes 15 min."""
    tags = cell.metadata.get("tags", [])
    if cell.cell_type == "markdown":
        unfolded = re.sub(r"<details>.*?</details>", "", cell.source, flags=re.DOTALL)
        return len(unfolded.split()) / 180 * 60
    lines = 0 if "folded" in tags else sum(map(bool, cell.source.split("\n")))
    shown = [str(output.get("data", "")) for output in cell.outputs]
    figures, tables = (sum(map(bool, map(re.compile(sign).search, shown))) for sign in SIGNS)
    return 4 * lines + 24 * figures + 21 * tables + 15 * 60 * ("exercise" in tags)


@pytest.mark.parametrize("stop", [stop for stop in STOPS if stop.name in NOTEBOOKS])
def test_the_hours_are_those_of_the_words_lines_and_exercises(stop):
    cells = nbformat.read(NOTEBOOKS[stop.name], as_version=4).cells
    counted = TRIED.get(stop.name) or sum(map(seconds_of, cells)) / 3600
    wrong = f"{stop.name} takes about {counted:.1f} h; say so in STOPS and in README.md"
    assert abs(counted - stop.hours) <= max(0.5, 0.4 * stop.hours), wrong


def test_every_notebook_is_on_the_map_in_order():
    assert [stop.name for stop in STOPS if stop.name in NOTEBOOKS] == list(NOTEBOOKS)


def hours_in_words(hours: float) -> str:
    """How the first cell of a notebook puts them, if it does."""
    if hours < 2:
        return {0.5: "half an hour", 1: "an hour", 1.5: "an hour and a half"}[hours]
    return f"{NUMBERS[int(hours)]}{' and a half' if hours % 1 else ''} hours"


@pytest.mark.parametrize("stop", [stop for stop in STOPS if stop.name in NOTEBOOKS])
def test_a_stop_says_what_its_notebook_says(stop):
    opening = "".join(json.loads(NOTEBOOKS[stop.name].read_text())["cells"][0]["source"])
    title, takes = opening.splitlines()[0], opening.split("**It takes**")[1]
    assert title.startswith(f"# {stop.name[:2]} · {stop.title}")
    takes = takes.split("**It needs**")[0].replace("\n", " ")
    assert re.search(TIMES[stop.minutes], takes)
    assert "hour" not in takes or hours_in_words(stop.hours) in takes


def test_words_stay_inside_their_cards():
    with map_figure() as figure:
        (axes,) = figure.axes
        cards = [p.get_window_extent() for p in axes.patches if isinstance(p, FancyBboxPatch)]
        assert len(cards) == len(STOPS)
        for text in filter(lambda text: text.get_text(), axes.texts):
            box = text.get_window_extent()
            for card in (card for card in cards if card.overlaps(box)):
                assert card.x0 <= box.x0 <= box.x1 <= card.x1, text.get_text()


def test_the_picture_is_opaque_and_has_words():
    image = show_map()
    picture = Image.open(io.BytesIO(image.data)).convert("RGBA")
    assert picture.getextrema()[3] == (255, 255)
    assert picture.width > 1800
    assert image._repr_mimebundle_()[1]["image/png"]["alt"] == map_words()
    for stop in STOPS:
        assert f"{stop.name[:2]} {stop.title}, " in map_words()


def test_the_committed_map_is_the_one_that_is_drawn_now(tmp_path):
    kept = (ROOT / "artifacts/map.svg").read_text(encoding="utf-8")
    made = save_map(tmp_path / "map.svg").read_text(encoding="utf-8")
    assert map_words() in kept, "run: python -m lib lessons map"
    # another version of Matplotlib writes the same picture in other words
    version = re.search(r"Matplotlib v[\d.]+", made)[0]
    assert kept == made or version not in kept, "run: python -m lib lessons map"


def test_the_readme_shows_the_map_and_its_times():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](artifacts/map.svg)" in readme
    for stop in STOPS:
        row = re.search(rf"^\| \[`{stop.name}`\].*$", readme, re.MULTILINE)[0]
        _, _, _, hours, minutes, *_ = row.split("|")
        assert hours.strip() == f"{in_halves(stop.hours)} h", row
        assert re.search(TIMES[stop.minutes], minutes), row
    assert f"about {in_halves(total_hours())} hours" in readme
