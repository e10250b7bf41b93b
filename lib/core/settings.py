"""Settings: dataclasses checked when made, strict JSON and flags, errors that name the field.

A config is a frozen dataclass that lives with its owner. Its `__post_init__` checks the types with
`check_fields`, then the values with `check`; its fields and their docs become the flags and the
`--help` of its command. `to_json` and `from_json` move it through a file without loss, and
`with_flags` reads flags where tyro is missing, as in Kaggle's image.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import operator
import os
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T", bound=Any)
TYPE_NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
}


def require(condition: object, message: str) -> None:
    """Raise a `ValueError` with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def whole_number(name: str, value: Any, least: int) -> int:
    """Return the argument `value` as Python's integer; NumPy's count, True and 3.0 do not.

    Raises:
        ValueError: it is no whole number or less than `least`; the message names it.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{name} must be a whole number, at least {least}, got {value!r}")
    return number


def check(config: Any, field: str, condition: object, expected: str) -> None:
    """Raise `ValueError: FIELD must be EXPECTED, got VALUE` unless `condition` holds."""
    require(condition, f"{field} must be {expected}, got {getattr(config, field)!r}")


def check_fields(config: Any) -> None:
    """Check that each field has a value of its type, and numbers that a machine can hold.

    Where only one value can be meant, the field takes that one: a tuple for a list, a `Path` for
    text, a float for a whole number, Python's number for NumPy's.

    Raises:
        ValueError: a field has another type, is infinite or NaN, or has more than 63 bits.
    """
    hints = _hints(type(config))
    for name in (field.name for field in dataclasses.fields(config)):
        value = _convert(hints[name], getattr(config, name), name)
        object.__setattr__(config, name, value)
        if isinstance(value, float):
            check(config, name, math.isfinite(value), "a finite number")
        elif isinstance(value, int):
            check(config, name, abs(value) < 2**63, "less than 2^63")


# evaluating annotations takes longer than checking values
_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


def to_dict(config: Any) -> dict[str, Any]:
    """Return `config` as plain JSON values: tuples become lists, paths become text."""
    return json.loads(to_json(config))


def to_json(config: Any) -> str:
    """Return `config` as indented JSON that `from_json` reads back to an equal dataclass.

    Raises:
        ValueError: a field holds a number that JSON cannot express (NaN or an infinity).
    """
    fields = dataclasses.asdict(config)
    return json.dumps(fields, indent=2, ensure_ascii=False, allow_nan=False, default=plain)


def plain(value: Any) -> Any:
    """Convert dataclasses, paths, and NumPy numbers and arrays; a `default` for `json.dumps`."""
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, os.PathLike):
        return Path(value).as_posix()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ValueError(f"{value!r} of type {type(value).__name__} has no JSON form")


def from_json(cls: type[T], source: str | os.PathLike) -> T:
    """Read the dataclass `cls` from JSON text or from a file.

    Text that starts with `{` is JSON; anything else is a path. Missing keys take their defaults.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not UTF-8 or JSON, an unknown or duplicate key, a value of the wrong type, a
            missing field without a default, or a value that the dataclass itself rejects.
    """
    text = str(source)
    is_path = isinstance(source, os.PathLike) or not text.lstrip().startswith("{")
    where = text if is_path else cls.__name__
    try:
        if is_path:
            text = Path(source).read_text(encoding="utf-8-sig")
        values = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=reject_constant)
        return from_dict(cls, values)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from error


def from_dict(cls: type[T], values: dict[str, Any], *, path: str = "") -> T:
    """Make the dataclass `cls` from plain JSON values, as strictly as `from_json`.

    Args:
        path: dotted name of `values` inside the outermost config, for error messages.
    """
    require(isinstance(values, dict), f"{path or cls.__name__} must be an object, got {values!r}")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in values:
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            known = ", ".join(fields)
            raise ValueError(f"unknown key {_join(path, key)!r}; {hint}known keys: {known}")
    missing = dataclasses.MISSING
    for name, field in fields.items():
        is_required = field.default is missing and field.default_factory is missing
        if is_required and name not in values:
            raise ValueError(f"key {_join(path, name)!r} is missing and has no default")
    hints = _hints(cls)
    return cls(
        **{key: _convert(hints[key], value, _join(path, key)) for key, value in values.items()}
    )


def _convert(hint: Any, value: Any, path: str) -> Any:
    """Convert a value from JSON or Python to the type `hint`.

    Raises:
        ValueError: it does not fit; the message names `path`.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if getattr(value, "ndim", None) == 0:
        # a NumPy number
        value = value.item()
    if isinstance(value, (str, os.PathLike)):
        try:
            str(value).encode()
        except UnicodeEncodeError as error:
            message = f"{path} must be text that UTF-8 can hold, got {str(value)!a}"
            raise ValueError(message) from error
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, path)
    # `type(...) is`, since True is also an int, and equal to 1
    if origin is Literal and any(type(value) is type(a) and value == a for a in arguments):
        return value
    if origin in (tuple, list) and isinstance(value, (list, tuple)):
        has_fixed_length = origin is tuple and arguments[-1] is not ...
        kinds = arguments if has_fixed_length else arguments[:1] * len(value)
        if len(kinds) == len(value):
            items = enumerate(zip(kinds, value))
            return origin(_convert(kind, item, f"{path}[{i}]") for i, (kind, item) in items)
    if origin is dict and isinstance(value, dict):
        return {key: _convert(arguments[1], item, _join(path, key)) for key, item in value.items()}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_dict(hint, value, path=path)
    if hint is Path and isinstance(value, (str, os.PathLike)):
        return Path(value)
    if hint is float and type(value) is int and abs(value) < 2**63:
        return float(value)
    if hint is Any or type(value) is hint:
        return value
    raise ValueError(f"{path} must be {_describe(hint)}, got {_show(value)}")


