"""Exchange models with other tools: a run becomes a folder for `transformers`, and vice versa.

    python -m lib export --to transformers DIR     python -m lib import DIR

Such a folder holds `config.json`, `model.safetensors` in Llama's layout (`lib.model.llama`) and
`tokenizer.json`. vLLM, llama.cpp and others read it too. Nothing here needs `transformers`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from lib.core.files import MARK, claim_folder, write_atomically
from lib.core.settings import require, to_dict, to_json
from lib.model.config import ModelConfig
from lib.model.costs import num_parameters
from lib.model.llama import from_llama, from_llama_config, to_llama, to_llama_config
from lib.tokenizer import files as tokenizer_files
from lib.tokenizer.bpe import Tokenizer
from lib.training.checkpoint import read_checkpoint, save_checkpoint
from lib.training.config import ExportConfig, ImportConfig, TrainConfig
from lib.training.generation import checkpoints_of, load_model, newest_run, run_of
from lib.training.metrics import last_evaluation, read_metrics

log = logging.getLogger(__name__)


# Export


def export_run(config: ExportConfig) -> Path:
    """Write a trained model as a folder for `transformers`; return it.

    Raises:
        ValueError: the folder has files, or the model has a variant that Llama's layout lacks.
    """
    source, folder = config.checkpoint or newest_run(), config.folder
    require(folder is not None, "folder must be a path, as in `export DIR`, got None")
    checkpoint, (model, tokenizer, settings) = read_checkpoint(
        checkpoints_of(source), lambda path: (path, load_model(path, "cpu"))
    )
    weights = to_llama(model.state_dict(), model.config)
    claim_folder(folder, "an unfinished export", setting="folder")

    tokenizer_files.save_huggingface(folder / "tokenizer.json", tokenizer.parts)
    # the tokens that end a text; the first one also begins it
    ends = tokenizer.end_ids
    first = ends[0] if ends else None
    marks = {"bos_token_id": first, "eos_token_id": ends if len(ends) > 1 else first}
    for name, content in {
        "tokenizer_config.json": _tokenizer_config(tokenizer, model.config),
        "generation_config.json": marks | {"pad_token_id": first},
    }.items():
        write_atomically(folder / name, json.dumps(content, indent=2) + "\n")
    run = run_of(source)
    log.info("exporting %s of %s", checkpoint.name, run)
    card = model_card(folder.resolve().name, run, checkpoint, settings)
    write_atomically(folder / "README.md", card)
    # each weight keeps its dtype; the config, below, names one that holds all of them exactly
    write_atomically(folder / "model.safetensors", save(weights, {"format": "pt"}))
    # last, so that a folder with it is whole
    fields = to_llama_config(model.config) | marks
    fields["torch_dtype"] = str(_common_dtype(weights)).removeprefix("torch.")
    write_atomically(folder / "config.json", json.dumps(fields, indent=2) + "\n")
    (folder / MARK).unlink()
    return folder


def _common_dtype(weights: dict[str, Tensor]) -> torch.dtype:
    """The dtype of all weights, or float32 where they differ."""
    dtypes = {weight.dtype for weight in weights.values()}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _tokenizer_config(tokenizer: Tokenizer, model: ModelConfig) -> dict[str, Any]:
    end = tokenizer.end_tokens[0] if tokenizer.end_tokens else None
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.context_length,
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "clean_up_tokenization_spaces": False,
    }


CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A language model with {parameters:,} parameters, trained with the training workbook and written in
Llama's layout.

- **Model.** {model.num_layers} Transformer blocks of {model.num_heads} heads, `d_model` \
{model.d_model}, `d_ff` {model.d_ff}, a vocabulary of {model.vocab_size:,} and a context of \
{model.context_length:,} tokens. The tokenizer is byte-level BPE with GPT-2's pre-tokens.
- **Training.** {training}
- **Evaluation.** {evaluation}
- **Limits.** It knows nothing but its training text, and is for learning and experiments. It was
  not trained beyond {model.context_length:,} tokens.

```python
from transformers import pipeline

tell = pipeline("text-generation", ".")
print(tell("Once upon a time", max_new_tokens=50, do_sample=False)[0]["generated_text"])
```
"""


def model_card(name: str, run: Path, checkpoint: Path, config: TrainConfig) -> str:
    """The page about a model that Hugging Face shows, from its run's settings and metrics."""
    step = int(checkpoint.name.removeprefix("step-"))
    data = f" on {config.data.name}" if config.data else ""
    training = f"{step:,} steps{data}." if step else "Imported, and not trained by the workbook."
    return CARD.format(
        name=name,
        model=config.model,
        parameters=num_parameters(config.model),
        training=training,
        evaluation=_evaluation(run),
    )


