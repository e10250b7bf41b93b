"""A sweep: cases are measured one after another, in one process or on ranks; each leaves a record.

Without a process group a process is rank 0 of 1, so one loop serves both: rank 0 finds out what has
no record yet, all ranks measure it, and rank 0 appends the records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lib.core.allocator import free_memory, is_out_of_memory
from lib.core.files import ROOT, lock_file, make_folder
from lib.core.records import Record, append_record, new_record, read_records
from lib.core.terminal import bar_size
from lib.ddp.process_group import on_first_rank, rank

log = logging.getLogger(__name__)
# A record that agrees with this process in all of these need not be measured again.
SAME_MACHINE = ("device", "cores", "threads", "versions", "code", "seed")
# What is measured, as the `config` of a record has it: plain JSON values.
Case = SimpleNamespace
Figures = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Store:
    """The file of a sweep's records, and what is the same in those that it makes."""

    path: Path
    seed: int | None = None
    device: torch.device | str | None = None

    packages: Sequence[str] = ()
    """Whose versions a record names, too, where they are installed."""

    code: str = dataclasses.field(default_factory=lambda: code_version())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other process sweeps into the file, and keep it.

        Raises:
            OSError: it cannot be written; now, not after the first measurement.
        """
        make_folder(self.path.parent)
        self.path.open("ab").close()
        with lock_file(self.path):
            yield

    def record(self, figures: Figures, case: Case | None = None) -> Record:
        """A record made here and now."""
        config = vars(case) if case else None
        made = new_record(figures, config=config, seed=self.seed, device=self.device)
        made["versions"] |= versions_of(self.packages)
        made |= {"code": self.code, "threads": torch.get_num_threads()}
        # lists for tuples, as they are read again
        return json.loads(json.dumps(made, default=_refuse))

    def read(self) -> dict[str, Record]:
        """The newest record of each case that was made on this machine by this code."""
        here = self.record({})
        same = (
            record
            for record in read_records(self.path)
            if all(record.get(key) == here[key] for key in SAME_MACHINE)
        )
        return {_key(record["config"]): record for record in same}

    def append(self, figures: Figures, case: Case) -> Record:
        """Make the record of a case, and add it to the file."""
        made = self.record(figures, case)
        append_record(self.path, made)
        return made


def run_sweep(
    store: Store,
    groups: Iterable[Sequence[Case]],
    measure: Callable[[Sequence[Case]], Iterable[Figures]],
    *,
    line: Callable[[Record], str] | None = None,
    restart: bool = False,
) -> list[Record]:
    """Measure groups of cases and append a record for each case right away.

    The cases of a group are measured in one call, such as candidates that are interleaved. A group
    is skipped if all its cases have a record, so the same call resumes an interrupted sweep; a case
    that has failed is not tried again. A record counts if it was made on the same device, with the
    same versions, number of threads, seed and code of `lib`. If another process sweeps into the
    same file, this one waits for it and then measures only what is left.

    Args:
        measure: group -> the figures of its cases, in their order; on all ranks.
        line: record -> the line to print for it.
        restart: ignore all existing records.

    Returns:
        The newest record of each case, in the order of `groups`; none on ranks other than 0.
    """
    keyed = [{_key(vars(case)): case for case in group} for group in groups]
    cases = {key: case for group in keyed for key, case in group.items()}
    names = dict(zip(cases, differences([vars(case) for case in cases.values()])))
    found: dict[str, Record] = {}
    with contextlib.ExitStack() as until_done:

        def find() -> list[list[str]]:
            until_done.enter_context(store.locked())
            found.update({} if restart else store.read())
            return keys_left(keyed, found)

        left, is_first = on_first_rank(find), rank() == 0
        count = sum(map(len, left))
        log.info("%d of %d rows to measure, into %s", count, len(cases), store.path)
        with progress_bar(len(cases), count, is_shown=is_first) as bar:
            for keys in left:
                bar.set_description_str(names[keys[0]])
                for key, figures in zip(keys, measure([cases[key] for key in keys])):
                    if is_first:
                        found[key] = store.append(figures, cases[key])
                        bar.update()
                        if line:
                            bar.write(": ".join(filter(None, (names[key], line(found[key])))))
    return [found[key] for key in cases] if is_first else []


def progress_bar(total: int, left: int, *, is_shown: bool) -> Any:
    """A bar over the rows of a sweep, of which some are done."""
    from tqdm import tqdm

    # disable=None: no bar in a log
    options: dict = bar_size() | {"disable": None if is_shown else True, "leave": False}
    return tqdm(total=total, initial=total - left, unit="row", **options)


def keys_left(groups: Iterable[Iterable[str]], found: Mapping[str, Record]) -> list[list[str]]:
    """The cases to measure of each group of which one has no record, by their keys.

    One that is asked for twice is measured once.
    """
    left: list[list[str]] = []
    wanted: set[str] = set()
    for group in groups:
        keys = [key for key in group if key not in wanted]
        wanted.update(keys)
        if not found.keys() >= set(keys):
            left.append([key for key in keys if key not in found or not has_failed(found[key])])
    return left


def or_out_of_memory(
    measure: Callable[[Sequence[Case]], Iterable[Figures]], group: Sequence[Case]
) -> list[Figures]:
    """Return the figures of a group, or, if memory runs out, that it did, for each of its cases.

    Another error says what was being measured.
    """
    try:
        found = list(measure(group))
        for each in found:
            if not isinstance(each, Mapping):
                raise TypeError(f"figures must be a mapping, such as .figures(), got {each!r}")
        return [each if "status" in each else {"status": "ok", **each} for each in found]
    except Exception as error:
        if not is_out_of_memory(error):
            error.add_note(f"while this was measured: {[vars(case) for case in group]}")
            raise
        free_memory(error)
    finally:
        # reference cycles would keep what these cases held
        free_memory()
    return [{"status": "oom"}] * len(group)


def has_failed(record: Record) -> bool:
    """Whether a record says that its case cannot be measured here."""
    return record["figures"].get("status") in ("oom", "failed", "refused")


def differences(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings in which configs differ, as text: `queries 64, is_causal True`."""
    varying = [
        key
        for key in (configs[0] if configs else ())
        if any(config.get(key) != configs[0][key] for config in configs)
    ]
    return [
        ", ".join(f"{key} {config[key]}" for key in varying if key in config) for config in configs
    ]


def _refuse(value: Any) -> Any:
    raise TypeError(f"figures and settings must be numbers, texts or lists of them, got {value!r}")


def _key(config: Any) -> str:
    return json.dumps(config, sort_keys=True)


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def is_prediction(record: Record) -> bool:
    """Whether a record holds no measured figures."""
    return record.get("figures", {}).get("status") == "predicted"


def records_like(path: str | os.PathLike, records: Sequence[Record]) -> list[Record]:
    """The records in the file at `path` of the device and versions of `records`, these last.

    So where a case was asked for again, the record asked for counts as the newest. Predictions are
    made on any machine.
    """
    keys = ("device", "versions")
    same = [
        record
        for record in read_records(path)
        if is_prediction(record) or all(record.get(key) == records[0][key] for key in keys)
    ]
    return [*same, *records]


def code_version(root: Path = ROOT) -> str:
    """Hash the code of `lib`: twelve hex digits that change when one of its files does."""
    digest = hashlib.sha256()
    for path in sorted((root / "lib").rglob("*.*")):
        if path.suffix in (".py", ".cu", ".cuh"):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
