"""Text from a trained model: token by token, for several prompts at a time, with a KV cache.

A row's text depends on its own prompt and the seed alone, not on the rows beside it (up to the
rounding of matmuls, whose last bits can change with the batch size).
"""

from __future__ import annotations

import codecs
import dataclasses
import logging
import math
import operator
import os
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence, Set
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from lib.core.hardware import pick_device
from lib.core.settings import from_json, require
from lib.model.attention import KVCache, kernel_function
from lib.model.config import ModelConfig
from lib.model.loss import softmax
from lib.model.transformer import TransformerLM
from lib.tokenizer import files as tokenizer_files
from lib.tokenizer.bpe import Tokenizer
from lib.training.checkpoint import list_checkpoints, load_checkpoint, read_checkpoint
from lib.training.config import TrainConfig
from lib.training.evaluation import in_eval_mode

log = logging.getLogger(__name__)


def generate_text(
    model: TransformerLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    on_text: Callable[[int, str], None] | None = None,
    **options: Any,
) -> list[str]:
    """The text that continues each prompt, without the prompt, up to the next end of a text.

    Special tokens in a prompt are recognized; an empty prompt starts a new document, after the
    tokenizer's first end token. Bytes that are not UTF-8 become U+FFFD.

    Args:
        on_text: called with row and new text, in whole characters; joined, they are the text
            returned. A character that a row's end cuts off comes as U+FFFD when all rows are done.
        options: of `generate`: max_new_tokens, temperature, top_k, top_p, seed, use_cache. Those of
            a `SampleConfig` are its `options()`.
    """
    known = model.config.vocab_size
    require(not isinstance(prompts, str), f"prompts must be a list of texts, got {prompts!r}")
    prompts = list(prompts)
    require(
        tokenizer.vocab_size <= known,
        f"tokenizer must have at most the model's {known} ids, got {tokenizer.vocab_size}",
    )
    encoded = [tokenizer.encode(prompt) or tokenizer.end_ids[:1] for prompt in prompts]

    # a token may end inside a character
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in prompts]
    pieces: list[list[str]] = [[] for _ in prompts]

    def add(row: int, data: bytes, final: bool = False) -> None:
        text = decoders[row].decode(data, final)
        if text:
            pieces[row].append(text)
            if on_text:
                on_text(row, text)

    # ids come back one at a time, and text as soon as its characters are whole
    generate(
        model,
        encoded,
        stop_token=tokenizer.end_ids,
        vocab_size=tokenizer.vocab_size,
        on_token=lambda row, token: add(row, tokenizer.decode_bytes([token])),
        **options,
    )
    for row in range(len(prompts)):
        add(row, b"", final=True)
    return ["".join(parts) for parts in pieces]


