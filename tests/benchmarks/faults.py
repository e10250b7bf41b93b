"""Deliberate faults in this room; `tests/test_faults.py` shows that its tests catch them."""

from tests.benchmarks.faults_ranks import FAULTS as RANKS
from tests.fault import Fault

FAULTS = [
    *RANKS,
    # an oom record without what was expected
    Fault(
        "lib/benchmarks/sweep.py",
        'return figures | {"status": "oom"}',
        'return {"status": "oom"}',
        "tests/benchmarks/test_sweep.py::test_memory_that_runs_out_leaves_later_rows_unaffected",
    ),
    # a module that lib imports does not count
    Fault(
        "lib/benchmarks/sweep.py",
        "paths = {Path(found.__file__) for found in finder.modules.values() if found.__file__}",
        "paths = {Path(finder.modules[module].__file__)}",
        "tests/benchmarks/test_sweep.py::"
        "test_the_code_version_changes_with_every_file_that_is_imported_and_with_no_other",
    ),
    # one key too few for each query
    Fault(
        "lib/benchmarks/attention.py",
        "pairs = short * (short + 1) // 2 + (self.queries - short) * self.keys",
        "pairs = short * (short - 1) // 2 + (self.queries - short) * self.keys",
        "tests/benchmarks/test_attention.py::test_flops_count_the_visible_pairs",
    ),
    # wrong results count as right if they are NaN
    Fault(
        "lib/benchmarks/attention.py",
        'status = "ok" if error <= LARGEST_ERROR else "wrong"',
        'status = "wrong" if error > LARGEST_ERROR else "ok"',
        "tests/benchmarks/test_attention.py::test_results_that_are_not_finite_are_wrong",
    ),
    # only the last queries are checked
    Fault(
        "lib/benchmarks/attention.py",
        "rows = torch.cat([rows[: min(CHECKED_ROWS, last)], rows[last:]])",
        "rows = rows[last:]",
        "tests/benchmarks/test_attention.py::"
        "test_the_error_of_rows_is_that_of_the_first_and_last_queries",
    ),
    # the time of ours over the peer's
    Fault(
        "lib/benchmarks/attention_report.py",
        'ratio = best["median_ms"] / ours["median_ms"] if is_timed else None',
        'ratio = ours["median_ms"] / best["median_ms"] if is_timed else None',
        "tests/benchmarks/test_attention_report.py::test_targets_are_met_or_not_by_their_ratios",
    ),
    # the first heads of all sequences, not the last ones too
    Fault(
        "lib/benchmarks/attention_steps.py",
        "return x[:: max(1, len(x) - 1), :: max(1, x.shape[1] - 1)]",
        "return x[:: max(1, len(x) - 1), :1]",
        "tests/benchmarks/test_attention_steps.py::test_corners_are_the_first_and_last_heads",
    ),
    # features do not add up from step to step
    Fault(
        "lib/benchmarks/attention_steps.py",
        "steps[name] = schedules = added",
        "steps[name] = added",
        "tests/benchmarks/test_attention_steps.py::"
        "test_each_step_adds_one_feature_and_the_last_is_as_tuned",
    ),
    # training losses of all pairs, also those that differ in kernel and seed
    Fault(
        "lib/benchmarks/attention_training.py",
        "if same(a) == same(b) and other(a) != other(b)",
        "if other(a) != other(b)",
        "tests/benchmarks/test_attention_training.py::"
        "test_runs_are_compared_that_differ_in_one_thing",
    ),
    # the optimizer state and the weights do not count
    Fault(
        "lib/benchmarks/step.py",
        'figures["peak_memory_gb"] = (allocated + state_bytes(step)) / 1e9',
        'figures["peak_memory_gb"] = allocated / 1e9',
        "tests/benchmarks/test_step.py::test_predicted_memory_is_that_of_the_step",
    ),
    # float16 measured without the loss scale
    Fault(
        "lib/benchmarks/step.py",
        "step.backward(loss())",
        "loss().backward()",
        "tests/benchmarks/test_step.py::"
        "test_float16_is_measured_with_the_loss_scaled_as_in_training",
    ),
    # a causal peer that sees the future
    Fault(
        "lib/benchmarks/training.py",
        "q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True",
        "q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=False",
        "tests/benchmarks/test_training.py::test_the_peer_sees_no_later_token",
    ),
    # the last, shorter chunk of the head counts in full
    Fault(
        "lib/benchmarks/training_cpu.py",
        "rows = min(chunk_tokens, tokens - start)",
        "rows = chunk_tokens",
        "tests/benchmarks/test_training_cpu.py::test_the_bare_loop_runs_the_matmuls_of_a_step",
    ),
    # a document that ends at the end of a block is lost
    Fault(
        "lib/benchmarks/tokenizer.py",
        "*whole, rest = (rest + block).split(SEPARATOR)",
        "*whole, rest = block.split(SEPARATOR)",
        "tests/benchmarks/test_tokenizer.py::test_documents_are_the_text_without_separators",
    ),
    # the ratio upside down
    Fault(
        "lib/benchmarks/tokenizer.py",
        '"ratio": speeds["numba"] / speeds[name],',
        '"ratio": speeds[name] / speeds["numba"],',
        "tests/benchmarks/test_tokenizer.py::test_a_summary_has_medians_and_throughputs",
    ),
    # the slowest tiles are kept
    Fault(
        "lib/benchmarks/tune_attention.py",
        "milliseconds, best[key] = min((ms, t) for t, ms in times.items())",
        "milliseconds, best[key] = max((ms, t) for t, ms in times.items())",
        "tests/benchmarks/test_tune_attention.py::test_the_fastest_that_fits_is_kept",
    ),
    # the oldest run is shown
    Fault(
        "lib/benchmarks/headline.py",
        "newest = runs[-1]",
        "newest = runs[0]",
        "tests/benchmarks/test_headline.py::"
        "test_runs_make_an_interval_and_one_that_lacks_a_side_or_another_case_does_not_count",
    ),
]
