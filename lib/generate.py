"""Text from a trained model: token by token, for several prompts at a time, with a KV cache.

What a row gets depends on its own prompt and the seed alone, not on the rows beside it (up to the
rounding of matrix products, whose last bits can change with the size of the batch).
"""

from __future__ import annotations

import codecs
import dataclasses
import logging
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from lib.attention import flash_attention
from lib.checkpoint import find_checkpoint, load_checkpoint
from lib.config import require
from lib.config_training import ModelConfig, SampleConfig, TrainConfig
from lib.hardware import pick_device
from lib.kv_cache import KVCache
from lib.loss import softmax
from lib.model import TransformerLM
from lib.pretokenize import SEPARATOR
from lib.strict_json import from_json
from lib.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def next_token_probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """What the next token is drawn from: logits (..., vocab) -> probabilities (..., vocab).

    First the logits are divided by `temperature`. Then all but the `top_k` likeliest tokens go, and
    of these all but the smallest set of the likeliest whose probability reaches `top_p` (Holtzman
    et al. 2020, section 3.1), at least one. Of equally likely tokens the lower id ranks first.

    Args:
        logits: any floating-point type; computed in at least float32, the dtype of the result.
        temperature: 0 gives the likeliest token probability 1.
        top_k: 0 keeps all.
        top_p: 1 keeps all.

    Raises:
        ValueError: an argument out of range; a row with NaN or +inf, or of -inf throughout.
    """
    require(
        0 <= temperature < math.inf, f"temperature is {temperature}; right is: 0 or more, finite"
    )
    require(top_k >= 0, f"top_k is {top_k}; right is: 0 or more")
    require(0 < top_p <= 1, f"top_p is {top_p}; right is: more than 0 and at most 1")
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    is_usable = logits.logsumexp(-1).isfinite().all()
    require(is_usable, "logits hold NaN or +inf, or a row of -inf; right is: finite numbers")
    if temperature == 0:
        # of equal ones argmax takes the first
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    # the maximum comes off first, and the divisor is no float32 zero: no overflow, no 0 / 0
    scaled = (logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)
    ranked, ids = scaled.sort(dim=-1, descending=True, stable=True)
    if top_k:
        ranked[..., top_k:] = -math.inf
    probabilities = softmax(ranked, dim=-1)
    if top_p < 1:
        # of all tokens that rank before
        before = F.pad(probabilities.cumsum(-1), (1, -1))
        probabilities = probabilities.masked_fill((before >= top_p) & (before > 0), 0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter(-1, ids, probabilities)


@torch.inference_mode()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop_token: int | None = None,
    vocab_size: int | None = None,
    seed: int = 0,
    use_cache: bool = True,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt, without the prompt, at most `max_new_tokens`.

    A row ends before its `stop_token`, which is not returned. The same prompt several times in
    `prompts` gives several texts: the k-th one depends on the prompt, the seed and k.

    All rows are read in lock step from the length of the shortest prompt on; a row whose prompt is
    longer takes its own next token instead of a drawn one. So no row is padded.

    Text may be longer than the context, prompts too. Whenever `context_length` tokens have been
    read and one more is to be, the last context_length // 2 of them stay and are read again, from
    position 0; what stood before is forgotten (see `window_start`).

    Args:
        model: a `TransformerLM`, or a module with its `config`, `hidden` and `output_weight`.
        temperature, top_k, top_p: as in `next_token_probabilities`.
        vocab_size: ids from this one on are never drawn: they only pad the embedding. The model's
            own when left out.
        use_cache: whether keys and values of the tokens before are kept, or computed again for each
            token. The tokens are the same.
        on_token: called with row and token for each token returned, as soon as it is drawn.

    Raises:
        ValueError: no prompts, an empty one, a token outside the vocabulary, or another argument
            out of range; logits that are not finite.
    """
    texts = [[int(token) for token in prompt] for prompt in prompts]
    vocab_size = model.config.vocab_size if vocab_size is None else vocab_size
    _check_arguments(texts, max_new_tokens, stop_token, vocab_size, model.config.vocab_size)
    # refuses bad ones before the first step
    next_token_probabilities(torch.zeros(1), temperature, top_k, top_p)
    cache, weight = None, model.output_weight
    if use_cache:
        cache = KVCache(model.config, len(texts), device=weight.device, dtype=weight.dtype)

    def probabilities(length: int) -> Tensor:
        logits = _next_logits(model, texts, length, cache)[:, :vocab_size]
        return next_token_probabilities(logits, temperature, top_k, top_p)

    was_training = model.training
    model.eval()
    try:
        generators = _generators(seed, texts)
        return _extend(texts, probabilities, generators, max_new_tokens, stop_token, on_token)
    finally:
        model.train(was_training)


def window_start(length: int, context_length: int) -> int:
    """The first of `length` tokens that the model still sees, 0 while all fit into the context.

    It moves on by context_length - context_length // 2 tokens at a time: a cache of keys and
    values, which belong to positions, is then computed anew, and not for each token.
    """
    stride = context_length - context_length // 2
    return stride * max(0, math.ceil((length - context_length) / stride))


def generate_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    use_cache: bool = True,
    on_text: Callable[[int, str], None] | None = None,
) -> list[str]:
    """The text that continues each prompt, without the prompt, up to the next `<|endoftext|>`.

    Special tokens in a prompt count as such; an empty prompt starts a new document, right behind an
    `<|endoftext|>`. Arguments as in `generate`. Bytes that are no UTF-8 become U+FFFD.

    Args:
        on_text: called with row and new text, in whole characters; joined, they are the text
            returned. What a row's end leaves incomplete comes as U+FFFD when all rows are done.

    Raises:
        ValueError: as `generate`; an empty prompt where the tokenizer has no `<|endoftext|>`; a
            tokenizer with more tokens than the model.
    """
    known = model.config.vocab_size
    require(
        tokenizer.vocab_size <= known,
        f"the tokenizer has {tokenizer.vocab_size} ids; right is: at most the model's {known}",
    )
    stop_token = tokenizer.special_tokens.get(SEPARATOR)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    if stop_token is not None:
        encoded = [ids or [stop_token] for ids in encoded]
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in prompts]
    pieces: list[list[str]] = [[] for _ in prompts]

    def add(row: int, data: bytes, final: bool = False) -> None:
        text = decoders[row].decode(data, final)
        if text:
            pieces[row].append(text)
            if on_text:
                on_text(row, text)

    generate(
        model,
        encoded,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_token=stop_token,
        vocab_size=tokenizer.vocab_size,
        seed=seed,
        use_cache=use_cache,
        on_token=lambda row, token: add(row, tokenizer.decode_bytes([token])),
    )
    for row in range(len(prompts)):
        add(row, b"", final=True)
    return ["".join(parts) for parts in pieces]


def generate_sample(
    model: nn.Module,
    tokenizer: Tokenizer,
    sample: SampleConfig,
    *,
    on_text: Callable[[int, str], None] | None = None,
) -> list[str]:
    """Each prompt of `sample` with its continuation, as `generate_text` makes it."""
    texts = generate_text(
        model,
        tokenizer,
        sample.prompts,
        max_new_tokens=sample.max_new_tokens,
        temperature=sample.temperature,
        top_k=sample.top_k,
        top_p=sample.top_p,
        seed=sample.seed,
        on_text=on_text,
    )
    return [prompt + text for prompt, text in zip(sample.prompts, texts)]


def load_model(
    path: str | os.PathLike, device: str = "auto"
) -> tuple[TransformerLM, Tokenizer, TrainConfig]:
    """Model, tokenizer and config of a training run, ready to generate.

    Weights keep the dtype of the checkpoint; the model is in eval mode. Where its attention kernel
    does not run on `device`, the model has `sdpa` in its place; the config stays that of the run.

    Args:
        path: a run's folder, whose newest whole checkpoint is taken, or one checkpoint inside it.
        device: as in `lib.hardware.pick_device`.

    Raises:
        FileNotFoundError: there is no run, no checkpoint or no tokenizer.
        ValueError: one of them is damaged, they do not fit, or `device` is none.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {path}; right is: a training run, or its checkpoint")
    folders = (path, *path.absolute().parents[:2])
    run = next((folder for folder in folders if (folder / "config.json").is_file()), None)
    if run is None:
        raise FileNotFoundError(f"no config.json in {path}; right is: the folder of a training run")
    if not (run / "tokenizer.json").is_file():
        raise FileNotFoundError(f"no tokenizer.json in {run}; right is: the one that it trained on")
    config = from_json(TrainConfig, run / "config.json")
    tokenizer = Tokenizer.load(run / "tokenizer.json")
    place = pick_device(device)
    checkpoint = find_checkpoint(run / "checkpoints" if run == path else path)
    with safe_open(checkpoint / "model.safetensors", framework="pt") as weights:
        dtype = weights.get_tensor("token_embeddings.weight").dtype
    shape = _with_kernel_for(place, config.model)
    model = TransformerLM(shape, device=place, dtype=dtype, draw=False)
    load_checkpoint(checkpoint, model=model, verify=False)
    return model.eval(), tokenizer, config


def _with_kernel_for(device: torch.device, model: ModelConfig) -> ModelConfig:
    """`model` with an attention kernel that runs on `device`; says so where it is another one."""
    if not model.attention_kernel.startswith("flash"):
        return model
    try:
        flash_attention(model.attention_kernel, device)
    except ValueError as error:
        log.warning("%s, which takes its place here", error)
        return dataclasses.replace(model, attention_kernel="sdpa")
    return model


def newest_run(folder: str | os.PathLike = "artifacts/runs") -> Path:
    """The training run in `folder` that saved a checkpoint last.

    Raises:
        FileNotFoundError: there is none.
    """
    checkpoints = list(Path(folder).glob("*/checkpoints/step-*"))
    if not checkpoints:
        raise FileNotFoundError(f"no training run in {folder}; `python -m lib pipeline` makes one")
    return max(checkpoints, key=lambda path: path.stat().st_mtime).parents[1]


def _extend(
    texts: list[list[int]],
    probabilities: Callable[[int], Tensor],
    generators: list[random.Random],
    max_new_tokens: int,
    stop_token: int | None,
    on_token: Callable[[int, int], None] | None,
) -> list[list[int]]:
    """Draw the tokens that `generate` returns, and append them to `texts`.

    `probabilities(length)` are those of what follows the first `length` tokens of each row.
    """
    new: list[list[int]] = [[] for _ in texts]
    done = [max_new_tokens == 0] * len(texts)
    length = min(map(len, texts))
    while not all(done):
        draws = [len(text) == length and not end for text, end in zip(texts, done)]
        # a row that draws nothing leaves its generator alone
        uniforms = [g.random() if draw else 0.0 for g, draw in zip(generators, draws)]
        for row, token in enumerate(_draw(probabilities(length), uniforms)):
            # a row that is done goes on unseen: the batch stays in step
            if len(texts[row]) == length:
                texts[row].append(token)
            if not draws[row]:
                continue
            done[row] = token == stop_token or len(new[row]) + 1 == max_new_tokens
            if token != stop_token:
                new[row].append(token)
                if on_token:
                    on_token(row, token)
        length += 1
    return new


def _next_logits(
    model: nn.Module, texts: list[list[int]], length: int, cache: KVCache | None
) -> Tensor:
    """Logits (rows, vocab) of what follows the first `length` tokens of each row."""
    first = window_start(length, model.config.context_length)
    if cache is not None:
        if cache.length != length - 1 - first:
            # the first call, or the window has moved
            cache.length = 0
        first += cache.length
    unread = [text[first:length] for text in texts]
    weight = model.output_weight
    # the head is applied to the last token alone
    hidden = model.hidden(torch.tensor(unread, device=weight.device), cache=cache)[:, -1]
    return F.linear(hidden, weight)


def _generators(seed: int, texts: list[list[int]]) -> list[random.Random]:
    """A generator for each row, from the seed, its prompt, and how often that has come before."""
    before: Counter[str] = Counter()
    generators = []
    for text in map(str, texts):
        generators.append(random.Random(f"{seed} {before[text]} {text}"))
        before[text] += 1
    return generators


def _draw(probabilities: Tensor, uniforms: list[float]) -> list[int]:
    """A token for each row of (rows, vocab), by the inverse of the distribution function.

    Tokens stand in the order of falling probability, each with its share of the interval [0, 1);
    drawn is the one in whose share the row's number lies.
    """
    ranked, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    up_to = ranked.cumsum(-1)
    numbers = torch.tensor(uniforms, dtype=up_to.dtype, device=up_to.device)[:, None]
    rank = (up_to <= numbers * up_to[:, -1:]).sum(-1, keepdim=True)
    # rounding can carry a number to the end of the interval, beyond the last token with a share
    last = (ranked > 0).sum(-1, keepdim=True) - 1
    return ids.gather(-1, torch.minimum(rank, last)).squeeze(-1).tolist()


def _check_arguments(
    texts: list[list[int]],
    max_new_tokens: int,
    stop_token: int | None,
    vocab_size: int,
    embedded: int,
) -> None:
    require(texts, "prompts is empty; right is: at least one prompt")
    require(max_new_tokens >= 0, f"max_new_tokens is {max_new_tokens}; right is: 0 or more")
    right = f"right is: 1 to the model's {embedded}"
    require(1 <= vocab_size <= embedded, f"vocab_size is {vocab_size}; {right}")
    for row, text in enumerate(texts):
        require(text, f"prompt {row} is empty; right is: at least one token")
        for token in text:
            right = f"right is: 0 to {embedded - 1}"
            require(0 <= token < embedded, f"prompt {row} has the token id {token}; {right}")
    is_known = stop_token is None or 0 <= stop_token < vocab_size
    require(is_known, f"stop_token is {stop_token}; right is: None, or 0 to {vocab_size - 1}")
