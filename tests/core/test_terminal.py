"""Stories on a terminal have bold prompts; bars are shown where somebody sees them."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from lib.core.terminal import progress_bar
from lib.training.commands import BOLD, PLAIN, print_stories


def test_prompts_are_bold_on_a_terminal_alone(capsys, monkeypatch):
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
        (bar,) = progress.args
        assert bar.disable != is_terminal
        assert not is_terminal or (bar.n, bar.total, bar.unit) == (60, 100, "B")
    assert bool(capsys.readouterr().err) == is_terminal


def on_terminal(code: str, *, columns: int, lines: int, **variables: str) -> str:
    """The text that `code` writes to a terminal of this size."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    streams = {"stdin": child, "stdout": child, "stderr": child}
    command = [sys.executable, "-c", code]
    text = b""
    with subprocess.Popen(
        command, **streams, cwd=Path(__file__).parents[2], env=os.environ | variables
    ) as process:
        os.close(child)
        # the end is an error on Linux, and empty elsewhere
        try:
            while block := os.read(parent, 1 << 16):
                text += block
        except OSError:
            pass
    os.close(parent)
    assert process.returncode == 0, text
    return text.decode()


BAR = """
from lib.core.terminal import progress_bar
with progress_bar("text", 1000) as progress:
    progress(1)
    progress(999)
    print("what comes after the last call")
"""


@pytest.mark.parametrize(
    ("size", "variables", "width"),
    [((60, 24), {}, 60), ((0, 0), {"COLUMNS": "0"}, 80), ((0, 24), {"COLUMNS": "50"}, 50)],
)
def test_a_bar_fits_a_terminal_of_any_size_and_shows_its_end(size, variables, width):
    columns, lines = size
    text = on_terminal(BAR, columns=columns, lines=lines, **variables).split("what comes")[0]
    drawn = [part for part in text.split("\r") if part.strip()]
    assert "100%" in drawn[-1]
    assert all(len(part) <= width for part in drawn)
    # a bar of bytes fills the line
    assert len(drawn[-1]) >= width - 1


def test_a_bar_moves_on_after_many_bytes_at_once(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("text", 10**9) as progress:
        (bar,) = progress.args
        # done by an earlier call
        bar.last_print_t = bar.start_t = bar._time() - 1
        progress(9 * 10**8)
        bar.last_print_t -= 1
        progress(5 * 10**7)
    assert " 95%" in capsys.readouterr().err
