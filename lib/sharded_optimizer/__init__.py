"""ZeRO-1: each rank keeps and updates its part of the optimizer state; begin at `optimizer.py`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "optimizer": ["ShardedOptimizer"],
    },
)
