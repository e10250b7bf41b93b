"""Predictions of speed and memory: what is measured, what is fitted, and how far they are off."""

from dataclasses import replace

import pytest

from lib.__main__ import main
from lib.model.config import model_preset
from lib.tools.predict import (
    GPUS,
    Run,
    answer,
    left_out_errors,
    measured,
    predict,
    published,
    published_rows,
    row,
)

GPT2 = model_preset("gpt2-124m")


def test_our_steps_are_predicted_without_their_models_records_within_an_eighth():
    errors = [abs(error) for _, error in left_out_errors()]
    assert len(errors) >= 20
    assert max(errors) < 1 / 8
    assert {step.run.gpus for step in measured()} == {1, 2, 4}


def test_memory_on_record_is_predicted_within_an_eighth():
    for step in measured():
        if step.run.batch_size * step.run.model.context_length > 8192:
            assert predict(step.run).peak_gb == pytest.approx(step.peak_gb, rel=1 / 8)


def test_at_least_ten_published_figures_stand_beside_their_predictions():
    assert len(published()) >= 10
    assert published()["source"].all()
    # trainers that are as fast as ours: those in CUDA C++, on the chips of data centers
    fast = [r for r in published_rows() if r["what"].startswith(("llm.q", "llm.c,"))]
    fast = [abs(int(r["error"].rstrip("%"))) for r in fast if "RTX" not in r["GPU"]]
    assert len(fast) == 5
    assert max(fast) <= 20


def test_a_run_on_record_is_measured_and_any_other_predicted():
    assert answer(GPT2, "H200", 1).source == "measured"
    others = [("A100", 1, 0), ("H200", 8, 0), ("H200", 1, 16)]
    assert all(answer(GPT2, *asked).source == "predicted" for asked in others)


def test_more_and_faster_gpus_are_faster_but_never_more_than_their_number():
    one, eight = (predict(Run(GPT2, GPUS["A100"], count, 32)) for count in (1, 8))
    assert one.tokens_per_s < eight.tokens_per_s < 8 * one.tokens_per_s
    speeds = [predict(Run(GPT2, gpu, 1, 16)).tokens_per_s for gpu in GPUS.values()]
    assert speeds == sorted(speeds)


def test_several_passes_share_one_update_and_one_exchange_of_gradients():
    once, often = (predict(Run(GPT2, GPUS["T4"], 2, 8, passes)) for passes in (1, 16))
    assert often.tokens_per_s > once.tokens_per_s


def test_what_is_not_known_is_said():
    assert "PCIe" in row(answer(GPT2, "T4", 2))["not known"]
    assert "host" in row(answer(GPT2, "H100", 1, 2))["not known"]
    assert row(answer(model_preset("2.7b"), "T4", 1))["tokens/s"] == "does not fit"
    long = replace(GPT2, context_length=32_768)
    assert answer(long, "T4", 1).run.batch_size == 1


@pytest.mark.parametrize(("asked", "says"), [(("H300", 1), "gpu"), (("A100", 9), "1 to 8")])
def test_a_machine_that_is_not_in_the_table_is_refused_by_name(asked, says):
    with pytest.raises(ValueError, match=says):
        answer(GPT2, *asked)


def test_the_command_prints_a_table_and_how_far_to_trust_it(capsys):
    assert main(["predict", "--model", "gpt2-124m", "--gpu", "A100", "--gpus", "4"]) == 0
    out = capsys.readouterr().out
    assert "4 × A100" in out
    assert "predicted" in out
    assert "Error, median and largest" in out
