"""The bits of a generated story, against a parser that knows nothing of how it was drawn."""

import math
from collections import Counter, defaultdict
from functools import cache

import pytest

from lib.data.stories import SLOT, build_tables, generate_stories, tell
from lib.lessons.training.floor import choices_of, held_out_stories

TABLES = build_tables()
FIXED = ("grownups", "places", "hobbies", "homes")


def surprise(story) -> float:
    """The bits that a story shows of its choices, as notebook 03 counts them."""
    return sum(math.log2(256 / choice.options.count(choice.shown)) for choice in story.choices)


class World:
    """The values of every slot, and how likely entries agree with those seen in a text."""

    def __init__(self, world):
        self.people = {"A": world.heroes, "B": world.friends}
        self.tables = [*(getattr(world, name) for name in FIXED), TABLES.looks, TABLES.second_looks]
        self.tables += TABLES.scenes
        self.values = defaultdict(set)
        things = [TABLES.things, TABLES.second_things]
        for table in (*self.tables, *things, *([e for e, _ in p] for p in self.people.values())):
            for entry in table:
                for slot, value in entry.items():
                    self.values[slot].add(value)
        for slot, table in self.people.items():
            for _, names in table:
                self.values[slot].update(names)

    def probability(self, seen: dict[str, str]) -> float:
        result = self.of_people(seen) * of_things(seen)
        for table in self.tables:
            result *= sum(agrees(entry, seen) for entry in table) / 256
        return result

    def of_people(self, seen):
        total = 0
        for hero, names in merged(self.people["A"]):
            for friend, friend_names in merged(self.people["B"]):
                if agrees(hero, seen) and agrees(friend, seen):
                    clashing = [
                        friend_names[i - 1] if name == seen["A"] else name
                        for i, name in enumerate(friend_names)
                    ]
                    both = names.count(seen["A"]) * clashing.count(seen["B"])
                    total += both * self.count("A", hero) * self.count("B", friend)
        return total / 256**4

    def count(self, slot, entry):
        return sum(other == entry for other, _ in self.people[slot])


def merged(people):
    """Different entries of a table of characters."""
    return {tuple(entry.items()): (entry, names) for entry, names in people}.values()


def agrees(entry, seen):
    return all(seen.get(slot, value) == value for slot, value in entry.items())


def of_things(seen):
    total = 0
    for thing in TABLES.things:
        if agrees(thing, seen):
            second = TABLES.second_things
            total += sum(
                agrees(second[i - 1] if entry["obj2"] == thing["obj"] else entry, seen)
                for i, entry in enumerate(second)
            )
    return total / 256**2


@cache
def pieces(template):
    return SLOT.split(template)


def read(text, start, parts, seen, world):
    """Yield (end, slots seen) of every way to read `parts`, literals and slots, from `start`."""
    if not text.startswith(parts[0], start):
        return
    start += len(parts[0])
    if len(parts) == 1:
        yield start, seen
        return
    slot = parts[1]
    for value in [seen[slot]] if slot in seen else world.values[slot]:
        for end, inside in read(text, start, pieces(value), seen | {slot: value}, world):
            yield from read(text, end, parts[2:], inside, world)


def likelihood(text: str) -> tuple[float, int]:
    """The probability of `text` over all draws, and in how many ways it can be read."""
    total, ways = 0.0, 0
    plots = {id(steps): (steps, cases) for steps, cases in TABLES.plots}
    worlds = {id(world): World(world) for world in TABLES.worlds}
    for key, world in worlds.items():
        share = sum(id(other) == key for other in TABLES.worlds) / 256
        for plot, (steps, cases) in plots.items():
            plot_share = sum(id(other) == plot for other, _ in TABLES.plots) / 256
            for case in {tuple(case.items()) for case in cases}:
                front = [(0, dict(case), share * plot_share * cases.count(dict(case)) / 256)]
                for table in steps:
                    front = [
                        (end, now, odds * number / 256)
                        for start, seen, odds in front
                        for sentence, number in Counter(table).items()
                        for end, now in read(text, start, pieces(sentence), seen, world)
                    ]
                for end, seen, odds in front:
                    if end == len(text):
                        total += odds * world.probability(seen)
                        ways += 1
    return total, ways


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 40))]
)
def test_a_story_can_be_read_in_one_way_and_is_as_surprising_as_its_choices(number):
    story = held_out_stories(number + 1)[number]
    probability, ways = likelihood(story.text)
    assert ways == 1
    assert surprise(story) == pytest.approx(-math.log2(probability), abs=1e-9)


def test_the_stories_are_those_of_the_validation_split():
    text = "".join(story.text for story in held_out_stories(5))
    assert "".join(generate_stories(len(text), split="validation")) == text


def test_a_byte_that_the_text_does_not_show_costs_nothing():
    draws = bytearray(56)
    text, choices = tell(bytes(draws)), choices_of(bytes(draws))
    for index, choice in enumerate(choices):
        for byte in (1, 77, 255):
            changed = bytearray(draws)
            changed[index] = byte
            # options that look alike tell the same story, and others another one
            same = choice.options[byte] == choice.shown
            assert (tell(bytes(changed)) == text) == same