def _convert_union(options: tuple, value: Any, path: str) -> Any:
    """Convert `value` to the first of several types that takes it."""
    if value is None and type(None) in options:
        return None
    options = tuple(option for option in options if option is not type(None))
    if len(options) == 1:
        return _convert(options[0], value, path)
    for option in options:
        try:
            return _convert(option, value, path)
        except ValueError:
            continue
    expected = " or ".join(map(_describe, options))
    raise ValueError(f"{path} must be {expected}, got {_show(value)}")


def _describe(hint: Any) -> str:
    """Name a type as the author of a JSON file would."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(json.dumps, arguments))
    if origin in (tuple, list):
        has_fixed_length = origin is tuple and arguments[-1] is not ...
        parts = ", ".join(_describe(a) for a in arguments if a is not ...)
        return f"a list of exactly [{parts}]" if has_fixed_length else f"a list, each {parts}"
    if origin is dict:
        return f"an object, each value {_describe(arguments[1])}"
    return TYPE_NAMES.get(hint) or str(hint)


def _show(value: Any) -> str:
    """Write a value as the author of a JSON file would, or else as Python does."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        require(key not in values, f"duplicate key {key!r}")
        values[key] = value
    return values


def reject_constant(name: str) -> None:
    """Refuse NaN and infinities, which JSON lacks; a `parse_constant` for `json.loads`."""
    raise ValueError(f"{name} is not a number in JSON")


def with_flags(config: T, flags: Sequence[str]) -> T:
    """Return `config` changed by `flags`: `--steps 10`, `--model.d_model=64`, `--resume`.

    A bool takes no value: `--name` is True and `--no_name` is False. A list takes several values.

    Raises:
        ValueError: an unknown flag, or a value of the wrong type.
    """
    values = to_dict(config)
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        name, equals, value = flag.removeprefix("--").partition("=")
        words = [value] if equals else []
        while rest and not rest[0].startswith("--"):
            words.append(rest.pop(0))
        # walk down to the dataclass that holds the field
        *parents, last = name.split(".")
        part: Any = values
        kind: Any = type(config)
        for parent in parents:
            part = part.get(parent) if isinstance(part, dict) else None
            kind = _hints(kind).get(parent) if dataclasses.is_dataclass(kind) else None
        hints = _hints(kind) if dataclasses.is_dataclass(kind) else {}
        positive = last.removeprefix("no_")
        key = positive if last not in hints and hints.get(positive) is bool else last
        if not flag.startswith("--") or key not in hints:
            known = ", ".join(f"--{name}" for name in values)
            raise ValueError(f"unknown flag {flag!r}; known without tyro: {known}")
        part[key] = _flag_value(words, hints[key], is_on=key == last)
    return from_dict(type(config), values)


def _flag_value(words: list[str], hint: Any, *, is_on: bool) -> Any:
    """Turn a flag's words into a JSON value for a field of type `hint`."""
    if hint is bool and not words:
        return is_on
    if typing.get_origin(hint) is tuple:
        return [_parse_word(word, typing.get_args(hint)[0]) for word in words]
    values = [_parse_word(word, hint) for word in words]
    return values[0] if len(values) == 1 and hint is not bool else values


def _parse_word(word: str, hint: Any) -> Any:
    """Read text as it is, and numbers as JSON."""
    options = typing.get_args(hint)
    if word == "None" and type(None) in options:
        return None
    if hint is str or hint is Path or {str, Path, word}.intersection(options):
        return word
    try:
        return json.loads(word)
    except ValueError:
        return word
