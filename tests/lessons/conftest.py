"""Fixtures for the tests of several lessons."""

import pytest
from matplotlib import pyplot as plt


@pytest.fixture(scope="session")
def story():
    """The committed story model and its tokenizer, on the processor."""
    from lib.lessons.start.story import load_story_model

    return load_story_model("cpu")[:2]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are shown."""
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    yield shown
    plt.close("all")
