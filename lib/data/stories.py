"""Generated corpus: short children's stories from a seeded grammar, any size, no download.

A story is drawn in three moves. First the cast: a hero, a friend, a grown-up, a place with its
hiding spots, things, food, weather. Then a plot, and for each of its steps one of the ways to tell
it. Last, the slots in those sentences are filled with the cast, so that the thing lost in the first
paragraph is the one found in the last, pronouns agree, and the place stays the same.

All choices come from bytes of SHAKE-256 (FIPS 202), keyed by seed and block number, and a choice is
one byte that indexes a table of 256 entries. No random number library, hash order or float is
involved, so the text is the same on every platform and Python version.

Train and validation share no story, whatever their seeds and sizes: a story's own text decides its
split (validation if its CRC-32 is divisible by 8). A CRC-32 cannot be guessed from reading a story,
so the two splits look alike to a model.

The words and plots are in `stories.txt`, which documents its format; `build_tables` compiles it.
"""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import shake_256
from itertools import count, cycle, islice
from math import gcd
from pathlib import Path

from lib.core.settings import whole_number
from lib.tokenizer.pretokenize import SEPARATOR

# part of every key and of every prepared corpus: raise it when the text changes
GENERATOR_VERSION = 1
SPLITS = ("train", "validation")
STORIES_PER_BLOCK = 256
DRAWS_PER_STORY = 56
VALIDATION_EVERY = 8
TABLE_SIZE = 256
PRONOUNS = {"he": ("he", "him", "his", "himself"), "she": ("she", "her", "her", "herself")}
# the name of a slot -> the text that fills it
Slots = dict[str, str]
# a slot in a compiled sentence
SLOT = re.compile(r"%\((\w+)\)s")


