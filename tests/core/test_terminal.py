"""Stories on a terminal: no word is broken, and nothing is lost; bars where somebody sees them."""

import sys

import pytest

from lib.core.terminal import BOLD, PLAIN, StoryPrinter, print_stories, progress_bar

STORY = "Once upon a time,\n\nthere was a fox   named Incomprehensibility-Extraordinaire.  "


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_lines_break_between_words_however_the_text_arrives(capsys, size):
    printer = StoryPrinter(width=12)
    for start in range(0, len(STORY), size):
        printer.write(STORY[start : start + size])
    printer.close()
    assert capsys.readouterr().out.splitlines() == [
        *("Once upon a", "time,", "", "there was a", "fox   named"),
        "Incomprehensibility-Extraordinaire.",
    ]


def test_a_style_ends_inside_a_word_and_takes_no_room(capsys):
    printer = StoryPrinter(width=9)
    printer.write("one tw", style=BOLD)
    printer.write("o th")
    assert capsys.readouterr().out == f"{BOLD}one tw{PLAIN}o"
    printer.write("ree")
    printer.close()
    assert capsys.readouterr().out == "\nthree\n"


def test_where_there_is_no_terminal_texts_are_printed_as_they_are(capsys, monkeypatch):
    print_stories(("a", "b"), [" c" * 100, "\nd"])
    assert capsys.readouterr().out == "a" + " c" * 100 + "\n\nb\nd\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_stories(("a", "b"), [" c", " d"])
    assert capsys.readouterr().out == f"{BOLD}a{PLAIN} c\n\n{BOLD}b{PLAIN} d\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_counts_bytes_where_there_is_a_terminal(capsys, monkeypatch, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with progress_bar("tokens", 100) as progress:
        progress(60)
        bar = progress.__self__
        assert bar.disable != is_terminal
        assert not is_terminal or (bar.n, bar.total, bar.unit) == (60, 100, "B")
    assert bool(capsys.readouterr().err) == is_terminal
