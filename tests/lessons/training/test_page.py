"""Words and numbers of notebook 03 that no cell of its own checks."""

import re

import nbformat
import pytest

from lib.core.files import ROOT
from lib.lessons.training import exercises
from tests.lessons.answers.table import right_answers
from tests.lessons.page import run_page

CELLS = nbformat.read(ROOT / "notebooks/03_training.ipynb", as_version=4).cells
TEXTS = [c for c in CELLS if c.cell_type == "markdown"]
PROSE = " ".join("\n".join(c.source.replace("\n> ", "\n") for c in TEXTS).split())
OUTPUTS = "\n".join(out.get("text", "") for c in CELLS for out in c.get("outputs", ()))


def said(pattern: str, text: str = PROSE) -> tuple[str, ...]:
    """The groups of a pattern that the page has."""
    found = re.search(pattern, text)
    assert found, pattern
    return found.groups()


def test_the_floor_in_words_is_the_one_that_was_counted():
    in_words = said(r"(\d+) bits in a story of (\d+) bytes, or ([\d.]+) bits per byte")
    num_bytes, bits = said(r"(\d+) bytes and (\d+) bits a story:", OUTPUTS)
    (floor,) = said(r"floor: ([\d.]+) ± ", OUTPUTS)
    assert in_words == (bits, num_bytes, f"{float(floor):.3f}")


def test_the_learning_rates_that_a_reader_chooses_from_are_those_that_are_tried():
    asked = said(r"Which of these will win: ([\d.]+), ([\d.]+), ([\d.]+), ([\d.]+) or ([\d.]+)\?")
    sources = "\n".join(c.source for c in CELLS)
    assert said(r"for lr in \(([^)]*)\):\n    weights =", sources) == (", ".join(asked),)


def test_the_run_is_the_same_as_libs():
    (apart,) = said(r"100 losses, at most (\S+) apart", OUTPUTS)
    assert float(apart) < 1e-3


@pytest.mark.slow
def test_the_page_goes_on_with_right_answers_of_another_kind(monkeypatch, capsys):
    # processes and files of their own
    answers = {"diagnose": exercises.diagnose.solve} | right_answers(exercises)
    run_page(CELLS, answers, monkeypatch, without=("%%writefile", "import hashlib"))
    assert capsys.readouterr().out.count("right: as expected") == len(answers) == 7
