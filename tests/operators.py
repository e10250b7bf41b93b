"""What PyTorch's operators do in a block of code: names, what they read and what they make."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operators(TorchDispatchMode):
    """Notes what each operator does while this is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.read: set[int] = set()
        """Addresses of the tensors that were read."""
        self.made: dict[torch.dtype, int] = {}
        """How many elements the largest new tensor of each dtype has."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        self.names.append(func.overloadpacket.__name__)
        self.read |= {x.data_ptr() for x in inputs}
        known = {x.untyped_storage().data_ptr() for x in inputs}
        for x in tree_leaves(out):
            if torch.is_tensor(x) and x.untyped_storage().data_ptr() not in known:
                self.made[x.dtype] = max(self.made.get(x.dtype, 0), x.numel())
        return out
