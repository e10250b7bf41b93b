"""State of an FSDP in whole parameters: gathering them, saving and loading state dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.core.settings import require
from lib.ddp.process_group import rank

if TYPE_CHECKING:
    from lib.fsdp.flat_parameters import FlatParameters


class WholeState:
    """A mixin of `FSDP`: its state with whole parameters. All ranks call its methods."""

    module: nn.Module
    group: dist.ProcessGroup | None
    vectors: dict[str, nn.Parameter]
    flats: list[FlatParameters]
    is_saving = False
    settle: Callable[[], None]
    follow_shards: Callable[[], None]

    def full_parameters(self, *, on_first_only: bool = False) -> dict[str, Tensor]:
        """Copies of the whole parameters by the module's names, in their own dtype.

        Args:
            on_first_only: gather block by block onto rank 0's CPU; other ranks get none.
        """
        self.follow_shards()
        whole: dict[str, Tensor] = {}
        for flat in self.flats:
            tensors = flat.copies()
            if on_first_only:
                tensors = [t.cpu() for t in tensors] if rank(self.group) == 0 else []
            whole |= zip(flat.names, tensors)
        if not on_first_only:
            whole |= {name: param.detach().clone() for name, param in self.vectors.items()}
        elif rank(self.group) == 0:
            whole |= {name: p.detach().to("cpu", copy=True) for name, p in self.vectors.items()}
        return {name: whole[name] for name in self._named() if name in whole}

    def _named(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def _own_state(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state dict, in which matrices are shards."""
        self.settle()
        self.is_saving = True
        try:
            return self.module.state_dict(*args, **kwargs, keep_vars=True)
        finally:
            self.is_saving = False

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """The module's state dict with copies of whole parameters, on all ranks.

        Args:
            destination: what they are added to, by a module around this one.
            prefix: of all names.
            keep_vars: must be False.
        """
        require(not keep_vars, "keep_vars must be False, since parameters are copied, got True")
        full = self.full_parameters()
        by_id = {id(param): full[name] for name, param in self._named().items()}
        state = self._own_state(prefix=prefix)
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = by_id[id(value)] if id(value) in by_id else value.detach()
        if destination is None:
            return state
        destination.update(state)
        return destination

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Load a state dict with whole parameters, of which each rank keeps its part.

        Args:
            strict: whether names must be the module's; if not, those in both are loaded.

        Returns:
            `missing_keys` and `unexpected_keys`, as of any module.

        Raises:
            ValueError: names or shapes do not fit.
        """
        own = self._own_state()
        require(
            not strict or own.keys() == state_dict.keys(),
            f"state_dict must have the module's names, but differs in "
            f"{', '.join(sorted(own.keys() ^ state_dict.keys()))}",
        )
        return self.module.load_state_dict(self._parts_of(state_dict, own), strict)

    def _parts_of(self, state: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of each whole value.

        Raises:
            ValueError: a value is no tensor where the module has one, or has another shape.
        """
        self.follow_shards()
        place_of = {id(s): (flat, i) for flat in self.flats for i, s in enumerate(flat.shards)}
        parts = dict(state)
        for name, value in state.items():
            if not isinstance(own.get(name), Tensor):
                continue
            flat, index = place_of.get(id(own[name]), (None, 0))
            shape = tuple(own[name].shape if flat is None else flat.shapes[index])
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            require(found == shape, f"{name} must have shape {shape}, got {found}")
            if flat is not None:
                part = flat.own[index]
                parts[name] = value.reshape(-1)[part.start : part.stop]
        return parts

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load as a part of another module: leave what this rank keeps, under the names inside."""
        names = [name for name in state_dict if name.startswith(prefix)]
        given = {name.removeprefix(prefix): state_dict.pop(name) for name in names}
        parts = self._parts_of(given, self._own_state())
        state_dict |= {f"{prefix}module.{name}": part for name, part in parts.items()}
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse_copies()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_copies()


def _refuse_copies() -> NoReturn:
    raise TypeError(
        "an FSDP cannot be copied or pickled: each rank has a part of it, and a process group; "
        "copy or save its state_dict(), which all ranks call, and load it into another one"
    )
