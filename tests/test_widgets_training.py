"""What notebook 03 shows: a loss curve that grows in place, bars for sampling with sliders."""

import re
import time

import pytest
import torch

from lib import plots
from lib.notebook_cells import WIDGET_STATE, WIDGET_VIEW, static_widgets
from lib.tokenizer import Tokenizer
from lib.widgets_training import (
    SERIES,
    STILL_SETTINGS,
    LossCurve,
    draw_losses,
    sampling_bars,
    sampling_sliders,
)

LOGITS = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0]).log_softmax(-1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer({i: bytes([i]) for i in range(256)}, [])


class Handle:
    """What `display` returns; remembers what it was told to show."""

    def __init__(self):
        self.shown = []

    def update(self, image):
        self.shown.append(image)


@pytest.fixture
def handle(monkeypatch):
    handle = Handle()

    def display(image, *, display_id):
        assert display_id
        handle.update(image)
        return handle

    monkeypatch.setattr("IPython.display.display", display)
    return handle


def test_the_curve_is_drawn_first_empty_and_last_with_everything(handle):
    with LossCurve(10) as curve:
        curve({"step": 5, "loss": 3.0})
        curve({"step": 10, "loss": 2.0})
        curve({"step": 10, "validation_loss": 2.5})
    assert len({image.data for image in handle.shown}) >= 2
    assert handle.shown[-1].data.startswith(b"\x89PNG")


def test_before_the_first_loss_there_are_words_in_place_of_an_empty_figure(handle):
    with LossCurve(10) as curve:
        curve({"step": 5, "learning_rate": 0.1})
        assert [shown.data for shown in handle.shown] == ["*No loss yet.*"] * 2
        curve({"step": 5, "validation_loss": 3.0})
    assert handle.shown[-1].data.startswith(b"\x89PNG")


def test_the_last_drawing_comes_also_when_the_run_fails(handle):
    counts = []

    def run():
        with LossCurve(10) as curve:
            curve({"step": 5, "loss": 3.0})
            curve({"step": 6, "loss": 3.0})
            counts.append(len(handle.shown))
            raise FloatingPointError

    with pytest.raises(FloatingPointError):
        run()
    assert len(handle.shown) == counts[0] + 1


def test_drawing_waits_at_least_a_second(handle):
    now = 0.0
    with LossCurve(100, clock=lambda: now) as curve:
        for step in range(1, 101):
            now += 0.1
            curve({"step": step, "loss": 1.0})
    # the words, ten in ten seconds, and the last
    assert 10 <= len(handle.shown) <= 13


def test_slow_drawing_takes_a_small_share_of_the_time(handle, monkeypatch):
    now = 0.0

    def slow_image(curve):
        nonlocal now
        now += 1.0

    monkeypatch.setattr(LossCurve, "picture", slow_image)
    with LossCurve(1000, clock=lambda: now) as curve:
        for step in range(1, 1001):
            now += 0.1
            curve({"step": step, "loss": 1.0})
    # in 100 s of training: the first and the last, and three between
    assert len(handle.shown) <= 6


def test_what_a_resumed_run_does_again_is_drawn_once(handle):
    earlier = [{"step": step, "loss": 9.0} for step in (10, 20, 30)]
    with LossCurve(100, records=[*earlier, {"step": 30, "validation_loss": 9.0}]) as curve:
        curve({"step": 20, "loss": 1.0})
        assert [record["step"] for record in curve.records if "loss" in record] == [10, 20]
        assert any("validation_loss" in record for record in curve.records)


def test_earlier_records_and_references_are_drawn():
    records = [{"step": 1, "loss": 4.0}, {"step": 2, "validation_loss": 3.0}]
    with plots.house_figure() as (_, axes):
        draw_losses(axes, records, 5, {"unigram": 5.0})
        assert plots.alt_text(axes.figure).endswith("for training, validation.")
        training, validation, reference = axes.lines
        assert training.get_xydata().tolist() == [[1, 4]]
        assert validation.get_xydata().tolist() == [[2, 3]]
        assert list(reference.get_ydata()) == [5, 5]
        assert [text.get_text() for text in axes.texts] == ["unigram"]


@pytest.mark.parametrize("key", ["loss", "validation_loss"])
def test_the_legend_names_only_what_has_points(key):
    with plots.house_figure() as (figure, axes):
        draw_losses(axes, [{"step": 1, key: 4.0}], 5)
        names = [text.get_text() for text in axes.get_legend().get_texts()]
        assert names == [SERIES[key][0]]
        assert plots.alt_text(figure).endswith(f"for {names[0]}.")


def widths(markup: str) -> list[float]:
    return [float(width) for width in re.findall(r"width:([\d.]+)%", markup)]


def test_bars_are_as_wide_as_the_probabilities(tokenizer):
    expected = (LOGITS.exp() * 100).tolist()
    assert widths(sampling_bars(LOGITS, tokenizer, 1.0, 1.0)) == pytest.approx(expected, abs=0.01)


def test_a_token_outside_top_p_is_hollow(tokenizer):
    markup = sampling_bars(LOGITS, tokenizer, 1.0, 0.7)
    assert markup.count("background:") == 2
    assert markup.count(">cut<") == 3
    assert "2 of 5 tokens" in markup


def test_a_lower_temperature_widens_the_first_bar(tokenizer):
    cold, warm = (sampling_bars(LOGITS, tokenizer, t, 1.0) for t in (0.5, 1.5))
    assert widths(cold)[0] > widths(warm)[0]
    assert widths(sampling_bars(LOGITS, tokenizer, 0.0, 1.0))[0] == 100


@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_tokens_without_a_chance_stand_by_their_logits(tokenizer, temperature):
    logits = torch.zeros(256)
    for rank, letter in enumerate("cabd"):
        logits[ord(letter)] = 40.0 - 9 * rank
    markup = sampling_bars(logits, tokenizer, temperature, 1.0, num_bars=4)
    assert re.findall(r"hidden\">(.*?)<", markup) == list("cabd")
    assert markup.count(">cut<") == 3


def test_tokens_are_escaped(tokenizer):
    assert "&lt;" in sampling_bars(torch.arange(ord("<") + 1.0), tokenizer, 1.0, 1.0)


def test_an_id_that_only_pads_the_embedding_has_no_text(tokenizer):
    markup = sampling_bars(torch.arange(300.0), tokenizer, 1.0, 1.0, num_bars=1)
    assert widths(markup) == pytest.approx([63.21], abs=0.01)


def test_the_sliders_move_the_bars(tokenizer):
    temperature, top_p, view, _ = sampling_sliders(LOGITS, tokenizer).children
    temperature.value, top_p.value = 0.5, 0.5
    shown = view.outputs[0]["data"]["text/html"]
    assert shown == sampling_bars(LOGITS, tokenizer, 0.5, 0.5)


def test_a_move_takes_less_than_100_ms_with_a_large_vocabulary():
    vocab = {i: bytes([i]) if i < 256 else b"%d" % i for i in range(32_000)}
    tokenizer = Tokenizer(vocab, [])
    slider = sampling_sliders(torch.randn(32_000), tokenizer).children[0]
    times = []
    for value in (0.5, 0.6, 0.7, 0.8, 0.9):
        started = time.perf_counter()
        slider.value = value
        times.append(time.perf_counter() - started)
    assert min(times) < 0.1


def test_without_sliders_each_setting_is_shown_once(tokenizer):
    from ipywidgets import Widget
    from nbformat.v4 import new_code_cell, new_notebook, new_output

    box = sampling_sliders(LOGITS, tokenizer)
    state = Widget.get_manager_state()
    view = {WIDGET_VIEW: {"model_id": box.model_id}}
    cell = new_code_cell(outputs=[new_output("display_data", data=view)])
    notebook = new_notebook(cells=[cell], metadata={"widgets": {WIDGET_STATE: state}})
    shown = "".join(o.data.get("text/html", "") for o in static_widgets(notebook).cells[0].outputs)
    for temperature, top_p in STILL_SETTINGS:
        assert shown.count(f"Temperature {temperature:g}, top-p {top_p:g}:") == 1


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_still_bars_show_tokens_kept_beside_tokens_cut(tokenizer, temperature):
    # two likely tokens and a long tail, as after "there was a little"
    logits = torch.tensor([0.33] * 2 + [0.34 / 254] * 254).log()
    stills = [
        sampling_bars(logits, tokenizer, *setting, num_bars=6)
        for setting in STILL_SETTINGS[1:]
        if setting[0] == temperature
    ]
    assert any(0 < markup.count(">cut<") < 6 for markup in stills)


def test_the_still_bars_show_what_temperature_0_does():
    assert 0.0 in {temperature for temperature, _ in STILL_SETTINGS[1:]}
