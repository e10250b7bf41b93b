"""Generation against loops and filters written out here, and the promises about rows and seeds."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.model.config import ModelConfig
from lib.model.transformer import TransformerLM
from lib.tokenizer.bpe import Tokenizer
from lib.tokenizer.pretokenize import SEPARATOR
from lib.training.checkpoint import save_checkpoint
from lib.training.config import TrainConfig
from lib.training.generation import (
    generate,
    generate_text,
    load_model,
    next_token_probabilities,
)
from tests.training.runs import BYTES, saved_run

VOCAB, CONTEXT = 23, 12
CONFIG = ModelConfig(
    vocab_size=VOCAB, context_length=CONTEXT, d_model=16, num_layers=2, num_heads=2, d_ff=32
)
PROMPTS = [[5], [1, 2, 3, 4], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2, 3, 4, 5, 6, 7], [22, 0]]
SAMPLING = {"temperature": 0.9, "top_k": 15, "top_p": 0.9}


def make_model(dtype=torch.float64, sharpness=4.0, **changes) -> TransformerLM:
    config = dataclasses.replace(CONFIG, **changes)
    model = TransformerLM(config, dtype=dtype, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        # random weights give nearly uniform probabilities that hardly depend on earlier tokens,
        # which would hide differences
        model.output_weight.mul_(sharpness)
        for parameter in model.layers.parameters():
            parameter.mul_(3 if parameter.dim() == 2 else 1)
    return model


class Table(torch.nn.Module):
    """Gives, behind token i, the logits rows[i]."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.output_weight = rows, torch.eye(len(rows))
        self.config = dataclasses.replace(CONFIG, vocab_size=len(rows))

    def hidden(self, token_ids, cache=None):
        if cache is not None:
            cache.length += token_ids.shape[-1]
        return self.rows[token_ids]


def fixed(logits) -> Table:
    """The same logits behind every token."""
    return Table(torch.as_tensor(logits).expand(len(logits), -1))


def scripted(script, vocab_size) -> Table:
    """Prefers, behind token i, the token script[i]."""
    rows = torch.zeros(vocab_size, vocab_size)
    for token, following in script.items():
        rows[token, following] = 50.0
    return Table(rows)


def plain_probabilities(logits, temperature, top_k, top_p):
    """The same by lists and sums."""
    if temperature == 0:
        return [float(i == logits.index(max(logits))) for i in range(len(logits))]
    highest = max(logits)
    weights = [math.exp((logit - highest) / temperature) for logit in logits]
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    ranked = ranked[:top_k] if top_k else ranked
    total = sum(weights[i] for i in ranked)
    kept = []
    for i in ranked:
        kept.append(i)
        if sum(weights[j] for j in kept) / total >= top_p and top_p < 1:
            break
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@given(
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=12),
    temperature=st.sampled_from([0, 0.1, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 14),
    # not reached exactly by any sum of such exponentials but that of one or of equal ones
    top_p=st.sampled_from([1e-9, 0.1234567, 0.4567891, 0.8912345, 0.9999, 1.0]),
)
@settings(max_examples=150)
def test_probabilities_are_those_of_the_plain_filter(logits, temperature, top_k, top_p):
    tensor = torch.tensor(logits, dtype=torch.float64)
    ours = next_token_probabilities(tensor, temperature, top_k, top_p)
    expected = plain_probabilities(logits, temperature, top_k, top_p)
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64))


def test_top_p_stops_at_a_probability_that_is_reached_exactly():
    logits = torch.tensor([0.125, 0.5, 0.25, 0.125]).log()
    kept = {p: next_token_probabilities(logits, top_p=p).nonzero().flatten().tolist() for p in
            (0.1, 0.5, 0.51, 0.75, 0.76, 0.876)}  # fmt: skip
    assert kept == {0.1: [1], 0.5: [1], 0.51: [1, 2], 0.75: [1, 2], 0.76: [0, 1, 2],
                    0.876: [0, 1, 2, 3]}  # fmt: skip


