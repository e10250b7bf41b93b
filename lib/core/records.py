"""Records of measurements: append, read back, resume, and turn into CSV and Markdown tables.

A record is a dict of plain JSON values: `config`, `figures`, `device`, `versions`, `commit`,
`seed`, `date` and the rest of `provenance`. A file holds one record per line (JSON Lines), so that
a sweep can append each result as it is measured and resume after an interruption. `records` reads
them into a pandas DataFrame.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core.files import (
    NO_SPACE,
    ROOT,
    make_folder,
    no_space_error,
    sync,
    sync_folder,
    write_atomically,
)
from lib.core.hardware import available_cpus, cpu_name, device_name, output_of
from lib.core.settings import did_you_mean, plain, reject_constant, to_dict

if TYPE_CHECKING:
    import pandas as pd
    import torch

Record = dict[str, Any]
# Packages whose versions every record names.
PACKAGES = ("torch", "triton", "numpy", "numba")
# Fields of a record that a row of `to_frame` keeps, beside its config and figures.
PROVENANCE = ("device", "cpu", "cores", "seed", "commit", "date")


def new_record(
    figures: Mapping[str, Any], *, config: Any = None, seed: int | None = None, device: Any = None
) -> Record:
    """Make the record of `figures` measured now, on this machine, with this code.

    Args:
        figures: name with unit (`median_ms`, `tokens_per_s`) -> number, text or None.
        config, seed, device: see `provenance`.
    """
    return {**provenance(seed, config, device=device), "figures": dict(figures)}


def provenance(
    seed: int | None = None, config: Any = None, *, device: torch.device | str | None = None
) -> dict[str, Any]:
    """Describe where a figure comes from, as plain JSON values; part of every record.

    Args:
        seed: the seed that the figure depends on.
        config: the settings of the measurement, a dataclass or a plain JSON value.
        device: the device measured. By default the GPU if torch is loaded and sees one, else the
            CPU. Does not import torch.

    Returns:
        config, device (chip name), cpu, cores (that this process may use), versions (None: not
        installed), commit, dirty (`lib/` differs from the commit), platform, seed, date (UTC).
        commit and dirty are None outside the project's own git checkout.
    """
    return {
        "config": to_dict(config) if hasattr(config, "__dataclass_fields__") else config,
        "device": device_name(device),
        "cpu": cpu_name(),
        "cores": available_cpus(),
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        **_git_state(),
        "seed": seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    loaded = sys.modules.get(package)
    if loaded is not None and hasattr(loaded, "__version__"):
        return str(loaded.__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any]:
    """Read commit and state of `lib/`; None if the folder is part of some other checkout."""
    if not is_checkout(ROOT):
        return {"commit": None, "dirty": None}
    commit = output_of(["git", "-C", str(ROOT), "rev-parse", "--verify", "HEAD"])
    changes = output_of(["git", "-C", str(ROOT), "status", "--porcelain", "--", "lib"])
    if commit is None or changes is None:
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(changes)}


def is_checkout(folder: Path) -> bool:
    """Whether `folder` is a git checkout of its own, and not part of another one."""
    top = output_of(["git", "-C", str(folder), "rev-parse", "--show-toplevel"])
    return top is not None and Path(top).resolve() == folder.resolve()


def append_record(path: str | os.PathLike, record: Record) -> None:
    """Append `record` to the file at `path` as one line, and flush it to disk.

    Raises:
        ValueError: the record holds NaN, an infinity, or a value that JSON cannot express.
        OSError: the file cannot be written; the message names it.
    """
    path = Path(path)
    try:
        line = json.dumps(record, ensure_ascii=False, allow_nan=False, default=plain)
    except (ValueError, TypeError) as error:
        raise ValueError(f"record for {path}: {error}{_non_finite_values(record)}") from error
    make_folder(path.parent)
    try:
        with open(path, "ab+") as file:
            # start a new line after one that an interruption cut short
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else f"\n{line}"
            # bytes of a path that are no text become escapes of JSON
            file.write(f"{line}\n".encode(errors="backslashreplace"))
            sync(file)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise no_space_error(error, path, len(line)) from error
        raise
    sync_folder(path.parent)


def _non_finite_values(record: Record) -> str:
    """Name the values that JSON has no number for, as the end of an error message."""
    values = flatten(record).items()
    bad = [f"{k} is {v}" for k, v in values if isinstance(v, float) and not math.isfinite(v)]
    return f" ({', '.join(bad)}; use a finite number, a text such as 'oom', or null)" if bad else ""


def read_records(path: str | os.PathLike) -> list[Record]:
    """Read the records in the file at `path`, in the order written; [] when there is no file.

    A line that is not a record (an interrupted write) is skipped with a warning that names it.
    """
    path = Path(path)
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n") if path.exists() else [], start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_constant=reject_constant)
            if not isinstance(record, dict):
                raise ValueError(f"must be an object, got {type(record).__name__}")
        except ValueError as error:
            warnings.warn(f"{path}:{number} is not a record, skipped: {error}", stacklevel=2)
            continue
        records.append(record)
    return records


def records(name: str | os.PathLike, **filters: Any) -> pd.DataFrame:
    """Read the records called `name` into a DataFrame, a row for each; see `to_frame`.

    Args:
        name: of a file in the repository's artifacts/, or the path of another one.
        filters: field -> the value that rows have there, or a list of values.

    Raises:
        FileNotFoundError: there is no such file; names the closest of artifacts/.
        ValueError: no record has such a field; lists the known ones.

    Example:
        >>> found = records("sharding_benchmark", backend="nccl", method=["zero1", "fsdp"])
        >>> sorted(set(found["method"]))
        ['fsdp', 'zero1']
    """
    path = Path(name) if Path(name).suffix else ROOT / f"artifacts/{name}.jsonl"
    if not path.is_file():
        hint = did_you_mean(path.stem, [file.stem for file in path.parent.glob("*.jsonl")])
        raise FileNotFoundError(f"no file of records {path}; {hint}".rstrip("; "))
    frame = to_frame(read_records(path))
    for field, value in filters.items():
        if field not in frame:
            raise ValueError(f"{path} must have {field!r} in a record, got {', '.join(frame)}")
        frame = frame[frame[field].isin(value if isinstance(value, (list, tuple)) else [value])]
    return frame


def to_frame(records: Iterable[Record]) -> pd.DataFrame:
    """A row for each record: the fields of its config, its figures and its provenance.

    A figure hides a field of the config that has its name. Dicts and lists among the figures stay
    as they are, and what a record lacks is None. `recorded` is the date and the commit in words.
    """
    # half a second to import, and most uses of records make no table
    import pandas as pd

    rows = [{**(r["config"] or {}), **provenance_of(r), **r["figures"]} for r in records]
    # as objects, integers with gaps between them stay integers
    frame = pd.DataFrame(rows, dtype=object)
    return frame.where(frame.notna(), None)


def provenance_of(record: Record) -> dict[str, Any]:
    """Where and when a record was made, as fields of a row."""
    found = {key: record.get(key) for key in PROVENANCE}
    found["torch"] = record.get("versions", {}).get("torch")
    words = (f"{record['date']:.10}", f"{record.get('commit') or '':.7}")
    return found | {"recorded": ", ".join(filter(None, words))}


def remaining(configs: Iterable[Any], records: Iterable[Record]) -> list[Any]:
    """Return the `configs` (dataclasses or plain dicts) without a record, in order.

    Pass only the records that count, such as those of this device.
    """
    done = {_config_key(record.get("config")) for record in records}
    return [config for config in configs if _config_key(config) not in done]


def _config_key(config: Any) -> str:
    """Return a text that is the same for equal configs, whatever the order of their keys."""
    return json.dumps(config, sort_keys=True, default=plain)


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join nested keys with dots: `{"figures": {"ms": 3}}` becomes `{"figures.ms": 3}`."""
    flat = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def to_csv(records: Sequence[Record], path: str | os.PathLike | None = None) -> str:
    """Return the records as CSV, one row each, nested keys joined by dots; write it to `path`."""
    import pandas as pd

    # as objects, integers stay integers where other rows have no value
    frame = pd.DataFrame([flatten(record) for record in records], dtype=object)
    text = frame.to_csv(index=False, lineterminator="\n")
    if path is not None:
        write_atomically(path, text)
    return text


