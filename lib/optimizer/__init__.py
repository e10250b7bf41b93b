"""AdamW and gradient clipping in `adamw.py`; the learning-rate schedule in `schedule.py`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "adamw": ["AdamW", "clip_grad_norm"],
        "schedule": ["cosine_lr"],
    },
)