def test_of_equal_tokens_the_lower_ids_stay():
    # so many that a sort which is not stable mixes them
    probabilities = next_token_probabilities(torch.zeros(5000), top_k=2000)
    assert probabilities.nonzero().flatten().tolist() == list(range(2000))


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_low_temperature_leaves_the_likeliest(temperature, dtype):
    logits = torch.tensor([-60000.0, 3.0, 2.0, -math.inf], dtype=dtype)
    probabilities = next_token_probabilities(logits, temperature)
    assert probabilities.tolist() == [0, 1, 0, 0]
    assert probabilities.dtype == torch.float32
    large = torch.tensor([-1e10, 2e10, 1e10])
    assert next_token_probabilities(large, temperature).tolist() == [0, 1, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad, temperature):
    row = [-math.inf] * 3 if bad is None else [0.0, bad, 1.0]
    with pytest.raises(ValueError, match="NaN"):
        next_token_probabilities(torch.tensor([[0.0, 1.0, 2.0], row]), temperature)


def test_greedy_is_the_argmax_of_a_full_forward_pass():
    model = make_model()
    expected = []
    for prompt in PROMPTS[:2]:
        text = list(prompt)
        for _ in range(CONTEXT - len(prompt)):
            text.append(model(torch.tensor([text]))[0, -1].argmax().item())
        expected.append(text[len(prompt) :])
    for prompt, tokens in zip(PROMPTS, expected):
        assert generate(model, [prompt], max_new_tokens=len(tokens), temperature=0) == [tokens]
    both = generate(model, PROMPTS[:2], max_new_tokens=CONTEXT, temperature=0)
    assert [row[: len(tokens)] for row, tokens in zip(both, expected)] == expected
    assert len(set(expected[0])) > 2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"positions": "none", "norm": "post", "feed_forward": "silu"},
        {"tied_embeddings": True, "qk_norm": True},
        {"attention_kernel": "vectorized_torch"},
        {"context_length": 1},
        {"context_length": 5},
        {"context_length": 64},
    ],
    ids=str,
)
def test_a_cache_changes_nothing(changes):
    model = make_model(**changes)
    for options in ({"temperature": 0}, SAMPLING):
        with_cache, without = (
            generate(model, PROMPTS, max_new_tokens=30, use_cache=use_cache, **options)
            for use_cache in (True, False)
        )
        assert with_cache == without
        assert [len(row) for row in with_cache] == [30] * len(PROMPTS)


def test_with_a_cache_each_token_is_read_once_until_the_window_moves(monkeypatch):
    model, read, hidden = make_model(), [], TransformerLM.hidden

    def counting(self, token_ids, cache=None):
        read.append(token_ids.shape[-1])
        return hidden(self, token_ids, cache=cache)

    monkeypatch.setattr(TransformerLM, "hidden", counting)
    generate(model, [[1, 2, 3]], max_new_tokens=18)
    # 3 + 9 tokens fill the context of 12; then its last 6 and the new one, up to 12 again
    assert read == [3, *[1] * 9, 7, *[1] * 5, 7, 1]


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 3 * CONTEXT - 1])
def test_beyond_the_context_the_model_sees_the_documented_window(length):
    model = make_model()
    text = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    seen = text
    while len(seen) > CONTEXT:
        seen = seen[CONTEXT - CONTEXT // 2 :]
    expected = model(torch.tensor([seen]))[0, -1].argmax().item()
    assert generate(model, [text], max_new_tokens=1, temperature=0) == [[expected]]


@pytest.mark.parametrize("options", [{"temperature": 0}, SAMPLING], ids=["greedy", "sampled"])
def test_a_row_does_not_depend_on_its_neighbors(options):
    model = make_model()
    alone = [generate(model, [prompt], max_new_tokens=20, **options)[0] for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=20, **options) == alone
    assert generate(model, PROMPTS[::-1], max_new_tokens=20, **options) == alone[::-1]
    # nor on when they end
    stop = alone[0][3]
    cut = [row[: row.index(stop)] if stop in row else row for row in alone]
    assert generate(model, PROMPTS, max_new_tokens=20, stop_token=stop, **options) == cut


def test_a_seed_decides_the_text_and_torchs_global_generator_is_left_alone():
    model, before = make_model(sharpness=1.0), torch.get_rng_state()
    first, again, other = (
        generate(model, PROMPTS, max_new_tokens=20, seed=seed) for seed in (0, torch.tensor(0), 1)
    )
    assert first == again
    assert all(ours != theirs for ours, theirs in zip(first, other))
    assert torch.equal(torch.get_rng_state(), before)
    # copies of a prompt differ, and the first is as alone
    texts = generate(model, [[1, 2], [3], [1, 2], [1, 2]], max_new_tokens=20)
    assert len(set(map(tuple, texts))) == 4
    assert generate(model, [[1, 2], [1, 2]], max_new_tokens=20) == [texts[0], texts[2]]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.7}, {"top_k": 4, "top_p": 0.9}])