def generate_stories(num_bytes: int, *, seed: int = 0, split: str = "train") -> Iterator[str]:
    """Yield blocks of whole stories, ASCII, until at least `num_bytes` bytes have been yielded.

    Each story is followed by a newline, `<|endoftext|>` and a newline. The text ends with the first
    story that reaches `num_bytes`, so a longer request begins with the text of a shorter one.

    Args:
        split: "train" or "validation", which never share a story. One story in eight belongs to
            validation, so that split is seven times slower to make.

    Raises:
        ValueError: unknown split, `num_bytes` is not an integer from 1, or `seed` not from 0.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    num_bytes = whole_number("num_bytes", num_bytes, least=1)
    return _generate(num_bytes, whole_number("seed", seed, least=0), split == "validation")


def _generate(num_bytes: int, seed: int, is_validation: bool) -> Iterator[str]:
    missing = num_bytes
    for number in count():
        stories = [
            text
            for text in map(tell, block_draws(seed, number))
            if in_validation(text) == is_validation
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


def block_draws(seed: int, number: int) -> list[bytes]:
    """Return the draws of each story in block `number` of `seed`, both splits."""
    key = f"stories {GENERATOR_VERSION} seed {seed} block {number}".encode()
    draws = shake_256(key).digest(STORIES_PER_BLOCK * DRAWS_PER_STORY)
    starts = range(0, len(draws), DRAWS_PER_STORY)
    return [draws[start : start + DRAWS_PER_STORY] for start in starts]


def in_validation(text: str) -> bool:
    """Whether a story, with its separator, belongs to the validation split."""
    return zlib.crc32(text.encode()) % VALIDATION_EVERY == 0


@dataclass(frozen=True)
class World:
    """Tables of 256 entries for stories about children, or about animals."""

    heroes: list[tuple[Slots, list[str]]]  # slots of the hero, names to choose from
    friends: list[tuple[Slots, list[str]]]
    grownups: list[Slots]
    places: list[Slots]
    hobbies: list[Slots]
    homes: list[Slots]


@dataclass(frozen=True)
class Tables:
    """Everything a story is drawn from; each list has 256 entries, so that a byte is a choice."""

    worlds: list[World]
    things: list[Slots]
    second_things: list[Slots]
    looks: list[Slots]
    second_looks: list[Slots]
    scenes: list[list[Slots]]  # day, food, critter, trait, size: one choice each
    plots: list[tuple[list[list[str]], list[Slots]]]  # tables of the steps, cases


def tell(draws: bytes) -> str:
    """Tell the story that `draws` encode, with its separator."""
    tables = build_tables()
    draw = iter(draws)
    pick = draw.__next__

    # the cast; on a clash of names or things, take the entry before
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
        **world.hobbies[pick()],
        **world.homes[pick()],
    }
    for table in tables.scenes:
        slots.update(table[pick()])

    # the plot, and a sentence for each of its steps
    steps, cases = tables.plots[pick()]
    slots.update(cases[pick()])
    text = "".join([table[index] for table, index in zip(steps, draw)])

    # twice, since the text of a slot may hold slots itself: {G} is "{his} mom"
    return text % slots % slots


# Compiling the grammar


@cache
def build_tables() -> Tables:
    """Compile the grammar (once, about 0.2 s)."""
    words = _grammar()
    children, animals = _child_world(), _animal_world()
    looks = [_slots(adj=word, a_adj=_a(word)) for word in _commas(words["adjectives"])]
    things = [
        _slots(obj=noun, a_obj=_a(noun), use=use, using=using)
        for noun, use, using in _rows(words["objects"])
    ]
    scenes = [
        [_slots(Day=day, weather=weather) for day, weather in _rows(words["days"])],
        [_slots(a_food=food, main=m, extra=e) for food, m, e in _rows(words["foods"])],
        [_slots(critter=word, a_critter=_a(word)) for word in _commas(words["critters"])],
        [_slots(trait=trait) for trait in _commas(words["traits"])],
        [_slots(a_size=_a(size)) for size in _commas(words["sizes"])],
    ]
    plots = [
        (_steps(text), _stretch(_cases(words.get(f"cases {name.removeprefix('plot ')}"))))
        for name, text in words.items()
        if name.startswith("plot ")
    ]
    return Tables(
        worlds=_stretch([children, children, animals]),
        things=_stretch(things),
        second_things=_stretch([_second(thing) for thing in things]),
        looks=_stretch(looks),
        second_looks=_stretch([_second(look) for look in looks]),
        scenes=[_stretch(table) for table in scenes],
        plots=_stretch(plots),
    )


@cache
def _grammar() -> dict[str, str]:
    """Read `stories.txt`: the name of each section -> its text, without comments."""
    text = (Path(__file__).parent / "stories.txt").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    _, *sections = re.split(r"^== (.+)\n", text, flags=re.MULTILINE)
    # continue the line above with an indented one
    bodies = (re.sub(r"\n +", " ", body).strip() for body in sections[1::2])
    return dict(zip(sections[::2], bodies))


def _child_world() -> World:
    words = _grammar()
    girl = (_person("", "she", kind="girl", hand="hand"), _stretch(words["girls"].split()))
    boy = (_person("", "he", kind="boy", hand="hand"), _stretch(words["boys"].split()))
    girl_friend = (_person("b", "she", Bfull="{B}"), girl[1])
    boy_friend = (_person("b", "he", Bfull="{B}"), boy[1])
    # most friends of children are children
    animals = _animal_friends()
    friends = [girl_friend, boy_friend] * (2 * len(animals)) + animals
    return World(
        heroes=_stretch([girl, boy]), friends=_stretch(_spread(friends)), **_surroundings("child")
    )


def _animal_world() -> World:
    names = _stretch(_grammar()["animal_names"].split())
    heroes = [
        (_person("", pronoun, kind=kind, hand=hand), names)
        for kind, hand in (entry.split() for entry in _commas(_grammar()["animals"]))
        for pronoun in PRONOUNS
    ]
    return World(
        heroes=_stretch(heroes), friends=_stretch(_animal_friends()), **_surroundings("animal")
    )


def _surroundings(world: str) -> dict[str, list[Slots]]:
    """Return the tables of grown-ups, places, hobbies and homes of a world: "child" or "animal"."""
    words = _grammar()
    return {
        "grownups": _stretch(_grownups(words[f"{world}_grownups"])),
        "places": _stretch(_places(words[f"{world}_places"])),
        "hobbies": _stretch([_slots(hobby=hobby) for hobby in _commas(words[f"{world}_hobbies"])]),
        "homes": _stretch([_slots(home=home) for home in _commas(words[f"{world}_homes"], ";")]),
    }


def _animal_friends() -> list[tuple[Slots, list[str]]]:
    names = _stretch(_grammar()["animal_names"].split())
    kinds = [entry.split()[0] for entry in _commas(_grammar()["animals"])]
    return [
        (_person("b", pronoun, Bfull="{B} the " + kind), names)
        for kind in kinds
        for pronoun in PRONOUNS
    ]


def _person(prefix: str, pronoun: str, **others: str) -> Slots:
    """Return the slots of a character: {he}, {him}, ... for the hero, {bhe}, ... for "b"."""
    slots = {}
    for form, word in zip(PRONOUNS["he"], PRONOUNS[pronoun]):
        slots[prefix + form] = word
        slots[prefix + form.capitalize()] = word.capitalize()
    if "hand" in others:
        plural = {"hoof": "hooves", "foot": "feet"}
        others["hands"] = plural.get(others["hand"], others["hand"] + "s")
    return slots | _slots(**others)


def _grownups(text: str) -> list[Slots]:
    return [
        _person("g", pronoun)
        | _slots(
            G=who,
            GG=who.replace("{his}", "{His}").replace("the ", "The "),
            yourG=who.replace("{his}", "your"),
            Gcall=call,
        )
        for who, call, pronoun in _rows(text)
    ]


def _places(text: str) -> list[Slots]:
    """Return an entry for each place, view and rotation of the hiding spots."""
    entries = []
    for the_place, at, spots, views in _rows(text):
        spots = _commas(spots)
        for shift, view in zip(range(12), cycle(_commas(views))):
            spot1, spot2, spot3 = islice(cycle(spots), shift, shift + 3)
            entries.append(
                _slots(the_place=the_place, at=at, view=view, spot1=spot1, spot2=spot2, spot3=spot3)
            )
    return _spread(entries)


def _cases(text: str | None) -> list[Slots]:
    """Return the slots of each case of a plot; one empty case for a plot without cases."""
    if text is None:
        return [{}]
    names, *rows = _rows(text)
    return [_slots(**dict(zip(names, row))) for row in rows]


def _steps(text: str) -> list[list[str]]:
    """Compile a plot to a table of sentences for each step, with the space before each."""
    tables, gap = [], ""
    for step in re.split(r"\n\n|\n(?=/)|(?<=\n/)\n", text):
        if step == "/":
            gap = "\n\n"
            continue
        if step.startswith("@"):
            step = _grammar()[f"step {step[1:]}"]
        tables.append(_sentences(step.split("\n"), gap))
        gap = " "
    ending = f"\n{SEPARATOR}\n"
    tables[-1] = [sentence + ending for sentence in tables[-1]]
    return tables


def _sentences(lines: list[str], gap: str) -> list[str]:
    """Return 256 ways to tell a step: each line equally often, with its inner choices made."""
    each = -(-TABLE_SIZE // len(lines))
    ways = [_ways(line, gap, each) for line in lines]
    return [ways[i % len(lines)][i // len(lines)] for i in range(TABLE_SIZE)]


def _ways(line: str, gap: str, number: int) -> list[str]:
    """Return `number` readings of `line`, with one alternative chosen for each [a|b|c] in it."""
    if line == "-":
        return [""] * number
    fixed, *rest = re.split(r"\[(.*?)\]", gap + _percent(line))
    groups = [options.split("|") for options in rest[::2]]
    draws = iter(shake_256(line.encode()).digest(number * len(groups)))
    readings = []
    for _ in range(number):
        pieces = [fixed]
        for options, tail in zip(groups, rest[1::2]):
            pieces += options[next(draws) % len(options)], tail
        readings.append(_tidy("".join(pieces)))
    return readings


def _slots(**values: str) -> Slots:
    """Return `values` with their slots in % form, and the forms {Slot}, {the_slot}, {The_slot}."""
    slots = {}
    for name, value in values.items():
        slots[name] = value
        slots.setdefault(name[0].upper() + name[1:], value[:1].upper() + value[1:])
        if re.match("an? ", value):
            the_value = re.sub("^an?", "the", value)
            slots["the_" + name] = the_value
            slots["The_" + name] = the_value.capitalize()
    used = _used_slots()
    return {name: _percent(value) for name, value in slots.items() if name in used}


@cache
def _used_slots() -> frozenset[str]:
    """Return the slots that any plot, shared step or case mentions."""
    kinds = ("plot ", "step ", "cases ")
    texts = [text for name, text in _grammar().items() if name.startswith(kinds)]
    return frozenset(re.findall(r"\{(\w+)\}", " ".join(texts))) | {"obj", "obj2"}


def _second(slots: Slots) -> Slots:
    return {name + "2": value for name, value in slots.items()}


def _percent(text: str) -> str:
    """Turn `{slot}` into `%(slot)s`, which Python fills faster."""
    return re.sub(r"\{(\w+)\}", r"%(\1)s", text)


def _tidy(text: str) -> str:
    """Drop the spaces that an empty alternative leaves behind."""
    while "  " in text:
        text = text.replace("  ", " ")
    return text.replace(" .", ".").replace(" ,", ",").replace(" !", "!").replace(" ?", "?")


def _a(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _rows(text: str) -> list[list[str]]:
    """Split a table into rows (lines) and cells (at ";")."""
    return [line.split("; ") for line in text.split("\n")]


def _commas(text: str, separator: str = ",") -> list[str]:
    return [" ".join(entry.split()) for entry in text.split(separator)]


def _spread(entries: list) -> list:
    """Return at most 256 of `entries`, in an order that keeps neighbors in the list far apart."""
    step = next(n for n in count(len(entries) * 5 // 8) if gcd(n, len(entries)) == 1)
    return [entries[i * step % len(entries)] for i in range(min(len(entries), TABLE_SIZE))]


def _stretch(entries: list) -> list:
    """Repeat `entries` in order up to 256, so that any byte is an index."""
    assert 0 < len(entries) <= TABLE_SIZE, f"{len(entries)} entries do not fit one byte"
    return list(islice(cycle(entries), TABLE_SIZE))
