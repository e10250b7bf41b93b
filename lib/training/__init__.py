"""Training: `loop.py` the loop, `step.py` one step, `checkpoint.py` saving and resuming."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "checkpoint": ["load_checkpoint", "save_checkpoint"],
        "config": ["OptimizerConfig", "TrainConfig"],
        "loop": ["train"],
    },
)