def _evaluation(run: Path) -> str:
    """The figures on held-out text: the last in a run's metrics, or a committed model's record."""
    record = run / "record.json"
    last = last_evaluation(read_metrics(run / "metrics.jsonl"))
    if last is not None:
        text = f"held-out text after step {last['step']:,}"
        loss, perplexity = last["validation_loss"], last["validation_perplexity"]
    elif record.is_file():
        made = json.loads(record.read_text(encoding="utf-8"))
        text = made["text"]
        loss, perplexity = made["evaluation"]["loss"], made["evaluation"]["perplexity"]
    else:
        return "Not recorded."
    return f"On {text}: loss {loss:.3f}, perplexity {perplexity:.2f}."


# Import


def import_model(config: ImportConfig) -> Path:
    """Turn a folder with a Llama into a run that `generate` uses; return the run's folder.

    Raises:
        ValueError: the run's folder has files, or model or tokenizer have something that ours lack.
    """
    source = config.folder
    require(source is not None, "folder must be a path, as in `import DIR`, got None")
    for name in ("config.json", "tokenizer.json"):
        if not (source / name).is_file():
            raise FileNotFoundError(f"no {name} in {source}; it must be a folder of transformers")
    run = config.output or Path("artifacts/runs") / source.resolve().name

    try:
        model = from_llama_config(json.loads((source / "config.json").read_bytes()))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{source / 'config.json'}: {error}") from error
    parts = tokenizer_files.load_huggingface(source / "tokenizer.json")
    tokenizer = Tokenizer.from_parts(parts._replace(end_tokens=_end_tokens(source, parts)))
    require(
        tokenizer.vocab_size <= (model.vocab_size or 0),
        f"vocab_size must be at least the tokenizer's {tokenizer.vocab_size}, got "
        f"{model.vocab_size}",
    )
    weights = from_llama(_load_weights(source), model)
    claim_folder(run, "an unfinished import", setting="output")

    settings = TrainConfig(model=model)
    tokenizer.save(run / "bpe.json")
    # `train` refuses to continue from it, since there is no optimizer state
    extra = {"config": to_dict(settings), "data_sha256": {}, "imported_from": str(source)}
    save_checkpoint(run / "checkpoints", step=0, model=weights, extra=extra)
    write_atomically(run / "config.json", to_json(settings) + "\n")
    (run / MARK).unlink()
    return run


def _end_tokens(folder: Path, parts: tokenizer_files.Parts) -> tuple[str, ...] | None:
    """The special tokens that end a text, where `transformers` looks for them; None if unsaid."""
    texts = {token_id: text for text, token_id in parts.special_tokens.items()}
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        path = folder / name
        try:
            found = _end_ids(json.loads(path.read_bytes()), parts) if path.is_file() else []
            known = tuple(texts[token_id] for token_id in found if token_id in texts)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: eos_token must be a token or several: {error!r}") from error
        if len(known) < len(found):
            log.warning("%s: eos_token_id %s has no special token, and ends no text", path, found)
        if known:
            return known
    return None


def _end_ids(settings: dict[str, Any], parts: tokenizer_files.Parts) -> list[int]:
    """The ids that end a text, by a settings file of `transformers`."""
    found, token = settings.get("eos_token_id"), settings.get("eos_token")
    if found is None and token is not None:
        found = parts.special_tokens.get(token["content"] if isinstance(token, dict) else token)
    return found if isinstance(found, list) else [] if found is None else [found]


def _load_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of `model.safetensors` in `folder`, or of the files that its index names.

    Matrices get one dtype, which holds all of them exactly.
    """
    weights: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        try:
            weights |= load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
    for name, weight in weights.items():
        is_known = weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        expected = "float32, bfloat16 or float16"
        require(is_known, f"{folder}: {name} must be {expected}, got {weight.dtype}")
        wrong = int(weight.isfinite().logical_not().sum())
        require(not wrong, f"{folder}: {name} must be finite, got {wrong:,} NaN or infinite values")
    dtypes = {weight.dtype for weight in weights.values() if weight.ndim > 1}
    if len(dtypes) > 1:
        log.info("%s has weights of several dtypes, which become float32", folder)
        weights = {name: weight.float() for name, weight in weights.items()}
    return weights


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's weights, as `transformers` finds them."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise FileNotFoundError(
            f"no model.safetensors in {folder}; other formats are not read, since they can run code"
        )
    try:
        names = sorted({*json.loads(index.read_bytes())["weight_map"].values()})
        is_inside = all(Path(name).name == name for name in names)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} is not the index of a model: {error!r}") from error
    require(is_inside, f"{index} must name files in its folder, got {', '.join(names)}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"no {missing[0]} in {folder}, which {index.name} names")
    return [folder / name for name in names]
