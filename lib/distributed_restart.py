"""Where ranks find each other when `torchrun --max-restarts` starts them once more."""

from __future__ import annotations

import datetime
import os
import secrets
import time
from typing import Any

import torch.distributed as dist


def rendezvous_from_environment(timeout: float) -> dict[str, Any]:
    """What `init_process_group` needs to find the ranks that torchrun started with this one.

    torchrun may keep the store in which ranks find each other. In releases of PyTorch that do not
    part one start from the next, ranks would look there for those that are gone.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {"init_method": "env://"}
    place = {name.lower(): int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")}
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        place["world_size"],
        is_master=False,
        timeout=datetime.timedelta(seconds=timeout),
    )
    return place | {"store": store_of_this_start(store, **place)}


def store_of_this_start(store: dist.Store, rank: int, world_size: int) -> dist.Store:
    """The part of `store` that the ranks which call this now, and none before them, know of.

    Rank 0 draws a name for it, and gives it to each number that another rank has drawn, until that
    rank says that it knows: what earlier ranks left is answered too, and nobody reads it.
    """
    own = secrets.token_hex(8)
    if rank > 0:
        store.set(f"drawn/{rank}", own)
        name = store.get(f"name for/{own}").decode()
        store.set(f"known/{name}/{rank}", "")
        return dist.PrefixStore(name, store)
    waiting = set(range(1, world_size))
    while waiting:
        for other in sorted(waiting):
            drawn = store.get(f"drawn/{other}").decode()
            store.set(f"name for/{drawn}", own)
            if store.check([f"known/{own}/{other}"]):
                waiting.remove(other)
        time.sleep(0.01)
    return dist.PrefixStore(own, store)
