"""The optimizer's state in checkpoints of format 1, read until the next release.

Their `state.json` has the state of an optimizer that is not sharded, its tensors are in
`optimizer.safetensors`; of a sharded one, each rank saved a file by `torch.save`.
"""

import json
from pathlib import Path
from typing import Any

import torch

from lib.training.tensor_files import read_tensors, unpack


def read_optimizer(path: Path) -> tuple[list | None, list[dict[str, Any]]]:
    """Name, class and shape of each parameter if they were saved, and each rank's state dict."""
    packed = json.loads((path / "state.json").read_bytes()).get("optimizer")
    if packed is not None:
        tensors, _ = read_tensors(path / "optimizer.safetensors")
        return packed["parameters"], [unpack(packed["state"], tensors)]
    shards = sorted(path.glob("shard-*.pt"))
    # with weights_only nothing in a file is run
    return None, [torch.load(p, map_location="cpu", mmap=True, weights_only=True) for p in shards]
