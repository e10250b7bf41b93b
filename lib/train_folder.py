"""The folder of a training run: its name, what is in it, and whose run it is."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.checkpoint import find_checkpoint, read_extra
from lib.config_training import TrainConfig
from lib.files import lock_folder, make_folder, write_atomically
from lib.hardware import provenance
from lib.strict_json import from_json, to_dict, to_json

if TYPE_CHECKING:
    from lib.train_run import Run

# Two runs that agree in these, and in the product of FACTORS, learn the same; the rest is where and
# how they are run.
SETTINGS = ("model", "optimizer", "steps", "seed", "dtype", "low_precision_weights")
# Of how many windows a step learns from; how it is split changes nothing but rounding.
FACTORS = ("batch_size", "gradient_accumulation_steps", "world_size")
# What a run's folder holds beside metrics and checkpoints.
RUN_FILES = ("config.json", "tokenizer.json", "run.json")


def run_folder(config: TrainConfig, data_sha256: dict[str, str], num_ranks: int) -> Path:
    """The folder of a run without `output`: named by what it learns from and how."""
    fields = identity(to_dict(config) | {"world_size": num_ranks}, data_sha256)
    settings = {name: fields[name] for name in SETTINGS}
    # one for all ways to split the same step
    settings |= {"batch_size": windows_per_step(fields), "gradient_accumulation_steps": 1}
    content = json.dumps([settings, data_sha256], sort_keys=True)
    key = hashlib.sha256(content.encode()).hexdigest()[:8]
    return config.runs_dir / f"{config.data.resolve().name}-{key}"


def finished_checkpoint(run: Run) -> Path | None:
    """The whole checkpoint of a run that has all its steps and files; nothing is written.

    Raises:
        ValueError: it belongs to a run with other settings.
    """
    path = run.folder / "checkpoints" / f"step-{run.config.steps:08d}"
    names = [other.name.removeprefix("step-") for other in path.parent.glob("step-*")]
    steps = [int(name) for name in names if name.isdigit()]
    has_files = all((run.folder / name).exists() for name in RUN_FILES)
    if not has_files or max(steps, default=None) != run.config.steps:
        return None
    try:
        find_checkpoint(path)
    except ValueError:
        # whoever looks for the one before it names this one
        return None
    extra = read_extra(path)
    check_same_settings(run, saved_identity(extra["config"], extra))
    return path


def take_folder(run: Run, holding: contextlib.ExitStack) -> None:
    """Make the run's folder, and keep other processes out of it until `holding` is left."""
    for folder in (run.folder, run.folder / "checkpoints"):
        make_folder(folder)
    holding.enter_context(lock_folder(run.folder))
    # again, since another process may have begun a run there before this one had the lock
    check_same_run(run)


def check_seen(path: Path) -> None:
    """Refuse, on a rank that does not see it, what rank 0 made."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path.absolute()} is not there, but rank 0 made it; right is: an output on a disk "
            "that all hosts share"
        )


def describe_run(run: Run) -> None:
    """Write what a run's folder needs beside its checkpoints: config, tokenizer, provenance."""
    record = provenance(run.config.seed, device=run.device) | {"data_sha256": run.data_sha256}
    del record["config"]
    # here too, so that a run which goes on with others is told apart by one file alone
    record |= {name: run.identity[name] for name in FACTORS}
    write_atomically(run.folder / "run.json", json.dumps(record, indent=2) + "\n")
    write_atomically(run.folder / "config.json", to_json(run.config) + "\n")
    run.tokenizer.save(run.folder / "tokenizer.json")


def identity(fields: dict[str, Any], data_sha256: dict[str, str]) -> dict[str, Any]:
    """What tells runs apart: settings, the number of windows a step as FACTORS, and the data."""
    return {name: fields[name] for name in (*SETTINGS, *FACTORS)} | {"data": data_sha256}


def saved_identity(config: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """That of a run whose `record`, in a checkpoint or run.json, may tell FACTORS too."""
    factors = {name: record[name] for name in FACTORS if name in record}
    # runs of one process did not always say that they were
    return identity({"world_size": 1} | config | factors, record["data_sha256"])


def windows_per_step(fields: dict[str, Any]) -> int:
    return math.prod(fields[name] for name in FACTORS)


def check_same_run(run: Run) -> None:
    """Refuse a folder that holds another run, or any run where none is to go on."""
    folder = run.folder
    paths = folder / "config.json", folder / "run.json"
    if not run.config.resume and (paths[0].exists() or any(folder.glob("checkpoints/step-*"))):
        raise ValueError(f"output {folder} holds a run, and resume is False; give another output")
    # a checkpoint knows its settings too, so that nothing is mixed when one of these is missing
    if all(path.exists() for path in paths):
        config = to_dict(from_json(TrainConfig, paths[0]))
        try:
            before = saved_identity(config, json.loads(paths[1].read_text()))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{paths[1]} is damaged; remove it to go on without it") from error
        check_same_settings(run, before)


def check_same_settings(run: Run, before: dict[str, Any]) -> None:
    """Refuse to go on with a run that learned from other data or in another way.

    The same number of windows a step may be split otherwise than `before`, among ranks or passes:
    the windows are the same, their losses and gradients equal up to rounding.
    """
    now, hint = run.identity, ""
    # a run may be made longer
    of_one_value = [name for name in now if name not in ("steps", *FACTORS)]
    differences = _differences(*({name: x[name] for name in of_one_value} for x in (before, now)))
    windows = windows_per_step(before)
    if windows != windows_per_step(now):
        was, is_now = (" × ".join(f"{name} {x[name]}" for name in FACTORS) for x in (before, now))
        differences.append(
            f"a step was {windows} windows = {was}, now {windows_per_step(now)} = {is_now}"
        )
        size, rest = divmod(windows, windows_per_step(now) // now["batch_size"])
        hint = "" if rest else f"batch_size {size} would fit, else "
    if differences:
        raise ValueError(
            f"output {run.folder} holds a run with other settings: {'; '.join(differences)}; "
            f"{hint}give another output, or remove that folder"
        )


def _differences(before: dict[str, Any], now: dict[str, Any], path: str = "") -> list[str]:
    """What changed from `before` to `now`, each as `name: old, now new`."""
    lines = []
    for name in now:
        old, new = before.get(name), now[name]
        if isinstance(old, dict) and isinstance(new, dict):
            lines += _differences(old, new, f"{path}{name}.")
        elif old != new:
            lines.append(f"{path}{name} was {old}, now {new}")
    return lines
