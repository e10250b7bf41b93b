"""A text of the reader's that nothing can come of is refused by name."""

import pytest

from lib.lessons.training.own_text import LEAST_BYTES, check_own_text


def test_a_long_text_in_utf8_is_taken(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("Größe " * LEAST_BYTES, encoding="utf-8")
    assert check_own_text(str(path)) == str(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a" * 2500, r"own_text must have at least 10,000 bytes, got 2,500 in"),
        ("Größe ".encode("latin-1") * 3000, r"own_text must be UTF-8, got .* whose byte 2 is not"),
        (None, r"own_text must be the path of a text file, got"),
    ],
    ids=["short", "latin-1", "missing"],
)
def test_other_texts_are_refused_by_name(tmp_path, content, message):
    path = tmp_path / "own.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        check_own_text(str(path))
