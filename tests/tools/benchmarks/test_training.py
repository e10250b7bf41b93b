"""The benchmark of training steps, on tiny models: fair peers, records and their table."""

import dataclasses

import pytest
import torch

import lib.tools.benchmarks.training as benchmark
import lib.training.step as training_step
from lib.core.records import read_records
from lib.model.config import MODEL_PRESETS, ModelConfig
from lib.model.transformer import TransformerLM
from lib.tools.benchmarks.training import (
    CANDIDATES,
    PEER,
    PeerLM,
    TrainingBenchmarkConfig,
    benchmark_training,
    our_step,
    peer_step,
    training_groups,
)

CPU = torch.device("cpu")
TINY = ModelConfig(vocab_size=61, context_length=16, d_model=32, num_layers=2, num_heads=4, d_ff=48)


@pytest.fixture(autouse=True, scope="module")
def on_a_cpu(one_core):
    """No compiling, no CUDA graphs; the rest as on a GPU."""
    tied = dataclasses.replace(TINY, tied_embeddings=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **options: function)
        patch.setitem(benchmark.FASTEST, "cuda_graph", False)
        patch.setitem(MODEL_PRESETS, "tiny", TINY)
        patch.setitem(MODEL_PRESETS, "small", tied)
        yield


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_models_differ_by_the_peers_learned_positions_only(tied):
    shape = dataclasses.replace(TINY, tied_embeddings=tied)
    positions = shape.context_length * shape.d_model
    assert count(PeerLM(shape)) == count(TransformerLM(shape)) + positions


def test_the_peer_sees_no_later_token():
    torch.manual_seed(0)
    peer = PeerLM(TINY)
    tokens = torch.randint(61, (2, 17))
    logits = []
    peer.head.register_forward_hook(lambda module, inputs, output: logits.append(output.detach()))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 61
    for sequences in (tokens, changed):
        peer(sequences[:, :-1], sequences[:, 1:])
    assert torch.equal(logits[0][:, :9], logits[1][:, :9])
    assert not torch.equal(logits[0][:, 9:], logits[1][:, 9:])


def caught(name, monkeypatch):
    """The models of this class that are built from now on."""
    owner = benchmark if name == "PeerLM" else training_step
    models, cls = [], getattr(owner, name)

    def build(*arguments, **keywords):
        models.append(cls(*arguments, **keywords))
        return models[-1]

    monkeypatch.setattr(owner, name, build)
    return models


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("PeerLM", lambda: peer_step(TINY, CPU, torch.bfloat16)),
        ("TransformerLM", lambda: our_step(TINY, 4, CPU, torch.bfloat16)),
    ],
)
def test_both_train(name, make, monkeypatch):
    torch.manual_seed(0)
    models = caught(name, monkeypatch)
    step = make()
    (transformer,) = models
    # each token is the one before plus 7
    sequences = (torch.arange(4)[:, None] + 7 * torch.arange(17)) % 61

    def loss():
        loss_of = transformer if name == "PeerLM" else transformer.loss
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return float(loss_of(sequences[:, :-1], sequences[:, 1:]))

    before, weights = loss(), [parameter.detach().clone() for parameter in transformer.parameters()]
    for _ in range(100):
        step(sequences)
    assert loss() < before - 0.02
    assert all(not torch.equal(a, b) for a, b in zip(weights, transformer.parameters()))


def test_each_candidate_has_the_settings_in_its_name(monkeypatch):
    models = caught("TransformerLM", monkeypatch)
    for candidate, changes in CANDIDATES.items():
        our_step(TINY, 4, CPU, torch.bfloat16, **changes)
        is_bare = candidate == "none of these"
        model = models.pop()
        assert model.uses_kernels == (candidate != "without Triton kernels" and not is_bare)
        is_short = candidate != "without low-precision weights" and not is_bare
        assert (model.output_weight.dtype == torch.bfloat16) == is_short


def test_each_model_has_a_record_of_the_peer_and_of_each_candidate(tmp_path):
    sizes = {"models": ("tiny", "small"), "batch_sizes": (2, 3), "samples": 3, "steps": 2}
    config = TrainingBenchmarkConfig(**sizes, device="cpu", output=tmp_path)
    on_a_cpu = dataclasses.replace(
        benchmark_training, cases=lambda config, _: training_groups(config, torch.device("cuda"))
    )
    records = on_a_cpu(config)
    assert read_records(tmp_path / "training_benchmark.jsonl") == records
    for name, batch_size in (("tiny", 2), ("small", 3)):
        rows = [{**r["config"], **r["figures"]} for r in records if r["config"]["model"] == name]
        assert [row["candidate"] for row in rows] == [PEER, *CANDIDATES]
        assert [row["samples"] for row in rows] == [3] * len(rows)
        for row in rows:
            tokens = batch_size * TINY.context_length
            assert row["tokens_per_s"] == pytest.approx(tokens / row["median_ms"] * 1e3)
            assert row["iqr_ms"] >= 0
            # a CPU's memory and peak are not known
            assert (row["peak_memory_gb"], row["mfu"]) == (0, None)
        assert [row["candidate"] for row in rows if row.get("ratio_to_peer", 0) > 0] == ["all"]

    text = (tmp_path / "training_benchmark.md").read_text()
    for candidate in (PEER, *CANDIDATES):
        assert text.count(f"| {candidate.ljust(29)} |") == 2


def test_any_device_but_a_gpu_is_refused():
    with pytest.raises(ValueError, match=r"device must be a CUDA device \(.*\), got cpu"):
        benchmark_training(TrainingBenchmarkConfig(device="cpu"))