def test_draws_follow_the_distribution_and_are_independent(options):
    logits = torch.tensor([1.0, -1.0, 0.5, 0.0, -0.5])
    rows = generate(fixed(logits), [[0]] * 4000, max_new_tokens=4, use_cache=False, **options)
    expected = torch.outer(*[next_token_probabilities(logits, **options)] * 2)
    ids = torch.tensor(rows)
    # one token with the next one, and one row with the next one
    for first, second in (
        (ids[:, 0], ids[:, 1]),
        (ids[:, 1], ids[:, 3]),
        (ids[1:, 0], ids[:-1, 0]),
    ):
        counts = torch.bincount(5 * first + second, minlength=25).view(5, 5)
        # five standard deviations
        torch.testing.assert_close(counts / len(first), expected, rtol=0, atol=0.04)


def test_a_random_number_draws_the_token_in_whose_share_it_lies(monkeypatch):
    monkeypatch.setattr("random.Random.random", lambda self: 1 - 2**-53)
    model = fixed(torch.linspace(0, -3, 1000))
    assert generate(model, [[0]], max_new_tokens=1) == [[999]]
    assert generate(model, [[0]], max_new_tokens=1, top_k=3) == [[2]]
    # two tokens with a half each
    for number, token in ((0.0, 0), (0.49, 0), (0.5, 1), (0.51, 1)):
        monkeypatch.setattr("random.Random.random", lambda self, number=number: number)
        assert generate(fixed([0.0, 0.0]), [[0]], max_new_tokens=1) == [[token]]


def test_a_row_ends_before_its_stop_token():
    model = scripted({1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: 7}, 9)
    rows = generate(model, [[1], [3], [4], [7, 1]], max_new_tokens=3, temperature=0, stop_token=5)
    assert rows == [[2, 3, 4], [4], [], [2, 3, 4]]
    assert generate(model, [[1]], max_new_tokens=9, temperature=0, stop_token={4}) == [[2, 3]]
    # one in a prompt stops nothing
    model = scripted({5: 1, 1: 2, 2: 5}, 9)
    rows = generate(model, [[3], [5, 5, 5]], max_new_tokens=9, temperature=0, stop_token=5)
    assert rows[1] == [1, 2]


def test_padding_of_the_vocabulary_is_never_drawn():
    model = fixed([0.0, 1.0, 0.5, 9.0, 9.0])
    rows = generate(model, [[4]] * 50, max_new_tokens=4, vocab_size=3)
    assert {token for row in rows for token in row} == {0, 1, 2}


def test_on_token_is_called_for_each_token_as_it_comes():
    model, calls = make_model(), []
    rows = generate(
        model, PROMPTS, max_new_tokens=9, stop_token=4, on_token=lambda *call: calls.append(call)
    )
    assert [[t for row, t in calls if row == i] for i in range(len(PROMPTS))] == rows
    # the shortest prompt begins, and the second one joins before the first has ended
    assert [row for row, _ in calls[:5]] == [0, 0, 3, 0, 3]


