"""Notebook outputs: boxes, the merge slider with its still form, excerpts, progress."""

import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given

from lib.core.files import ROOT
from lib.lessons.show import (
    merge_stepper,
    merge_steps,
    show_encoding,
    show_growing,
    show_source,
    visible,
)
from lib.tokenizer.bpe import Tokenizer, count_pretokens, train_from_counts
from lib.tokenizer.pretokenize import SEPARATOR
from tests.texts import tricky_text

TEXT = "the cat that sat on the mat, the hat of the cat. Über 42 cats\n" * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    vocab, merges = train_from_counts(count_pretokens(TEXT), 300)
    return Tokenizer(vocab, merges, [SEPARATOR], implementation="python")


def flat(step) -> list[bytes]:
    return [token for pretoken in step.pretokens for token in pretoken]


@given(text=tricky_text(12))
def test_the_steps_lead_from_bytes_to_what_the_tokenizer_gives(tokenizer, text):
    steps = merge_steps(text, tokenizer)
    assert all(b"".join(flat(step)) == text.encode() for step in steps)
    special = SEPARATOR.encode()
    assert all(len(token) == 1 or token == special for token in flat(steps[0]))
    assert flat(steps[-1]) == [tokenizer.vocab[i] for i in tokenizer.encode(text)]


def test_each_step_applies_the_next_merge_that_joins_something(tokenizer):
    steps = merge_steps("the cat sat", tokenizer)
    ranks = [step.rank for step in steps[1:]]
    assert ranks == sorted(set(ranks))
    for before, after in pairwise(steps):
        assert after.num_tokens < before.num_tokens
        assert after.joined == b"".join(tokenizer.merges[after.rank])
        assert after.joined in flat(after)


def test_the_slider_shows_the_step_that_it_points_to(tokenizer):
    stepper = merge_stepper("the cat sat", tokenizer)
    slider, view, _ = stepper.children
    steps = merge_steps("the cat sat", tokenizer)
    assert list(slider.options) == list(range(len(steps)))
    for number, step in enumerate(steps):
        slider.value = number
        markup = view.outputs[0]["data"]["text/html"]
        merges = "1 merge" if number == 1 else f"{number} merges"
        assert f"After {merges}: {step.num_tokens} tokens" in markup
        assert markup.count("<span") == step.num_tokens
        assert markup.count("font-weight:700") == flat(step).count(step.joined)


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (b" the", "·the"),
        (b"\r\n\t", "␍↵⇥"),
        ("é".encode(), "é"),
        (b"\xc3", "C3"),
        (b"\x9f\x91", "9F 91"),
        (b"\x00", "U+0000"),
        ("\u00a0a".encode(), "U+00A0a"),
        ("👩\u200d👧".encode(), "👩\u200d👧"),
        (b"", ""),
    ],
)
def test_every_token_has_a_form_that_people_can_see(token, shown):
    assert visible(token) == shown


@given(text=tricky_text(8))
def test_boxes_escape_what_html_would_read(tokenizer, text):
    markup = show_encoding(text, tokenizer).data
    inside = re.sub(r"</?(span|div)\b[^<>]*>", "", markup)
    assert "<" not in inside
    assert ">" not in inside
    assert markup.count("<span") == len(tokenizer.encode(text))


def example(numbers):
    """A docstring."""
    total = 0
    for number in numbers:
        total += number
    return total


def test_code_is_shown_as_it_stands_or_in_part():
    assert "), `example`:\n\n```python\ndef example(" in show_source(example).data
    part = show_source(example, "for number", "total +=").data
    assert part.endswith("```python\nfor number in numbers:\n    total += number\n```")


def test_an_excerpt_links_to_its_first_line_in_its_file():
    link = re.match(r"\[`(\S+)`\]\(\.\./\1#line=(\d+)\)", show_source(example, "for n").data)
    lines = (ROOT / link[1]).read_text(encoding="utf-8").splitlines()
    # as JupyterLab counts: from 0
    assert lines[int(link[2])] == "    for number in numbers:"


def test_an_excerpt_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="contains 'total = 0'"):
        show_source(example, "return", "total = 0")


def test_a_growing_text_is_shown_with_each_piece(monkeypatch):
    shown = []
    handle = SimpleNamespace(update=lambda text: shown.append(repr(text)))

    def display(text, *, display_id):
        assert display_id
        shown.append(repr(text))
        return handle

    monkeypatch.setattr("IPython.display.display", display)
    add = show_growing("Once")
    for piece in (" upon", " a"):
        add(0, piece)
    assert shown == ["Once", "Once upon", "Once upon a"]
