"""A function of a notebook, as the processes of a job can make it.

They can't import a notebook. So they get the source of the function, and what it uses of its
notebook: functions and classes as source, modules by name, all other values pickled.
"""

from __future__ import annotations

import ast
import inspect
import io
import linecache
import pickle
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Part:
    """One name of a notebook."""

    name: str
    source: str = ""
    """Python text that makes it."""

    pickled: bytes = b""
    """Its value, where it has no source."""


@dataclass
class Parcel:
    """A function with what it uses, each part behind those that it needs itself."""

    parts: list[Part] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Names of values that can't be pickled, and why."""


def parcel_of(function: Callable) -> Parcel:
    """Pack a function that is written in a notebook.

    Raises:
        TypeError: it is no function written with `def`.
    """
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"a function written with `def` is needed, got {function!r}")
    known, module = dict(function.__globals__), function.__module__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        known[name] = cell.cell_contents
    parcel, seen = Parcel(), set()

    def is_own(value: Any) -> bool:
        # also a function that `functools.cache` wraps
        inner = inspect.unwrap(value) if callable(value) else value
        return isinstance(inner, (types.FunctionType, type)) and inner.__module__ == module

    class Packer(pickle.Pickler):
        def persistent_id(self, value: Any) -> str | None:
            if not is_own(value):
                return None
            pack(value.__name__, value)
            return value.__name__

    def pack(name: str, value: Any) -> None:
        if name in seen:
            return
        seen.add(name)
        if isinstance(value, types.ModuleType):
            parcel.parts.append(Part(name, f"import {value.__name__} as {name}\n"))
        elif is_own(value):
            source = source_of(value)
            for word in _names(source):
                if word in known:
                    pack(word, known[word])
            if value.__name__ not in (name, "<lambda>"):
                source += f"{name} = {value.__name__}\n"
            parcel.parts.append(Part(name, source))
        else:
            packed = io.BytesIO()
            try:
                Packer(packed).dump(value)
            except Exception as error:
                parcel.left_out[name] = f"{type(error).__name__}: {error}".split("\n")[0]
            else:
                parcel.parts.append(Part(name, pickled=packed.getvalue()))

    pack(function.__name__, function)
    return parcel


def function_of(parcel: Parcel, name: str) -> Callable:
    """Make the function called `name` of what `parcel_of` returned."""
    namespace: dict[str, Any] = {"torch": torch}

    class Unpacker(pickle.Unpickler):
        def persistent_load(self, name: str) -> Any:
            return namespace[name]

    for part in parcel.parts:
        if part.source:
            exec(part.source, namespace)
        else:
            namespace[part.name] = Unpacker(io.BytesIO(part.pickled)).load()
    return namespace[name]


def source_of(value: Any) -> str:
    """The source of a function or a class, also of one that is written in a cell."""
    if isinstance(value, type):
        return _class_source(value)
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(value)))
    # a solution, without the decorators of its check
    if (value.__module__ or "").startswith("lib."):
        source = source[re.search(r"^def ", source, re.M).start() :]  # type: ignore[union-attr]
    return source


def _class_source(value: type) -> str:
    """The source of a class; `inspect` looks for it in a module's file, and a cell has none.

    Raises:
        OSError: it is nowhere.
    """
    for lines in _files_of(value):
        text = "".join(lines)
        try:
            found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ClassDef)]
        except SyntaxError:
            continue
        for node in reversed([node for node in found if node.name == value.__name__]):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            return textwrap.dedent("".join(lines[first - 1 : node.end_lineno])) + "\n"
    raise OSError(f"the source of the class {value.__name__} was not found")


def _files_of(value: type) -> Iterator[list[str]]:
    """The lines of files and cells in which a class may be written, the likeliest first."""
    for member in vars(value).values():
        code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
        # those that a dataclass gets come from no file
        if code and (lines := linecache.getlines(code.co_filename)):
            yield lines
    for file in reversed(list(linecache.cache)):
        yield linecache.getlines(file)


def _names(source: str) -> list[str]:
    """The names that a piece of source looks up."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name))
    return list(dict.fromkeys(node.id for node in nodes))