@torch.inference_mode()
def generate(
    model: TransformerLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop_token: int | Sequence[int] | Set[int] | None = None,
    vocab_size: int | None = None,
    seed: int = 0,
    use_cache: bool = True,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt, without the prompt, at most `max_new_tokens`.

    A row ends before its `stop_token`, which is not returned. The same prompt several times in
    `prompts` gives several texts: the k-th one depends on the prompt, the seed and k.

    All rows are read in lockstep from the length of the shortest prompt on; a row whose prompt is
    longer takes its own next token instead of a sampled one. So no row is padded.

    Text may be longer than the context, and so may prompts. Whenever `context_length` tokens have
    been read and one more follows, the last context_length // 2 of them are read again, from
    position 0; those before are forgotten (see `window_start`).

    Args:
        model: a `TransformerLM`, or a module with its `config`, `hidden` and `output_weight`.
        temperature, top_k, top_p: as in `next_token_probabilities`.
        stop_token: one id, several, or None.
        vocab_size: ids from this one on are never sampled: they only pad the embedding. Default:
            the model's own.
        use_cache: keep keys and values of earlier tokens instead of computing them again for each
            token. The tokens are the same.
        on_token: called with row and token for each token returned, as soon as it is sampled.
    """
    # check everything before the first step; index() takes no fractions
    texts = [[operator.index(token) for token in prompt] for prompt in prompts]
    vocab_size = model.config.vocab_size if vocab_size is None else vocab_size
    if not isinstance(stop_token, (Sequence, Set)):
        stop_token = [] if stop_token is None else [stop_token]
    _check_arguments(texts, max_new_tokens, stop_token, vocab_size, model.config.vocab_size)
    next_token_probabilities(torch.zeros(1, device="cpu"), temperature, top_k, top_p)

    # keys and values of earlier tokens, so that each token is computed once
    cache, weight = None, model.output_weight
    if use_cache:
        cache = KVCache(model.config, len(texts), device=weight.device, dtype=weight.dtype)

    def probabilities(length: int) -> Tensor:
        logits = _next_logits(model, texts, length, cache)[:, :vocab_size]
        return next_token_probabilities(logits, temperature, top_k, top_p)

    # a generator for each row: its text does not depend on its neighbors
    with in_eval_mode(model):
        generators = _generators(operator.index(seed), texts)
        return _extend(texts, probabilities, generators, max_new_tokens, stop_token, on_token)


def _extend(
    texts: list[list[int]],
    probabilities: Callable[[int], Tensor],
    generators: list[random.Random],
    max_new_tokens: int,
    stops: Collection[int],
    on_token: Callable[[int, int], None] | None,
) -> list[list[int]]:
    """Sample the tokens that `generate` returns, and append them to `texts`.

    `probabilities(length)` are those of the token after the first `length` of each row.
    """
    new: list[list[int]] = [[] for _ in texts]
    done = [max_new_tokens == 0] * len(texts)
    length = min(map(len, texts))
    while not all(done):
        # a row samples once its prompt has been read; otherwise its generator is left alone
        samples = [len(text) == length and not end for text, end in zip(texts, done)]
        uniforms = [g.random() if sample else 0.0 for g, sample in zip(generators, samples)]

        # one token for each row; a row that is done continues unseen, to keep the batch in lockstep
        for row, token in enumerate(_sample(probabilities(length), uniforms)):
            if len(texts[row]) == length:
                texts[row].append(token)
            if not samples[row]:
                continue
            # a row ends before its stop token, or when it is long enough
            done[row] = token in stops or len(new[row]) + 1 >= max_new_tokens
            if token not in stops:
                new[row].append(token)
                if on_token:
                    on_token(row, token)
        length += 1
    return new


def _next_logits(
    model: TransformerLM, texts: list[list[int]], length: int, cache: KVCache | None
) -> Tensor:
    """Logits (rows, vocab) of the token after the first `length` of each row."""
    first = window_start(length, model.config.context_length)
    if cache is not None:
        if cache.length != length - 1 - first:
            # the first call, or the context has moved: positions have changed
            cache.reset()
        first += cache.length

    # with a cache mostly one token a row, without one all that the model still sees
    unread = [text[first:length] for text in texts]
    weight = model.output_weight
    token_ids = torch.tensor(unread, device=weight.device)  # (rows, unread)

    # the head is applied to the last token alone
    hidden = model.hidden(token_ids, cache=cache)[:, -1]  # (rows, d_model)
    return F.linear(hidden, weight)  # (rows, vocab)


def window_start(length: int, context_length: int) -> int:
    """The first of `length` tokens that the model still sees; 0 while all fit into the context.

    It moves by context_length - context_length // 2 tokens at a time: keys and values belong to
    positions, so a cache is recomputed then, and not for each token.
    """
    stride = context_length - context_length // 2
    return stride * max(0, math.ceil((length - context_length) / stride))


def next_token_probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """The distribution that the next token is sampled from: logits (..., vocab) -> the same shape.

    First the logits are divided by `temperature`. Then all but the `top_k` most likely tokens are
    dropped, and of these all but the smallest set of the most likely whose probability reaches
    `top_p` (Holtzman et al. 2020, section 3.1), at least one. Of equally likely tokens the lower id
    ranks first.

    Args:
        logits: any floating-point type; computed in at least float32, the dtype of the result.
        temperature: 0 gives the most likely token probability 1.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
    """
    message = f"temperature must be at least 0 and finite, got {temperature}"
    require(0 <= temperature < math.inf, message)
    require(top_k >= 0, f"top_k must be at least 0, got {top_k}")
    require(0 < top_p <= 1, f"top_p must be more than 0 and at most 1, got {top_p}")
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    is_usable = logits.logsumexp(-1).isfinite().all()
    require(is_usable, "logits must be finite, got NaN, +inf, or a row of -inf")

    # temperature: large ones level the distribution, 0 leaves the most likely token
    if temperature == 0:
        # argmax takes the first of equal ones
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    # the maximum is subtracted first, and the divisor is not a float32 zero: no overflow, no 0 / 0
    scaled = (logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)

    # top-k: what ranks behind gets no probability
    ranked, ids = scaled.sort(dim=-1, descending=True, stable=True)  # (..., vocab), by rank
    if top_k:
        ranked[..., top_k:] = -math.inf
    probabilities = softmax(ranked, dim=-1)

    # top-p: a token stays if those before it do not reach top_p yet
    if top_p < 1:
        # total probability of all tokens that rank before
        before = F.pad(probabilities.cumsum(-1), (1, -1))
        probabilities = probabilities.masked_fill((before >= top_p) & (before > 0), 0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)

    # back from ranks to token ids
    return torch.zeros_like(probabilities).scatter(-1, ids, probabilities)


def _sample(probabilities: Tensor, uniforms: list[float]) -> list[int]:
    """A token for each row of (rows, vocab), by inverse transform sampling.

    Tokens divide the interval [0, 1) in order of falling probability, each with a share as wide as
    its probability; the token whose share contains the row's number is taken.
    """
    ranked, ids = probabilities.sort(dim=-1, descending=True, stable=True)  # (rows, vocab)
    ends = ranked.cumsum(-1)
    numbers = torch.tensor(uniforms, dtype=ends.dtype, device=ends.device)[:, None]  # (rows, 1)
    rank = (ends <= numbers * ends[:, -1:]).sum(-1, keepdim=True)
    # rounding can move a number past the last token with a share
    last = (ranked > 0).sum(-1, keepdim=True) - 1
    return ids.gather(-1, torch.minimum(rank, last)).squeeze(-1).tolist()


def _generators(seed: int, texts: list[list[int]]) -> list[random.Random]:
    """A generator for each row, from the seed, its prompt, and how often that came before."""
    before: Counter[str] = Counter()
    generators = []
    for text in map(str, texts):
        generators.append(random.Random(f"{seed} {before[text]} {text}"))
        before[text] += 1
    return generators


def _check_arguments(
    texts: list[list[int]],
    max_new_tokens: int,
    stops: Collection[int],
    vocab_size: int,
    embedded: int,
) -> None:
    require(texts, "prompts must have at least one prompt, got none")
    require(max_new_tokens >= 0, f"max_new_tokens must be at least 0, got {max_new_tokens}")
    message = f"vocab_size must be between 1 and the model's {embedded}, got {vocab_size}"
    require(1 <= vocab_size <= embedded, message)
    for row, text in enumerate(texts):
        require(text, f"prompt {row} must have at least one token, got none")
        for token in text:
            message = f"prompt {row} must have token ids between 0 and {embedded - 1}, got {token}"
            require(0 <= token < embedded, message)
    for token in stops:
        message = f"stop_token must be None or between 0 and {vocab_size - 1}, got {token}"
        require(0 <= token < vocab_size, message)


# Trained models


def load_model(
    path: str | os.PathLike, device: str = "auto"
) -> tuple[TransformerLM, Tokenizer, TrainConfig]:
    """Load model, tokenizer and config of a training run, ready to generate.

    Weights keep the checkpoint's dtype; the model is in eval mode. If its attention kernel does not
    run on `device`, the model uses `sdpa` instead; the config stays that of the run.

    Args:
        path: a run's folder, whose newest whole checkpoint is taken, or one checkpoint inside it.
        device: as in `lib.core.hardware.pick_device`.

    Raises:
        FileNotFoundError, ValueError: no whole run is there, or its tokenizer is not the one
            trained with.
    """
    path = Path(path)
    run = run_of(path)
    if not tokenizer_files.find(run).is_file():
        raise FileNotFoundError(f"no bpe.json in {run}; it must be the tokenizer trained with")
    checkpoints = checkpoints_of(path)
    config = from_json(TrainConfig, run / "config.json")
    tokenizer = Tokenizer.load(run)
    device = pick_device(device)
    shape = _with_kernel_for(device, config.model)

    def read(checkpoint: Path) -> TransformerLM:
        with safe_open(checkpoint / "model.safetensors", framework="pt") as weights:
            dtype = weights.get_tensor("token_embeddings.weight").dtype
        model = TransformerLM(shape, device=device, dtype=dtype, draw=False)
        extra = load_checkpoint(checkpoint, model=model, verify=False).extra
        trained_with = extra.get("data_sha256", {}).get("tokenizer", tokenizer.sha256)
        message = f"{tokenizer_files.find(run)} must be the tokenizer trained with, got another one"
        require(tokenizer.sha256 == trained_with, message)
        return model

    return read_checkpoint(checkpoints, read).eval(), tokenizer, config


def checkpoints_of(path: Path) -> Path:
    """The folder of checkpoints of the run `path`, or the checkpoint `path` itself."""
    run = run_of(path)
    if not (run / "checkpoints").is_dir() and (run / "model.safetensors").is_file():
        raise ValueError(
            f"{run} holds a model of transformers, not a run; `python -m lib import {run}` makes a "
            "run of it"
        )
    return run / "checkpoints" if run == path else path


def run_of(path: Path) -> Path:
    """The folder of the training run that `path`, itself or a checkpoint inside it, belongs to."""
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {path}; it must be a training run or its checkpoint")
    folders = (path, *path.absolute().parents[:2])
    run = next((folder for folder in folders if (folder / "config.json").is_file()), None)
    if run is None:
        raise FileNotFoundError(f"no config.json in {path}; it must be the folder of a run")
    return run


def _with_kernel_for(device: torch.device, model: ModelConfig) -> ModelConfig:
    """`model` with an attention kernel that runs on `device`; warns if that is another one."""
    if not model.attention_kernel.startswith("flash"):
        return model
    try:
        kernel_function(model.attention_kernel, device)
    except ValueError as error:
        log.warning("%s; using sdpa instead", error)
        return dataclasses.replace(model, attention_kernel="sdpa")
    return model


def newest_run(folder: str | os.PathLike = "artifacts/runs") -> Path:
    """The training run in `folder` that saved a checkpoint last."""
    # a folder changes when a checkpoint gets its name there
    found = [path for path in Path(folder).glob("*/checkpoints") if list_checkpoints(path)]
    if not found:
        raise FileNotFoundError(f"no training run in {folder}; `python -m lib pipeline` makes one")
    return max(found, key=lambda path: path.stat().st_mtime).parent
