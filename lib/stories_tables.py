"""The grammar of the embedded stories, compiled into tables that `lib/stories.py` draws from."""

import re
from dataclasses import dataclass
from functools import cache
from hashlib import shake_256
from itertools import count, cycle, islice
from math import gcd

from lib import stories_grammar as grammar
from lib.pretokenize import SEPARATOR

_TABLE_SIZE = 256

Slots = dict[str, str]
_PRONOUNS = {"he": ("he", "him", "his", "himself"), "she": ("she", "her", "her", "herself")}


@dataclass(frozen=True)
class World:
    """Tables of 256 entries for stories about children, or about animals."""

    heroes: list[tuple[Slots, list[str]]]  # slots of the hero, names to choose from
    friends: list[tuple[Slots, list[str]]]
    grownups: list[Slots]
    places: list[Slots]
    habits: list[Slots]
    homes: list[Slots]


@dataclass(frozen=True)
class Tables:
    """Everything a story is drawn from; every list has 256 entries, so that a byte is a choice."""

    worlds: list[World]
    things: list[Slots]
    second_things: list[Slots]
    looks: list[Slots]
    second_looks: list[Slots]
    scenes: list[list[Slots]]  # day, food, critter, trait, size: one choice each
    plots: list[tuple[list[list[str]], list[Slots]]]  # tables of the steps, cases


@cache
def build_tables() -> Tables:
    """Compile the grammar (once, about 0.2 s)."""
    children, animals = _child_world(), _animal_world()
    shapes = [_slots(adj=word, a_adj=_a(word)) for word in _commas(grammar.ADJECTIVES)]
    things = [
        _slots(obj=noun, a_obj=_a(noun), use=use, using=using)
        for noun, use, using in _rows(grammar.OBJECTS)
    ]
    scenes = [
        [_slots(Day=day, weather=weather) for day, weather in _rows(grammar.DAYS)],
        [_slots(a_food=f, main=m, extra=e) for f, m, e in _rows(grammar.FOODS)],
        [_slots(critter=word, a_critter=_a(word)) for word in _commas(grammar.CRITTERS)],
        [_slots(trait=trait) for trait in _commas(grammar.TRAITS)],
        [_slots(a_size=_a(size)) for size in _commas(grammar.SIZES)],
    ]
    plots = [
        (_steps(text), _stretch(_cases(grammar.CASES.get(name, ""))))
        for name, text in grammar.PLOTS.items()
    ]
    return Tables(
        worlds=_stretch([children, children, animals]),
        things=_stretch(things),
        second_things=_stretch([_second(thing) for thing in things]),
        looks=_stretch(shapes),
        second_looks=_stretch([_second(shape) for shape in shapes]),
        scenes=[_stretch(table) for table in scenes],
        plots=_stretch(plots),
    )


def _child_world() -> World:
    girl = (_person("", "she", kind="girl", hand="hand"), _stretch(grammar.GIRLS.split()))
    boy = (_person("", "he", kind="boy", hand="hand"), _stretch(grammar.BOYS.split()))
    girl_friend = (_person("b", "she", Bfull="{B}"), girl[1])
    boy_friend = (_person("b", "he", Bfull="{B}"), boy[1])
    # most friends of children are children
    animals = _animal_friends()
    friends = [girl_friend, boy_friend] * (2 * len(animals)) + animals
    return World(
        heroes=_stretch([girl, boy]),
        friends=_stretch(_spread(friends)),
        grownups=_stretch(_grownups(grammar.CHILD_GROWNUPS)),
        places=_stretch(_places(grammar.CHILD_PLACES)),
        habits=_stretch([_slots(hobby=habit) for habit in _commas(grammar.CHILD_HOBBIES)]),
        homes=_stretch([_slots(home=home) for home in _semicolons(grammar.CHILD_HOMES)]),
    )


def _animal_world() -> World:
    names = _stretch(grammar.ANIMAL_NAMES.split())
    heroes = [
        (_person("", pronoun, kind=kind, hand=hand), names)
        for kind, hand in (entry.split() for entry in _commas(grammar.ANIMALS))
        for pronoun in _PRONOUNS
    ]
    return World(
        heroes=_stretch(heroes),
        friends=_stretch(_animal_friends()),
        grownups=_stretch(_grownups(grammar.ANIMAL_GROWNUPS)),
        places=_stretch(_places(grammar.ANIMAL_PLACES)),
        habits=_stretch([_slots(hobby=habit) for habit in _commas(grammar.ANIMAL_HOBBIES)]),
        homes=_stretch([_slots(home=home) for home in _semicolons(grammar.ANIMAL_HOMES)]),
    )


