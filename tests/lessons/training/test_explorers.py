"""The figure of notebook 03: a loss curve that grows in place."""

from types import SimpleNamespace

import pytest

from lib.core import figures
from lib.lessons.training.explorers import LossCurve, draw_losses


@pytest.fixture
def shown(monkeypatch):
    """What `display` and its handle's `update` were called with."""
    shown = []

    def display(image, *, display_id):
        assert display_id
        shown.append(image)
        return SimpleNamespace(update=shown.append)

    monkeypatch.setattr("IPython.display.display", display)
    return shown


def test_the_curve_starts_with_words_and_ends_with_everything(shown):
    with LossCurve(10) as curve:
        curve({"step": 5, "learning_rate": 0.1})
        assert [words.data for words in shown] == ["*No loss yet.*"] * 2
        curve({"step": 5, "loss": 3.0})
        curve({"step": 10, "validation_loss": 2.5})
    assert shown[-1].data.startswith(b"\x89PNG")
    assert shown[-1].alt.endswith("for training, validation.")


def test_the_last_drawing_comes_also_when_the_run_fails(shown):
    curve = LossCurve(10)

    def run():
        with curve:
            curve({"step": 5, "loss": 3.0})
            curve({"step": 6, "loss": 3.0})
            raise FloatingPointError

    with pytest.raises(FloatingPointError):
        run()
    # words, the first loss, and everything at the end
    assert len(shown) == 3


def test_drawing_waits_five_seconds(shown, monkeypatch):
    seconds = iter(range(1000))
    monkeypatch.setattr(LossCurve, "picture", lambda curve: None)
    monkeypatch.setattr("time.perf_counter", lambda: next(seconds))
    with LossCurve(100) as curve:
        for step in range(1, 22):
            curve({"step": step, "loss": 1.0})
    # words, the first loss and every fifth from there, and everything at the end
    assert len(shown) == 1 + 5 + 1


def test_what_a_resumed_run_does_again_is_drawn_once(shown):
    earlier = [{"step": step, "loss": 9.0} for step in (10, 20, 30)]
    with LossCurve(100, records=[*earlier, {"step": 30, "validation_loss": 9.0}]) as curve:
        curve({"step": 20, "loss": 1.0})
        assert [record["step"] for record in curve.records if "loss" in record] == [10, 20]
        assert any("validation_loss" in record for record in curve.records)


def test_earlier_records_and_references_are_drawn():
    records = [{"step": 1, "loss": 4.0}, {"step": 2, "validation_loss": 3.0}]
    with figures.house_figure() as (_, axes):
        draw_losses(axes, records, 5, {"unigram": 5.0})
        assert figures.alt_text(axes.figure).endswith("for training, validation.")
        training, validation, reference = axes.lines
        assert training.get_xydata().tolist() == [[1, 4]]
        assert validation.get_xydata().tolist() == [[2, 3]]
        assert list(reference.get_ydata()) == [5, 5]
        assert [text.get_text() for text in axes.texts] == ["unigram"]
