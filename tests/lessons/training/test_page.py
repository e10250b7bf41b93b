"""Words and numbers of notebook 03 that no cell of its own checks."""

import pytest

from lib.lessons.training import exercises
from tests.lessons.answers.table import right_answers
from tests.lessons.page import found, read_page, run_page

PAGE = read_page("03_training")


def test_the_floor_in_words_is_the_one_that_was_counted():
    in_words = PAGE.said(r"(\d+) bits in a story of (\d+) bytes, or ([\d.]+) bits per byte")
    num_bytes, bits = found(r"(\d+) bytes and (\d+) bits a story:", PAGE.outputs)
    (floor,) = found(r"floor: ([\d.]+) ± ", PAGE.outputs)
    assert in_words == (bits, num_bytes, f"{float(floor):.3f}")


def test_the_learning_rates_that_a_reader_chooses_from_are_those_that_are_tried():
    asked = PAGE.said(
        r"Which of these will win: ([\d.]+), ([\d.]+), ([\d.]+), ([\d.]+) or ([\d.]+)\?"
    )
    assert found(r"for lr in \(([^)]*)\):\n    weights =", PAGE.source) == (", ".join(asked),)


def test_the_run_is_the_same_as_libs():
    (apart,) = found(r"100 losses, at most (\S+) apart", PAGE.outputs)
    assert float(apart) < 1e-3


@pytest.mark.slow
def test_the_page_goes_on_with_right_answers_of_another_kind(monkeypatch, capsys):
    # processes and files of their own
    answers = {"diagnose": exercises.diagnose.solve} | right_answers(exercises)
    run_page(PAGE.cells, answers, monkeypatch, without=("%%writefile", "import hashlib"))
    assert capsys.readouterr().out.count("right: as expected") == len(answers) == 7