def _animal_friends() -> list[tuple[Slots, list[str]]]:
    names = _stretch(grammar.ANIMAL_NAMES.split())
    kinds = [entry.split()[0] for entry in _commas(grammar.ANIMALS)]
    return [
        (_person("b", pronoun, Bfull="{B} the " + kind), names)
        for kind in kinds
        for pronoun in _PRONOUNS
    ]


def _person(prefix: str, pronoun: str, **others: str) -> Slots:
    """Return the slots of a character: {he}, {him}, ... for the hero, {bhe}, ... for "b"."""
    slots = {}
    for form, word in zip(_PRONOUNS["he"], _PRONOUNS[pronoun]):
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
    """Return one entry for each place, view and rotation of the hiding spots."""
    entries = []
    for the_place, at, spots, views in _rows(text):
        spots = _commas(spots)
        for turn, view in zip(range(12), cycle(_commas(views))):
            spot1, spot2, spot3 = islice(cycle(spots), turn, turn + 3)
            entries.append(
                _slots(the_place=the_place, at=at, view=view, spot1=spot1, spot2=spot2, spot3=spot3)
            )
    return _spread(entries)


def _cases(text: str) -> list[Slots]:
    """Return the slots of each case; one empty case for a plot without cases."""
    if not text:
        return [{}]
    names, *rows = _rows(text)
    return [_slots(**dict(zip(names, row))) for row in rows]


def _steps(text: str) -> list[list[str]]:
    """Compile a plot into one table of sentences for each step, with the space before each."""
    tables, gap = [], ""
    for step in re.split(r"\n\n|\n(?=/)|(?<=\n/)\n", _unwrap(text).strip()):
        if step == "/":
            gap = "\n\n"
            continue
        if step.startswith("@"):
            step = _unwrap(grammar.SHARED[step[1:]]).strip()
        tables.append(_sentences(step.split("\n"), gap))
        gap = " "
    ending = f"\n{SEPARATOR}\n"
    tables[-1] = [sentence + ending for sentence in tables[-1]]
    return tables


def _sentences(lines: list[str], gap: str) -> list[str]:
    """Return 256 ways to tell one step, its lines equally often, each with inner choices."""
    each = -(-_TABLE_SIZE // len(lines))
    ways = [_ways(line, gap, each) for line in lines]
    return [ways[i % len(lines)][i // len(lines)] for i in range(_TABLE_SIZE)]


def _ways(line: str, gap: str, number: int) -> list[str]:
    """Return `number` readings of `line`, with one of the alternatives for each [a|b|c] in it."""
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
    texts = [*grammar.PLOTS.values(), *grammar.SHARED.values(), *grammar.CASES.values()]
    return frozenset(re.findall(r"\{(\w+)\}", " ".join(texts))) | {"obj", "obj2"}


def _second(slots: Slots) -> Slots:
    return {name + "2": value for name, value in slots.items()}


def _percent(text: str) -> str:
    return re.sub(r"\{(\w+)\}", r"%(\1)s", text)


def _tidy(text: str) -> str:
    """Drop the spaces that an empty alternative leaves behind."""
    while "  " in text:
        text = text.replace("  ", " ")
    return text.replace(" .", ".").replace(" ,", ",").replace(" !", "!").replace(" ?", "?")


def _a(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _unwrap(text: str) -> str:
    return re.sub(r"\n +", " ", text)


def _rows(text: str) -> list[list[str]]:
    """Return the cells of a table with one entry a line and ";" between its cells."""
    return [line.split("; ") for line in _unwrap(text).strip().split("\n")]


def _commas(text: str) -> list[str]:
    return [" ".join(entry.split()) for entry in text.strip().split(",")]


def _semicolons(text: str) -> list[str]:
    return [" ".join(entry.split()) for entry in text.strip().split(";")]


def _spread(entries: list) -> list:
    """Return at most 256 of `entries`, in an order where neighbours in the list are far apart."""
    step = next(n for n in count(len(entries) * 5 // 8) if gcd(n, len(entries)) == 1)
    return [entries[i * step % len(entries)] for i in range(min(len(entries), _TABLE_SIZE))]


def _stretch(entries: list) -> list:
    """Return `entries`, repeated in order to 256, so that any byte is an index."""
    assert 0 < len(entries) <= _TABLE_SIZE, f"{len(entries)} entries do not fit one byte"
    return list(islice(cycle(entries), _TABLE_SIZE))
