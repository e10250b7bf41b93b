"""Records of measurements: append, read back, resume, and turn into CSV and Markdown tables.

A record is a plain dict that JSON can hold: `config`, `figures`, `device`, `versions`, `commit`,
`seed`, `date` and the rest of `lib.hardware.provenance`. A record file has one record a line, so
that a sweep can append each result as it comes and go on after an interruption.
"""

import csv
import dataclasses
import errno
import io
import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.files import NO_SPACE, make_folder, no_space_error, sync_folder, write_atomically
from lib.hardware import provenance
from lib.strict_json import to_dict

Record = dict[str, Any]


def new_record(
    figures: Mapping[str, Any], *, config: Any = None, seed: int | None = None, device: Any = None
) -> Record:
    """The record of `figures` measured now, on this machine, with this code.

    Args:
        figures: name with unit (`median_ms`, `tokens_per_s`) -> number, text or None.
        config, seed, device: see `lib.hardware.provenance`.
    """
    return {**provenance(seed, config, device=device), "figures": dict(figures)}


def append_record(path: str | os.PathLike, record: Record) -> None:
    """Add `record` to the file at `path` as one line, on the disk when this returns.

    Raises:
        ValueError: the record holds NaN, an infinity, or something JSON has no form for.
        OSError: the file cannot be written; names it.
    """
    path = Path(path)
    try:
        line = json.dumps(record, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError as error:
        raise ValueError(f"record for {path}: {error}{_where_not_finite(record)}") from error
    make_folder(path.parent)
    with open(path, "ab+", buffering=0) as file:
        # a line that an interruption tore off must not swallow this one
        size = file.seek(0, os.SEEK_END)
        if size and (file.seek(size - 1), file.read(1))[1] != b"\n":
            line = "\n" + line
        try:
            data = f"{line}\n".encode()
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, "the line went in only in part")
            os.fsync(file.fileno())
        except OSError as error:
            if error.errno in NO_SPACE:
                raise no_space_error(error, path, len(data)) from error
            raise
    sync_folder(path.parent)


def read_records(path: str | os.PathLike) -> list[Record]:
    """The records in the file at `path`, in the order written; none when there is no file.

    A line that is no record (an interrupted write) is left out with a warning that names it.
    """
    path = Path(path)
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n") if path.exists() else [], start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError(f"{type(record).__name__} instead of an object")
        except ValueError as error:
            warnings.warn(f"{path}:{number} is no record and left out: {error}", stacklevel=2)
            continue
        records.append(record)
    return records


def remaining(configs: Iterable[Any], records: Iterable[Record]) -> list[Any]:
    """Those of `configs` (dataclasses or plain dicts) that no record holds, in their order.

    Pass only the records that count: of this device, say.
    """
    done = {_key(record.get("config")) for record in records}
    return [config for config in configs if _key(config) not in done]


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """One level of keys: `{"figures": {"ms": 3}}` becomes `{"figures.ms": 3}`."""
    flat = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def to_csv(records: Sequence[Record], path: str | os.PathLike | None = None) -> str:
    """The records as CSV, a row each, nested keys joined by dots; also written to `path`."""
    rows = [flatten(record) for record in records]
    text = io.StringIO()
    writer = csv.DictWriter(text, _columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    if path is not None:
        write_atomically(path, text.getvalue())
    return text.getvalue()


def to_markdown(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str] | Sequence[str] | None = None
) -> str:
    """An aligned Markdown table of records or of plain dicts; columns of numbers to the right.

    Args:
        columns: the keys to show, nested ones joined by dots, or key -> heading. All by default.

    Raises:
        ValueError: a column that no row has; lists those that are there.

    Example:
        >>> print(to_markdown([{"kernel": "sdpa", "ms": 1.23456}], ["kernel", "ms"]), end="")
        | kernel |   ms |
        | ------ | ---: |
        | sdpa   | 1.23 |
    """
    rows = [flatten(row) for row in rows]
    known = _columns(rows)
    columns = known if columns is None else columns
    headings = dict(columns) if isinstance(columns, Mapping) else {key: key for key in columns}
    for key in headings:
        if rows and key not in known:
            raise ValueError(f"column is {key!r}; right is one of: {', '.join(known)}")
    table = [[_cell(heading) for heading in headings.values()]]
    table += [[_cell(format_value(row.get(key))) for key in headings] for row in rows]
    widths = [max(3, *(len(line[i]) for line in table)) for i in range(len(headings))]
    is_right = [_is_numeric([row.get(key) for row in rows]) for key in headings]
    table.insert(1, ["-" * (width - right) + ":" * right for width, right in zip(widths, is_right)])
    lines = (
        " | ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_right)
        )
        for line in table
    )
    return "".join(f"| {line} |\n" for line in lines)


def format_value(value: Any) -> str:
    """A value as a table shows it: three significant digits, thousands apart, nothing as a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 1e-4 or abs(value) >= 1e12:
        return f"{value:.2e}"
    # rounding first, so that 9.999 shows as 10.0 and not as 10.00
    rounded = float(f"{value:.2e}") if abs(value) < 1000 else value
    digits = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{digits}f}"


def _key(config: Any) -> str:
    """A text that is equal for equal configs, whatever the order of their keys."""
    plain = to_dict(config) if dataclasses.is_dataclass(config) else config
    return json.dumps(plain, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    """What JSON has no form for by itself: dataclasses, paths, NumPy's numbers and arrays."""
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, os.PathLike):
        return Path(value).as_posix()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ValueError(f"{value!r} of type {type(value).__name__} has no JSON form")


def _where_not_finite(record: Record) -> str:
    values = flatten(record).items()
    bad = [f"{k} is {v}" for k, v in values if isinstance(v, float) and not math.isfinite(v)]
    return (
        f" ({', '.join(bad)}; right: a finite number, a text such as 'oom', or null)" if bad else ""
    )


def _columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _is_numeric(values: Iterable[Any]) -> bool:
    return any(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
