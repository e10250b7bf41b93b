"""Settings from flags where tyro is missing, as in Kaggle's image: without help, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from lib.strict_json import from_dict, to_dict

T = TypeVar("T")


def with_flags(config: T, flags: Sequence[str]) -> T:
    """The dataclass `config` with what `flags` say: `--steps 10`, `--model.d_model=64`, `--resume`.

    Of a bool the name alone says True, and `--no_name` False. A list takes several values.

    Raises:
        ValueError: a name that `config` does not have, or a value of a wrong type.
    """
    values = to_dict(config)
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        name, _, value = flag.removeprefix("--").partition("=")
        words = [value] if value else []
        while rest and not rest[0].startswith("--"):
            words.append(rest.pop(0))
        *parents, last = name.split(".")
        part: Any = values
        for parent in parents:
            part = part.get(parent) if isinstance(part, dict) else None
        part = part if isinstance(part, dict) else {}
        key = last if last in part else last.removeprefix("no_")
        if not flag.startswith("--") or key not in part:
            known = ", ".join(f"--{name}" for name in values)
            raise ValueError(f"unknown flag {flag!r}; known without tyro: {known}")
        part[key] = _value(words, part[key], is_on=key == last)
    return from_dict(type(config), values)


def _value(words: list[str], before: Any, *, is_on: bool) -> Any:
    """A flag's words as a JSON value of about the kind of `before`."""
    if isinstance(before, bool) and not words:
        return is_on
    values = [_json(word) for word in words]
    return values if isinstance(before, list) or len(values) != 1 else values[0]


def _json(word: str) -> Any:
    """A number or null as such, everything else as the word that it is."""
    try:
        return None if word == "None" else json.loads(word)
    except ValueError:
        return word
