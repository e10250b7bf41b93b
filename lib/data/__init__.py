"""From text to batches: `prepare.py` runs corpus, tokenizer, token arrays; then `batches.py`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "batches": ["get_batch", "BatchSampler"],
        "prepare": ["tokenize_corpus"],
        "token_array": ["load_token_array"],
    },
)
