"""The process in which an entry trains; the referee starts it, and is told when to judge."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import numbers
import os
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lib.core.files import ROOT, user_cache
from lib.core.hardware import keep_freed_memory, pick_device
from lib.core.settings import require
from lib.ddp.launcher import launch
from lib.lessons.speedrun.race import Track
from lib.model import TransformerLM
from lib.optimizer import AdamW, clip_grad_norm, cosine_lr  # noqa: F401  loaded before the clock

KEY = "RACE_KEY"
# An entry may open code, installed packages, what compilers keep, and nothing that holds text.
CODE = (".py", ".pyc", ".so", ".h", ".cpp")
FORBIDDEN_MODULES = (
    "safetensors",
    "lib.data.stories",
    "lib.data.corpus",
    "lib.training.generation",
)
STARTS_PROCESS = ("subprocess.Popen", "os.system", "os.fork", "os.posix_spawn", "os.exec")


def guard(device: torch.device) -> None:
    """From now on, refuse what an entry has no need of: other data, the network, processes."""
    inside = tuple(map(os.path.realpath, (tempfile.gettempdir(), "/proc", "/sys", "/dev")))
    workbook = os.path.realpath(ROOT)
    # the stories' grammar, too, which is code of the workbook
    data = tuple(os.path.join(workbook, path) for path in ("data", "artifacts", "lib/data/stories"))
    # a compiler reads more of a package than its code
    installed = [path for path in map(os.path.realpath, sys.path) if path != workbook]
    packages = tuple(f"{path}{os.sep}" for path in [f"{workbook}/lib", *installed])
    # compiled kernels
    with contextlib.suppress(FileNotFoundError):
        packages += (f"{os.path.realpath(user_cache())}{os.sep}",)
    for name in [name for name in sys.modules if name.startswith(FORBIDDEN_MODULES)]:
        del sys.modules[name]

    def refuse(event: str, args: tuple) -> None:
        if event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
            path = os.path.realpath(os.fsdecode(args[0]))
            is_code = path.endswith(CODE) or path.startswith(packages)
            # a checkout may lie in the folder for temporary files
            is_scratch = path.startswith(inside) and not path.startswith(workbook)
            if path.startswith(data) or not (is_code or is_scratch):
                raise PermissionError(f"an entry trains on race.batch alone; it opened {path}")
        elif event == "import" and args[0].startswith(FORBIDDEN_MODULES):
            raise PermissionError(f"an entry trains on race.batch alone; it imported {args[0]}")
        elif event in ("socket.connect", "socket.bind"):
            raise PermissionError("an entry uses no network")
        elif event in STARTS_PROCESS and device.type == "cpu":
            raise PermissionError(f"an entry is one process, but it called {event}")

    sys.addaudithook(refuse)


def watched(recipe: Any, track: Track, seed: int) -> Iterator[tuple[TransformerLM, int]]:
    """Yield the steps of `recipe`.

    Raises:
        ValueError: a step is against the rules, or they end.
    """
    steps = recipe(track, seed)
    advice = "let it `yield model, tokens` after each step"
    require(isinstance(steps, Iterator), f"a recipe is a generator; {advice}")
    said = 0
    for step in steps:
        model, tokens = step if isinstance(step, tuple) and len(step) == 2 else (step, None)
        kinds = f"{type(model).__name__} and {type(tokens).__name__}"
        is_legal = type(model) is TransformerLM and isinstance(tokens, numbers.Integral)
        require(is_legal, f"a recipe yields a TransformerLM and an int, got {kinds}; {advice}")
        said += tokens
        # a recipe may draw its next batch early
        handed, most = sum(track.handed_out), max(track.handed_out, default=0)
        require(
            abs(said - handed) <= most,
            f"it says {said:,} tokens, but race.batch handed out {handed:,}; take every batch "
            "from there, and yield x.numel()",
        )
        yield model, tokens
    raise ValueError(f"the recipe ended after {said:,} tokens; loop with itertools.count")


def compete(port: int, job: dict[str, Any], referee: Connection | None = None) -> None:
    """Train as one rank; the first tells the referee, and all stop when it says so.

    Args:
        job: source, seed, train_file, vocab_size, ranks and judged_every.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = job["ranks"]
    if ranks > 1 and rank == 0:
        referee = connect(port)
    device = pick_device(f"cuda:{rank}" if torch.cuda.device_count() >= ranks > 1 else "auto")
    tokens = np.load(job["train_file"], mmap_mode="r")
    sizes = {"vocab_size": job["vocab_size"], "rank": rank, "world_size": ranks}
    track = Track(train_tokens=np.asarray(tokens), device=device, **sizes)
    clock, sync = time.process_time, torch.cuda.synchronize
    torch.zeros(1, device=device)
    if ranks > 1:
        dist.barrier()
    if referee:
        referee.send_bytes(b"{}")
        # the clock starts
        referee.recv_bytes()

    guard(device)
    entry = types.ModuleType("my_run")
    sys.modules["my_run"] = entry
    started, paused, seen, judged_at = clock(), 0.0, 0, 0
    exec(compile(job["source"], "my_run.py", "exec"), entry.__dict__)
    require(hasattr(entry, "recipe"), "the entry must define recipe(race, seed), by this name")
    steps = watched(entry.recipe, track, job["seed"])
    for number in itertools.count(1):
        model, count = next(steps)
        seen += ranks * count
        # the first step, too: nothing can be learned yet
        if number > 1 and seen - judged_at < job["judged_every"]:
            continue
        judged_at = seen if number > 1 else 0
        if device.type == "cuda":
            sync(device)
        goes_on = torch.ones(1, device=device)
        if referee:
            before = clock()
            point = {"tokens": seen, "processor": before - started - paused}
            point["config"] = dataclasses.asdict(model.config)
            referee.send_bytes(json.dumps(point).encode())
            file, weights = io.BytesIO(), model.state_dict()
            torch.save({name: p.detach().float().cpu() for name, p in weights.items()}, file)
            referee.send_bytes(file.getvalue())
            sent = clock()
            goes_on *= json.loads(referee.recv_bytes())["goes_on"]
            # what other threads of this process did meanwhile
            referee.send_bytes(json.dumps({"idle": clock() - sent}).encode())
            paused += clock() - before
        if ranks > 1:
            dist.broadcast(goes_on, 0)
        if not goes_on:
            return


def connect(port: int) -> Connection:
    return Client(("localhost", port), authkey=bytes.fromhex(os.environ[KEY]))


def perform(port: int, referee: Connection) -> None:
    """Take the job from the referee and do it; report an error in its own words."""
    job = json.loads(referee.recv_bytes())
    try:
        if job["ranks"] == 1:
            compete(port, job, referee)
        else:
            launch(compete, job["ranks"], port, job, timeout=job["limit"])
    except (EOFError, BrokenPipeError):
        # the referee has seen enough, or has gone
        return
    except BaseException as error:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        referee.send_bytes(json.dumps({"error": text}).encode())


def main(port: int) -> None:
    """Connect to the referee, who listens on `port`, and train as it says."""
    keep_freed_memory()
    perform(port, connect(port))
