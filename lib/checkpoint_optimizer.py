"""The state of an optimizer as a checkpoint holds it: packed when saved, checked when loaded."""

from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lib.config import require
from lib.sharded_optimizer_state import load_unsharded

# What each rank of a sharded optimizer writes.
SHARDS = "shard-*-of-*.pt"


def is_sharded(optimizer: Optimizer) -> bool:
    """Whether each rank saves its own part of the state, through `save_shard`."""
    return hasattr(optimizer, "load_shards")


def pack_optimizer(
    optimizer: Optimizer, model: nn.Module, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """The state of `optimizer`, which is not sharded, as JSON values for `unpack_optimizer`.

    Args:
        model: names the parameters.
        tensors: empty; takes the state's tensors themselves, by names such as
            `optimizer.state.0.exp_avg`.
    """
    state = _pack(optimizer.state_dict(), "optimizer", tensors)
    on_cpu = [name for name, tensor in tensors.items() if tensor.is_cpu]
    return {"parameters": _parameters(optimizer, model), "state": state, "on_cpu": on_cpu}


def unpack_optimizer(
    path: Path,
    packed: dict[str, Any] | None,
    tensors: dict[str, Tensor],
    optimizer: Optimizer,
    model: nn.Module | None,
) -> None:
    """Load into `optimizer` what was saved of one; either may be sharded.

    Args:
        path: the checkpoint's folder; files of a sharded optimizer are read from there.
        packed: what `pack_optimizer` gave; None where shards or nothing was saved.
        tensors: what it put there, now on the CPU; copied.
        model: names the parameters; when None, their names are not compared.

    Raises:
        FileNotFoundError: the file of a rank is missing.
        ValueError: no state was saved, or that of other parameters or of another optimizer.
    """
    if packed is None and any(path.glob(SHARDS)):
        if is_sharded(optimizer):
            optimizer.load_shards(path)
        else:
            load_unsharded(path, optimizer)
        return
    require(packed is not None, f"checkpoint {path} holds no optimizer state")
    for there, here in zip_longest(packed["parameters"], _parameters(optimizer, model)):
        # names are known only where the model is given
        same = there == here or (model is None and there and here and there[1:] == here[1:])
        require(same, f"checkpoint {path} does not fit the optimizer: {there} in place of {here}")
    if is_sharded(optimizer):
        # which copies its part of it
        optimizer.load_state_dict(_unpack(packed["state"], tensors))
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # What was on an accelerator goes to that of the parameters; the rest, such as the step counts
    # of torch's AdamW, stays on the CPU unless the optimizer moves it.
    tensors = {
        name: tensor.to("cpu" if name in packed["on_cpu"] else parameters[0].device, copy=True)
        for name, tensor in tensors.items()
    }
    state = _unpack(packed["state"], tensors)
    optimizer.load_state_dict(state)
    # which rounds the state of a bfloat16 parameter to bfloat16, also where it was float32
    for index, saved in state["state"].items():
        loaded = optimizer.state[parameters[index]]
        for name, value in saved.items():
            if isinstance(value, Tensor) and loaded[name].dtype != value.dtype:
                loaded[name] = value.to(loaded[name].device)


def _parameters(optimizer: Optimizer, model: nn.Module | None) -> list[list]:
    """Name in `model` (empty when unknown), optimizer class and shape of each parameter."""
    names = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # that of the shards, so that sharding makes no difference
    kind = type(getattr(optimizer, "inner", optimizer)).__name__
    return [[names.get(id(p), ""), kind, list(p.shape)] for p in parameters]


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON values that `_unpack` knows; its tensors go into `tensors`."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, dict):
        return {"dict": [[k, _pack(v, f"{path}.{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [_pack(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    return value


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in content}
    return {"list": list, "tuple": tuple}[kind](_unpack(item, tensors) for item in content)
