"""A story follows its prompt and its temperature, token by token and at once."""

import pytest

from lib.lessons.start.story import story_teller
from lib.training.generation import generate_text
from tests.lessons.stored import stored_outputs

PROMPT = "One day, a fox"


@pytest.fixture
def teller(story):
    return story_teller(*story, PROMPT, max_new_tokens=12)


def told(teller) -> str:
    (output,) = teller.children[3].outputs
    return output["data"]["text/plain"]


def test_it_tells_what_generate_text_tells(story, teller):
    for temperature in (0.7, 0.0, 1.2):
        teller.children[1].value = temperature
        options = {"max_new_tokens": 12, "temperature": temperature, "seed": 0}
        assert told(teller) == PROMPT + generate_text(*story, [PROMPT], **options)[0]


def test_the_button_tells_another_story_and_the_slider_the_same_one_again(teller):
    _, slider, button, *_ = teller.children
    first = told(teller)
    button.click()
    second = told(teller)
    assert second != first
    slider.value = 0.0
    slider.value = 0.7
    assert told(teller) == second


def test_the_story_grows_token_by_token(teller):
    lengths = []
    teller.children[3].observe(lambda change: lengths.append(len(told(teller))), "outputs")
    teller.children[0].value = "The ball"
    assert len(lengths) >= 8
    assert lengths == sorted(lengths)
    assert told(teller).startswith("The ball")


@pytest.mark.parametrize("prompt", ["", "<b>&", "word " * 300])
def test_any_prompt_is_taken_as_text(teller, prompt):
    teller.children[0].value = prompt
    (output,) = teller.children[3].outputs
    assert "<b><b>" not in output["data"]["text/html"]
    assert told(teller).startswith(prompt.strip())


def test_where_nobody_can_move_it_three_temperatures_are_shown(teller):
    words, first, *others = stored_outputs(teller)
    assert words.data["text/plain"] == f"Prompt: {PROMPT}  Temperature: 0.7"
    assert f"Prompt: {PROMPT} · Temperature: 0.7</div>" in words.data["text/html"]
    assert first.data["text/plain"].startswith(PROMPT)
    captions = [output.data["text/plain"].splitlines()[0] for output in others]
    assert captions == ["Temperature: 0.0", "Temperature: 1.5"]