@pytest.mark.parametrize("training", [True, False])
def test_the_model_comes_back_in_its_mode_and_can_be_trained(training):
    model = make_model().train(training)
    model.layers[0].train(not training)

    def fail(row, token):
        assert torch.is_inference_mode_enabled()
        assert not model.training
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, [[1]], max_new_tokens=1, on_token=fail)
    assert (model.training, model.layers[0].training) == (training, not training)
    model.loss(torch.tensor([[1, 2]]), torch.tensor([[2, 3]])).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True)]
)
def test_short_types_generate(dtype, autocast):
    model = make_model(dtype=dtype, qk_norm=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        rows = generate(model, PROMPTS, max_new_tokens=20, **SAMPLING)
    assert [len(row) for row in rows] == [20] * len(PROMPTS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_with_and_without_a_cache(dtype):
    model = make_model(dtype=dtype, d_model=64, num_heads=2, context_length=32).cuda()
    for use_cache in (True, False):
        rows = generate(model, PROMPTS, max_new_tokens=60, use_cache=use_cache, **SAMPLING)
        assert [len(row) for row in rows] == [60] * len(PROMPTS)
    if dtype == torch.float32:
        greedy = generate(model, PROMPTS, max_new_tokens=10, temperature=0)
        assert generate(model.cpu(), PROMPTS, max_new_tokens=10, temperature=0) == greedy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "prompts must"),
        ({"prompts": [[1], []]}, "prompt 1 must have at least one token"),
        ({"prompts": [[1], [2, VOCAB]]}, f"prompt 1 must .* 0 and 22, got {VOCAB}"),
        ({"max_new_tokens": -1}, "max_new_tokens must"),
        ({"temperature": -0.1}, "temperature must"),
        ({"temperature": math.inf}, "temperature must"),
        ({"top_k": -1}, "top_k must"),
        ({"top_p": 0.0}, "top_p must"),
        ({"top_p": 1.01}, "top_p must"),
        ({"stop_token": VOCAB}, f"stop_token must .* got {VOCAB}"),
        ({"vocab_size": 0}, "vocab_size must"),
        ({"vocab_size": VOCAB + 1}, f"vocab_size must .* the model's 23, got {VOCAB + 1}"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(changes, message):
    arguments = {"prompts": [[1]], "max_new_tokens": 0} | changes
    with pytest.raises(ValueError, match=message):
        generate(make_model(), arguments.pop("prompts"), **arguments)


END = 256


def test_a_prompt_alone_is_not_taken_for_a_list_of_letters():
    with pytest.raises(ValueError, match="prompts must be a list of texts, got 'Once'"):
        generate_text(scripted_by(b"ab"), BYTES, "Once", max_new_tokens=1)
    with pytest.raises(TypeError, match="float"):
        generate(make_model(), [[1.7]], max_new_tokens=1)


def scripted_by(text: bytes) -> Table:
    """Continues each byte of `text`, all different, by the next one, and the last by the end."""
    ids = [*text, END]
    return scripted(dict(pairwise(ids)), 257)


@pytest.mark.parametrize(
    ("text", "limit", "pieces"),
    # up to the end of the document or the limit
    [("aé€🦊", 20, ["é", "€", "🦊"]), ("a€", 2, ["\ufffd"]), ("abcdef", 2, ["b", "c"])],
)
def test_streamed_text_comes_in_whole_characters(text, limit, pieces):
    calls = []
    model = scripted_by(text.encode())
    returned = generate_text(
        model, BYTES, ["a"], max_new_tokens=limit, on_text=lambda *call: calls.append(call)
    )
    assert returned == ["".join(pieces)]
    assert calls == [(0, piece) for piece in pieces]


def test_special_tokens_in_a_prompt_are_tokens_and_an_empty_prompt_is_one():
    model = scripted({END: ord("x"), ord("x"): END}, 257)
    assert generate_text(model, BYTES, ["", f"a{SEPARATOR}"], max_new_tokens=5) == ["x", "x"]


def test_a_text_ends_at_each_token_that_the_tokenizer_says_ends_it():
    ends = {"<end>": 256, "<turn>": 257}
    vocab = BYTES.vocab | {token_id: text.encode() for text, token_id in ends.items()}
    tokenizer = Tokenizer(vocab, [], list(ends), end_tokens=list(ends))
    model = scripted({256: ord("x"), ord("x"): 257, ord("a"): 256}, 258)
    assert generate_text(model, tokenizer, ["", "a"], max_new_tokens=5) == ["x", ""]


def test_a_tokenizer_must_fit_the_prompts_and_the_model():
    tokenizer = Tokenizer({i: bytes([i]) for i in range(256)}, [])
    model = make_model(vocab_size=256)
    with pytest.raises(ValueError, match="prompt 1 must have at least one token"):
        generate_text(model, tokenizer, ["a", ""], max_new_tokens=5)
    assert len(generate_text(model, tokenizer, ["a"], max_new_tokens=5)) == 1
    with pytest.raises(ValueError, match="tokenizer must have at most the model's 23 ids, got 257"):
        generate_text(make_model(), BYTES, ["a"], max_new_tokens=5)


@pytest.fixture
def run(tmp_path):
    """A training run's folder with two checkpoints; the model is that of the second."""

    def make(dtype=torch.float32, **changes):
        model = make_model(dtype=dtype, vocab_size=257, **changes)
        other = TransformerLM(model.config, dtype=dtype)
        return saved_run(tmp_path / "run", {1: other, 20: model}), model

    return make


@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, False), (torch.bfloat16, True)])
def test_a_run_is_loaded_from_its_newest_checkpoint(run, dtype, tied, monkeypatch):
    folder, model = run(dtype, tied_embeddings=tied)
    monkeypatch.setattr(TransformerLM, "reset_parameters", lambda *a: pytest.fail("it draws"))
    loaded, tokenizer, config = load_model(folder, "cpu")
    assert tokenizer.sha256 == BYTES.sha256
    assert config == TrainConfig(model=model.config)
    assert not loaded.training
    ours, theirs = loaded.state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor)


