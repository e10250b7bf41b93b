"""The base of all data-parallel wrappers: checks of the module, and its state dict."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lib.core.settings import require
from lib.ddp.process_group import world_size


class Wrapper(nn.Module):
    """A module around another one, `module`, with that one's state dict."""

    module: nn.Module
    group: dist.ProcessGroup | None

    def __getstate__(self) -> dict[str, Any]:
        """The state for `copy.deepcopy` and pickle.

        Raises:
            TypeError: on several ranks; a copy would average nothing.
        """
        if world_size(self.group) > 1:
            raise TypeError(
                f"{type(self).__name__} on several ranks cannot be copied or pickled; copy its "
                "module, and wrap that"
            )
        return super().__getstate__()  # type: ignore[misc]  # object's

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state dict, under its own names, compiled or not."""
        return inner_module(self.module).state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the module; every rank must load the same."""
        return inner_module(self.module).load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load as a part of another module, whose state dict has the module's own names."""
        inner = inner_module(self.module)
        path = next(name for name, part in self.named_modules() if part is inner)
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}{path}.{name.removeprefix(prefix)}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)


def inner_module(module: Any) -> Any:
    """The module itself, or the one inside if `torch.compile` wrapped it."""
    return getattr(module, "_orig_mod", module)


def check_not_wrapped(module: nn.Module) -> None:
    """Refuse a module, or one with a part, whose gradients are averaged already."""
    for name, part in module.named_modules():
        is_wrapped = isinstance(part, (Wrapper, DistributedDataParallel))
        require(
            not is_wrapped,
            f"module must not be wrapped already, but {name or 'it'} is {type(part).__name__}; "
            "wrap the module inside it, .module, alone",
        )
    for name, param in inner_module(module).named_parameters():
        wrapper = wrapper_of(param)
        require(
            not wrapper,
            f"module must not be wrapped already, but a {wrapper} averages the gradient of {name}; "
            "delete it first",
        )


def wrapper_of(param: Tensor) -> str:
    """The class of the wrapper that averages a parameter's gradient; "" if there is none.

    PyTorch's watches one parameter of its module alone.
    """
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        # as `add_hook` makes them
        owner = hook.args[0] if isinstance(hook, functools.partial) and hook.args else None
        if isinstance(owner, Wrapper):
            return owner.__class__.__name__
    return ""
