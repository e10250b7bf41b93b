"""Settings: frozen dataclasses checked when made, strict JSON, errors that name the field.

A config lives with its owner and carries `@settings`, which has pydantic check its fields by their
types (`PositiveInt`, `Literal["a", "b"]`); `__post_init__` has the rules between fields. Fields and
their docs become the flags and the `--help` of its command. `to_json` and `from_json` move it
through a file without loss.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import operator
import os
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Interval, MinLen

T = TypeVar("T", bound=Any)

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
# of a tuple: `Annotated[tuple[str, ...], NonEmpty]`
NonEmpty = MinLen(1)


def require(condition: object, message: str) -> None:
    """Raise a `ValueError` with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def check(config: Any, field: str, condition: object, expected: str) -> None:
    """Raise `ValueError: FIELD must be EXPECTED, got VALUE` unless `condition` holds."""
    value = getattr(config, field)
    shown = str(value) if isinstance(value, Path) else repr(value)
    require(condition, f"{field} must be {expected}, got {shown}")


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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "did you mean 'X'? " for the closest of the known names, or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


# Configs


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def settings(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass that checks its fields whenever an instance is made.

    Where only one value can be meant, a field takes that one: a tuple for a list, a `Path` for
    text, a config for a dict, a float for a whole number, Python's number for NumPy's.

    Raises:
        ValueError: where an instance is made, a field is unknown or missing, has another type or a
            value out of range, or is a number that is infinite or NaN or has more than 63 bits.
    """
    # a tenth of a second to import, and who only calls `require` needs none of it
    import pydantic.dataclasses

    hints = typing.get_type_hints(cls, include_extras=True)
    cls.__annotations__ = {name: _strict(hints[name]) for name in inspect.get_annotations(cls)}
    options = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)
    made: Any = pydantic.dataclasses.dataclass(frozen=True, config=options)(cls)
    init = made.__init__

    @functools.wraps(init)
    def checked_init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except pydantic.ValidationError as error:
            raise ValueError(_message(made, error)) from None

    made.__init__ = checked_init
    return made


@functools.cache
def _strict_types() -> dict[Any, Any]:
    """Stricter types than pydantic's own, which take "1" for 1, and 1 for True."""
    from pydantic import BeforeValidator, Strict

    # NumPy's number becomes Python's
    number = BeforeValidator(lambda n: n.item() if getattr(n, "ndim", None) == 0 else n)
    bits = Interval(gt=-(2**63), lt=2**63)
    return {
        int: Annotated[int, Strict(), bits, number],
        float: Annotated[float, Strict(), number],
        str: Annotated[str, Strict()],
        bool: Annotated[bool, Strict()],
    }


def _strict(hint: Any) -> Any:
    """Return the type `hint` with its parts replaced by those of `_strict_types`."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return Annotated[(_strict(parts[0]), *parts[1:])]
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_strict, parts))]  # noqa: UP007
    if origin in (tuple, list, dict):
        return origin[tuple(map(_strict, parts))]
    return _strict_types().get(hint, hint) if isinstance(hint, type) else hint


# What would be right, by the kind of pydantic's error; otherwise its own words say it.
EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "an object",
    "dataclass_type": "an object",
    "literal_error": "one of {expected}",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:.19g}",
    "less_than_equal": "at most {le:g}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}


def _message(cls: Any, error: Any) -> str:
    """The first error in one line; an unknown key comes before the one that it leaves missing."""
    errors = error.errors(include_url=False)
    first = min(errors, key=lambda each: each["type"] != "unexpected_keyword_argument")
    kind, where, context = first["type"], list(first["loc"]), first.get("ctx", {})
    if where and isinstance(where[0], int):
        # an argument without a name
        where[0] = dataclasses.fields(cls)[where[0]].name
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where)[1:]
    if kind == "unexpected_keyword_argument":
        for part in where[:-1]:
            cls = typing.get_type_hints(cls).get(str(part), cls)
        known = [field.name for field in dataclasses.fields(cls)]
        hint = did_you_mean(str(where[-1]), known)
        return f"unknown key {path!r}; {hint}known keys: {', '.join(known)}"
    if kind == "missing":
        return f"key {path!r} is missing and has no default"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        context["expected"] = context["expected"].replace(" or ", ", ").replace("'", '"')
    words = EXPECTED.get(kind)
    expected = words.format(**context) if words else first["msg"].removeprefix("Input should be ")
    given = first["input"]
    # as the author of a JSON file writes it
    shown = json.dumps(given) if given is None or isinstance(given, (bool, str)) else repr(given)
    return f"{path} must be {expected}, got {shown}"


# JSON


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
    """Read the config `cls` from JSON text or from a file.

    Text that starts with `{` is JSON; anything else is a path. Missing keys take their defaults.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not UTF-8 or JSON, a duplicate key, or a value that `cls` refuses.
    """
    text = str(source)
    is_path = isinstance(source, os.PathLike) or not text.lstrip().startswith("{")
    where = text if is_path else cls.__name__
    try:
        if is_path:
            text = Path(source).read_text(encoding="utf-8-sig")
        values = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=reject_constant)
        require(isinstance(values, dict), f"must be an object, got {values!r}")
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        require(key not in values, f"duplicate key {key!r}")
        values[key] = value
    return values


def reject_constant(name: str) -> None:
    """Refuse NaN and infinities, which JSON lacks; a `parse_constant` for `json.loads`."""
    raise ValueError(f"{name} is not a number in JSON")
