"""AdamW in `adamw.py`; the learning-rate schedule and gradient clipping in `schedule.py`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "adamw": ["AdamW"],
        "schedule": ["cosine_lr", "clip_grad_norm"],
    },
)
