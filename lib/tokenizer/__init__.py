"""Byte-level BPE: read `bpe.py` first; `compiled_*.py` do the same fast, behind the same names."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "bpe": ["train_bpe", "Tokenizer"],
    },
)