def test_a_kernel_that_needs_a_gpu_gives_way_to_sdpa_and_that_is_said_once(
    run, monkeypatch, caplog
):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    folder, _ = run(attention_kernel="flash_attention_triton")
    loaded, _, config = load_model(folder, "cpu")
    (message,) = caplog.messages
    assert message.startswith("device must be a CUDA GPU for flash_attention_triton, got cpu")
    assert "sdpa" in message
    assert config.model.attention_kernel == "flash_attention_triton"
    assert loaded.config.attention_kernel == "sdpa"
    token_ids = torch.arange(8)[None]
    with_sdpa = make_model(dtype=torch.float32, vocab_size=257)
    assert torch.equal(loaded(token_ids), with_sdpa(token_ids))
    for use_cache in (False, True):
        generate(loaded, [[1, 2]], max_new_tokens=3, use_cache=use_cache)


def test_one_checkpoint_of_a_run_is_loaded(run, monkeypatch):
    folder, model = run()
    older, _, _ = load_model(folder / "checkpoints/step-00000001", "cpu")
    assert not torch.equal(older.output_weight, model.output_weight)
    monkeypatch.chdir(folder / "checkpoints")
    newer, _, _ = load_model("step-00000020", "cpu")
    assert torch.equal(newer.output_weight, model.output_weight)
    in_folder, _, _ = load_model(".", "cpu")
    assert torch.equal(in_folder.output_weight, model.output_weight)


def test_a_tokenizer_that_is_not_the_one_trained_with_is_refused(run):
    folder, model = run()
    for tokenizer in (Tokenizer({i: bytes([255 - i]) for i in range(256)}, [], [SEPARATOR]), BYTES):
        extra = {"data_sha256": {"tokenizer": tokenizer.sha256}}
        save_checkpoint(folder / "checkpoints", step=20, model=model, extra=extra)
        if tokenizer is not BYTES:
            with pytest.raises(ValueError, match=r"bpe\.json must be the tokenizer trained with"):
                load_model(folder, "cpu")
    load_model(folder, "cpu")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("", r"no folder .*run"),
        ("config.json", r"no config\.json in .*run; it must be the folder of a run"),
        ("bpe.json", r"no bpe\.json in .*run; it must be the tokenizer trained with"),
        ("checkpoints", r"no checkpoint step-\* in .*checkpoints"),
    ],
)
def test_what_a_run_lacks_is_named(run, missing, message):
    folder, _ = run()
    (folder / missing).rename(folder.parent / "elsewhere")
    with pytest.raises(FileNotFoundError, match=message):
        load_model(folder, "cpu")
