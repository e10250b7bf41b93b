"""The floor of notebook 03: how many bits a generated story holds, counted draw by draw.

A story is told from bytes, and each byte picks an entry of a table (`lib/data/stories.py`). If 16
of the 256 entries would have put the same words into this story, its text shows 4 bits of that
byte. The bits of all its bytes add up to the story's surprise to somebody who knows every table,
and no model can expect to do better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from lib.data.stories import SLOT, Slots, block_draws, build_tables, in_validation, tell
from lib.tokenizer.pretokenize import SEPARATOR


@dataclass(frozen=True)
class Choice:
    """One byte of a story, and what each of its 256 values would have put into the text."""

    about: str
    """"cast", "things", "scenery", "plot" or "words"."""

    options: Sequence[Any]
    """The part of the text that shows the choice, for each of the 256 values of the byte."""

    byte: int

    @property
    def shown(self) -> Any:
        """Return the part of this story that shows the choice."""
        return self.options[self.byte]


@dataclass(frozen=True)
class ToldStory:
    """A story with its separator, and the choices that made it."""

    text: str
    choices: list[Choice]


def held_out_stories(number: int, *, seed: int = 0) -> list[ToldStory]:
    """Return the first `number` stories of the validation split of `seed`."""
    stories: list[ToldStory] = []
    for block in count():
        for draws in block_draws(seed, block):
            if in_validation(text := tell(draws)):
                stories.append(ToldStory(text, choices_of(draws)))
                if len(stories) == number:
                    return stories
    raise AssertionError("blocks have no end")


def bits_per_byte(stories: Sequence[ToldStory]) -> float:
    """The floor: the bits of all choices that made `stories`, for each byte of their text."""
    choices = [choice for story in stories for choice in story.choices]
    bits = sum(math.log2(256 / choice.options.count(choice.shown)) for choice in choices)
    # a separator has no bytes, as for the models
    return bits / sum(len(story.text.replace(SEPARATOR, "").encode()) for story in stories)


def choices_of(draws: bytes) -> list[Choice]:
    """Return the choices that `draws` make, in the order of `lib.data.stories.tell`."""
    return list(_choices(draws))


def _choices(draws: bytes) -> Iterator[Choice]:
    tables = build_tables()
    byte = iter(draws)
    world_byte, hero_byte, friend_byte, name_byte, friend_name_byte = islice(byte, 5)
    world = tables.worlds[world_byte]
    (hero, names), (friend, friend_names) = world.heroes[hero_byte], world.friends[friend_byte]
    looks = (tables.looks, tables.second_looks)
    surroundings = (world.grownups, world.places, world.hobbies, world.homes)
    thing_byte, second_byte = islice(byte, 2)
    # on a clash of names or things, a story takes the entry before
    name, thing = names[name_byte], tables.things[thing_byte]
    second_names = [friend_names[i - 1] if n == name else n for i, n in enumerate(friend_names)]
    second = tables.second_things
    seconds = [second[i - 1] if s["obj2"] == thing["obj"] else s for i, s in enumerate(second)]
    things = list(zip((tables.things, seconds), (thing_byte, second_byte)))
    things += list(zip(looks, byte))
    scenery = list(zip((*surroundings, *tables.scenes), byte))
    plot_byte, case_byte = islice(byte, 2)
    steps, cases = tables.plots[plot_byte]
    words = list(zip(steps, byte))

    # which slots the sentences show, and those inside of what fills these
    chosen = [hero, friend, cases[case_byte]]
    chosen += [table[index] for table, index in (*things, *scenery)]
    told = "".join(table[index] for table, index in words)
    values = {slot: value for entry in chosen for slot, value in entry.items()}
    used = set(SLOT.findall(told))
    used |= {inner for slot in used for inner in SLOT.findall(values.get(slot, ""))}

    yield Choice("cast", [id(option.heroes) for option in tables.worlds], world_byte)
    yield Choice("cast", _shown_people(world.heroes, used), hero_byte)
    yield Choice("cast", _shown_people(world.friends, used), friend_byte)
    yield Choice("cast", names, name_byte)
    yield Choice("cast", second_names, friend_name_byte)
    for table, index in things:
        yield Choice("things", _shown(table, used), index)
    for table, index in scenery:
        yield Choice("scenery", _shown(table, used), index)
    yield Choice("plot", [id(plot_steps) for plot_steps, _ in tables.plots], plot_byte)
    yield Choice("plot", _shown(cases, used), case_byte)
    for sentences, index in words:
        yield Choice("words", sentences, index)


def _shown(table: Sequence[Slots], used: set[str]) -> list[tuple[str, ...]]:
    """Return what each entry puts into the slots that a story uses."""
    slots = [slot for slot in table[0] if slot in used]
    return [tuple(entry[slot] for slot in slots) for entry in table]


def _shown_people(table: Sequence[tuple[Slots, list[str]]], used: set[str]) -> list[tuple]:
    """Return `_shown` of characters, each with the list that the name comes from."""
    shown = _shown([slots for slots, _ in table], used)
    return [(id(names), *values) for (_, names), values in zip(table, shown)]
