"""Embedded corpus: short children's stories from a seeded grammar, any size, no download.

A story is drawn in three moves. Who, where and what are drawn first: a hero, a friend, a grown-up,
a place with its hiding spots, things, food, weather. Then a plot, and for each of its steps one of
the ways to tell it. Last, the slots in those sentences are filled from the first move, so that the
thing lost in the first paragraph is the one found in the last, pronouns agree, and the place stays.

Everything is drawn from bytes of SHAKE-256 (FIPS 202), keyed by seed and block number, and a choice
is one byte looked up in a table of 256 entries: no random number library, hash order or float is
involved, so the text is the same on every platform and version of Python.

Train and validation share no story, whatever their seeds and sizes: a story's own text decides
where it belongs (validation if its CRC-32 is divisible by 8), so no text can be in both. Nobody who
reads a story can guess its CRC-32, so the two parts look alike to a model.
"""

import zlib
from collections.abc import Iterator
from hashlib import shake_256
from itertools import count

from lib.stories_tables import SEPARATOR, Tables, build_tables

__all__ = ["GENERATOR_VERSION", "SEPARATOR", "SPLITS", "generate_stories"]

# part of every key below and of every prepared corpus: raise it when the text changes
GENERATOR_VERSION = 1
SPLITS = ("train", "validation")

_STORIES_PER_BLOCK = 256
_DRAWS_PER_STORY = 56
_VALIDATION_EVERY = 8


def generate_stories(num_bytes: int, *, seed: int = 0, split: str = "train") -> Iterator[str]:
    """Yield blocks of whole stories, ASCII, until at least `num_bytes` bytes have been yielded.

    Each story is followed by a newline, `<|endoftext|>` and a newline. The text ends with the first
    story that reaches `num_bytes`, so a longer request begins with the text of a shorter one.
    `split` is "train" or "validation"; the two never share a story (see the module's docstring).
    Validation stories are one in eight of those drawn, so that part is made seven times slower.

    Raises ValueError for an unknown split, and for a size or seed that is not a whole number from 1
    or from 0 on.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; known: {', '.join(SPLITS)}")
    for name, value, smallest in (("num_bytes", num_bytes, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or value < smallest:
            raise ValueError(f"{name} {value!r} must be a whole number >= {smallest}")
    return _generate(num_bytes, seed, split == "validation")


def _generate(num_bytes: int, seed: int, validation: bool) -> Iterator[str]:
    missing = num_bytes
    for number in count():
        stories = [
            text
            for text in _draw_block(seed, number)
            if (zlib.crc32(text.encode()) % _VALIDATION_EVERY == 0) == validation
        ]
        block = "".join(stories)
        if len(block) < missing:
            missing -= len(block)
            yield block
            continue
        end = 0
        for text in stories:
            end += len(text)
            if end >= missing:
                yield block[:end]
                return


def _draw_block(seed: int, number: int) -> list[str]:
    """Return block `number` of the stories of `seed`, both splits, each with its separator."""
    tables = build_tables()
    key = f"stories {GENERATOR_VERSION} seed {seed} block {number}".encode()
    draws = shake_256(key).digest(_STORIES_PER_BLOCK * _DRAWS_PER_STORY)
    return [
        _tell(tables, draws[start : start + _DRAWS_PER_STORY])
        for start in range(0, len(draws), _DRAWS_PER_STORY)
    ]


def _tell(tables: Tables, draws: bytes) -> str:
    """Tell the story that `draws` stand for."""
    draw = iter(draws)
    pick = draw.__next__
    world = tables.worlds[pick()]
    hero, names = world.heroes[pick()]
    friend, friend_names = world.friends[pick()]
    name, friend_index = names[pick()], pick()
    friend_name = friend_names[friend_index]
    if friend_name == name:
        friend_name = friend_names[friend_index - 1]
    thing, second_index = tables.things[pick()], pick()
    second = tables.second_things[second_index]
    if second["obj2"] == thing["obj"]:
        second = tables.second_things[second_index - 1]
    slots = {
        "A": name,
        "B": friend_name,
        **hero,
        **friend,
        **thing,
        **second,
        **tables.looks[pick()],
        **tables.second_looks[pick()],
        **world.grownups[pick()],
        **world.places[pick()],
        **world.habits[pick()],
        **world.homes[pick()],
    }
    for table in tables.scenes:
        slots.update(table[pick()])
    steps, cases = tables.plots[pick()]
    slots.update(cases[pick()])
    text = "".join([table[index] for table, index in zip(steps, draw)])
    # twice, since what fills a slot may hold slots itself: {G} is "{his} mom"
    return text % slots % slots
