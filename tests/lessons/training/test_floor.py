"""The bits of a generated story: choices that look alike tell it too, and no others do."""

import random

import pytest

from lib.data.stories import generate_stories, tell
from lib.lessons.training.floor import choices_of, held_out_stories


@pytest.fixture(scope="module")
def stories():
    # in numbers 202 and 235, a pronoun is shown by the text of another slot alone
    return held_out_stories(240)[200:]


def check_change(draws: bytearray, choices, index: int, byte: int) -> None:
    """With another byte, the same story is told if that looks alike, and else another one."""
    changed = draws.copy()
    changed[index] = byte
    is_alike = choices[index].options[byte] == choices[index].shown
    assert (tell(bytes(changed)) == tell(bytes(draws))) == is_alike, choices[index].about


def test_choices_that_look_alike_tell_the_same_story_and_all_others_another_one(stories):
    generator = random.Random(0)
    for story in stories:
        draws = bytearray()
        for choice in story.choices:
            alike = [byte for byte in range(256) if choice.options[byte] == choice.shown]
            draws.append(generator.choice(alike))
        assert tell(bytes(draws)) == story.text
        for index in range(len(draws)):
            for byte in generator.choices(range(256), k=3):
                check_change(draws, story.choices, index, byte)


def test_a_second_name_or_thing_that_would_be_the_first_again_looks_like_the_one_before(stories):
    for story in stories:
        draws = bytearray(choice.byte for choice in story.choices)
        for first, second in ((3, 4), (5, 6)):
            draws[second] = draws[first]
            choices = choices_of(bytes(draws))
            for byte in range(256):
                check_change(draws, choices, second, byte)


def test_the_stories_are_those_of_the_validation_split():
    text = "".join(story.text for story in held_out_stories(5))
    assert "".join(generate_stories(len(text), split="validation")) == text
