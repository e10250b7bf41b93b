"""What a run is asked to do: frozen dataclasses, checked when made, strict JSON in and out.

Each command's flags are generated from its dataclass, so a field's note is also its help text.
"""

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


@dataclasses.dataclass(frozen=True)
class TokenizeConfig:
    """From a corpus to a tokenizer and the token arrays that a model trains on."""

    corpus: str = "stories"
    """`stories` (generated here), `tinystories` (downloaded), or a UTF-8 text file or folder."""

    corpus_bytes: int = 20_000_000
    """How many bytes of `stories` to generate for training; other corpora are taken whole."""

    validation_fraction: float = 0.05
    """How much text is kept for validation; `tinystories` has a validation part of its own."""

    vocab_size: int = 4096
    """Number of token ids: 256 bytes, the merges, and the special tokens."""

    special_tokens: tuple[str, ...] = ("<|endoftext|>",)
    """Texts that get an id of their own; merges never cross them."""

    seed: int = 0
    """Which stories are generated."""

    data_dir: Path = Path("data")
    """The folder that corpora are generated or downloaded into."""

    output: Path | None = None
    """The folder for tokenizer and arrays; `DATA_DIR/CORPUS-VOCAB_SIZE` when left out."""

    workers: int | None = None
    """Parallel workers; one for each core when left out. The result is the same for any number."""

    implementation: Literal["auto", "python", "numba"] = "auto"
    """`python` (readable), `numba` (compiled), or `auto`, which picks by size. Same result."""

    def __post_init__(self) -> None:
        check(self, "corpus", bool(self.corpus), "a corpus name, a text file or a folder")
        check(self, "corpus_bytes", self.corpus_bytes > 0, "at least 1")
        fraction = self.validation_fraction
        check(self, "validation_fraction", 0 < fraction <= 0.5, "more than 0 and at most 0.5")
        check(self, "special_tokens", all(self.special_tokens), "texts that are not empty")
        check(
            self,
            "special_tokens",
            len(set(self.special_tokens)) == len(self.special_tokens),
            "texts that differ from one another",
        )
        smallest = 256 + len(self.special_tokens)
        count = len(self.special_tokens)
        check(
            self,
            "vocab_size",
            self.vocab_size >= smallest,
            f"at least 256 bytes + {count} special tokens = {smallest}",
        )
        check(self, "seed", self.seed >= 0, "0 or more")
        check(self, "workers", self.workers is None or self.workers > 0, "at least 1")

    @property
    def output_dir(self) -> Path:
        """Where the tokenizer and the arrays go."""
        name = Path(self.corpus).resolve().stem or "corpus"
        return self.output or self.data_dir / f"{name}-{self.vocab_size}"


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Which notebooks to run, and with which parameters."""

    notebooks: tuple[str, ...] = ()
    """Numbers (`01`) or names (`01_tokenizer`); every notebook when left out."""

    parameters: str | None = None
    """A YAML file of parameters, or the name of one in `notebooks/parameters/`."""

    report: Path | None = None
    """The folder for the pages; `artifacts/report` when left out."""

    workers: int = 2
    """Notebooks run at a time."""

    def __post_init__(self) -> None:
        check(self, "workers", self.workers > 0, "at least 1")


@dataclasses.dataclass(frozen=True)
class TokenizerBenchmarkConfig:
    """The tokenizer against its peers, on whole texts."""

    texts: tuple[str, ...] = ("stories",)
    """`stories`, or UTF-8 text files of your own."""

    megabytes: int = 100
    """How much of each text is taken."""

    vocab_sizes: tuple[int, ...] = (10_000, 32_000)
    """Vocabularies that are trained; the first one is also used to encode."""

    samples: int = 3
    """How often each candidate has its turn."""

    large_files: tuple[str, ...] = ()
    """Files to train on and encode once, for time and peak memory."""

    seed: int = 0
    """Which stories are generated."""

    output: Path = Path("artifacts")
    """The folder for records, table and figure."""

    def __post_init__(self) -> None:
        check(self, "megabytes", self.megabytes > 0, "at least 1")
        check(self, "samples", self.samples > 0, "at least 1")
        check(self, "vocab_sizes", bool(self.vocab_sizes), "at least one size")
        check(self, "vocab_sizes", min(self.vocab_sizes) > 256, "sizes above 256 bytes")


def check(config: Any, field: str, is_right: bool, right: str) -> None:
    """Raise a `ValueError` that names the field, its value and what is right, unless `is_right`."""
    if not is_right:
        raise ValueError(f"{field} is {getattr(config, field)!r}; right is: {right}")


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
