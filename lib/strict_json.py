"""Dataclasses as strict JSON: unknown keys, wrong types and lost values are refused by name."""

import dataclasses
import difflib
import json
import os
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")

JSON_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def to_dict(config: Any) -> dict[str, Any]:
    """`config` as plain JSON values: tuples become lists, paths become text."""
    return json.loads(to_json(config))


def to_json(config: Any) -> str:
    """`config` as indented JSON that `from_json` reads back to an equal dataclass.

    Raises:
        ValueError: a field holds a number that JSON has no form for (NaN or an infinity).
    """
    fields = dataclasses.asdict(config)
    return json.dumps(fields, indent=2, ensure_ascii=False, allow_nan=False, default=_plain)


def from_json(cls: type[T], source: str | os.PathLike) -> T:
    """The dataclass `cls` from JSON text, or from the file at a path.

    Text that starts with `{` is JSON; anything else is a path. Keys left out take their defaults.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not JSON, a key that `cls` does not have, a key twice, a value of a wrong type,
            a field without a default left out, or a value that the dataclass itself refuses.
    """
    text, where = str(source), cls.__name__
    if isinstance(source, os.PathLike) or not text.lstrip().startswith("{"):
        text, where = Path(source).read_text(encoding="utf-8-sig"), str(source)
    try:
        values = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
        return from_dict(cls, values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def from_dict(cls: type[T], values: dict[str, Any], *, path: str = "") -> T:
    """The dataclass `cls` from plain JSON values, as strict as `from_json`."""
    if not isinstance(values, dict):
        raise ValueError(f"{path or cls.__name__} is {values!r}; right is: an object {{…}}")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in values:
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            known = ", ".join(fields)
            raise ValueError(f"unknown key {_join(path, key)!r}; {hint}known keys: {known}")
    for name, field in fields.items():
        if name not in values and _is_required(field):
            raise ValueError(f"key {_join(path, name)!r} is missing and has no default")
    hints = typing.get_type_hints(cls)
    converted = {
        key: _convert(hints[key], value, _join(path, key)) for key, value in values.items()
    }
    return cls(**converted)


def _convert(hint: Any, value: Any, path: str) -> Any:
    """`value`, as JSON gave it, as the type `hint` asks for; `ValueError` names `path` if not."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, path)
    if origin is Literal and value in arguments:
        return value
    if origin in (tuple, list) and isinstance(value, list):
        inner = (
            arguments
            if origin is tuple and arguments[-1] is not ...
            else arguments[:1] * len(value)
        )
        if len(inner) == len(value):
            pairs = enumerate(zip(inner, value))
            return origin(_convert(kind, item, f"{path}[{i}]") for i, (kind, item) in pairs)
    if origin is dict and isinstance(value, dict):
        return {key: _convert(arguments[1], item, _join(path, key)) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_dict(hint, value, path=path)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and type(value) is int:
        return float(value)
    # `type(...) is`, since True is also an int
    if hint is Any or type(value) is hint:
        return value
    raise ValueError(f"{path} is {json.dumps(value)}; right is: {_describe(hint)}")


def _convert_union(options: tuple, value: Any, path: str) -> Any:
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
    described = " or ".join(_describe(option) for option in options)
    raise ValueError(f"{path} is {json.dumps(value)}; right is: {described}")


def _describe(hint: Any) -> str:
    """A type as the person who writes the JSON file would say it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(json.dumps, arguments))
    if origin in (tuple, list):
        fixed = origin is tuple and arguments[-1] is not ...
        parts = ", ".join(_describe(a) for a in arguments if a is not ...)
        return f"a list of exactly [{parts}]" if fixed else f"a list, each {parts}"
    if origin is dict:
        return f"an object, each value {_describe(arguments[1])}"
    return JSON_NAMES.get(hint) or {Path: "a path as text"}.get(hint) or str(hint)


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return Path(value).as_posix()
    raise ValueError(f"{value!r} of type {type(value).__name__} has no JSON form")


def _is_required(field: dataclasses.Field) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"key {twice!r} stands twice")
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number that JSON knows")