def to_markdown(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str] | Sequence[str] | None = None
) -> str:
    """Return records or plain dicts as an aligned Markdown table, numbers to the right.

    Args:
        columns: the keys to show, nested ones joined by dots, or key -> heading. All by default.

    Raises:
        ValueError: no row has one of `columns`; lists the known ones.

    Example:
        >>> print(to_markdown([{"kernel": "sdpa", "ms": 1.23456}], ["kernel", "ms"]), end="")
        | kernel |   ms |
        | ------ | ---: |
        | sdpa   | 1.23 |
    """
    rows = [flatten(row) for row in rows]
    known = list(dict.fromkeys(key for row in rows for key in row))
    columns = known if columns is None else columns
    headings = dict(columns) if isinstance(columns, Mapping) else {key: key for key in columns}
    for key in headings:
        if rows and key not in known:
            raise ValueError(f"columns must be among {', '.join(known)}, got {key!r}")

    # each column padded to its widest cell, with a rule below the heading
    padded = []
    for key, heading in headings.items():
        values = [row.get(key) for row in rows]
        cells = [_escape(text) for text in (heading, *map(format_value, values))]
        width = max(3, *map(len, cells))
        if any(_is_number(value) for value in values):
            cells = [cell.rjust(width) for cell in cells]
            rule = "-" * (width - 1) + ":"
        else:
            cells = [cell.ljust(width) for cell in cells]
            rule = "-" * width
        padded.append([cells[0], rule, *cells[1:]])
    return "".join(f"| {' | '.join(line)} |\n" for line in zip(*padded))


def format_value(value: Any) -> str:
    """Format a value for a table: three significant digits, commas, None as a dash."""
    if getattr(value, "ndim", None) == 0:
        # a NumPy number
        value = value.item()
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
    # round first, so that 9.999 shows as 10.0 and not as 10.00
    rounded = float(f"{value:.2e}") if abs(value) < 1000 else value
    digits = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{digits}f}"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("\r", " ")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
