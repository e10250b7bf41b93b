"""The map of the workbook: all notebooks, as they call themselves, and no word outside its card."""

import io
import json
import re

import pytest
from matplotlib.patches import FancyBboxPatch
from PIL import Image

from lib.core.hardware import ROOT
from lib.lessons.start.map import STOPS, map_figure, map_words, save_map, show_map

NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("0[0-9]_*.ipynb"))}
# How the first cell of a notebook puts the minutes on the map.
TIMES = {
    "½": "half a minute",
    "1": r"(about |less than )?a minute",
    "1–2": "one or two minutes",
    "2–3": "between two and three minutes",
}


def test_every_notebook_is_on_the_map_in_order():
    assert [stop.name for stop in STOPS if stop.name in NOTEBOOKS] == list(NOTEBOOKS)


@pytest.mark.parametrize("stop", [stop for stop in STOPS if stop.name in NOTEBOOKS])
def test_a_stop_says_what_its_notebook_says(stop):
    opening = "".join(json.loads(NOTEBOOKS[stop.name].read_text())["cells"][0]["source"])
    title, takes = opening.splitlines()[0], opening.split("**It takes**")[1]
    assert title.startswith(f"# {stop.name[:2]} · {stop.title}")
    assert re.search(TIMES[stop.minutes], takes.split("**It needs**")[0].replace("\n", " "))


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
        assert re.search(TIMES[stop.minutes], row.split("|")[3]), row
