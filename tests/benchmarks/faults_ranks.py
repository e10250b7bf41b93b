"""Deliberate faults in the benchmarks on several ranks; `tests/benchmarks/faults.py` lists them."""

from tests.fault import Fault

MULTI_RANK = "tests/benchmarks/test_multi_rank.py"
FAULTS = [
    Fault(
        "lib/benchmarks/multi_rank.py",
        "for name in times if turn % 2 == 0 else reversed(times):",
        "for name in times:",
        f"{MULTI_RANK}::test_epochs_are_interleaved_there_and_back_and_a_refused_training_is_left_out",
    ),
    Fault(
        "lib/benchmarks/multi_rank.py",
        "self.losses[name] = max(self.losses.get(name, []), training.losses, key=len)",
        "self.losses[name] = training.losses",
        f"{MULTI_RANK}::test_models_that_do_not_fit_together_start_anew_for_each_epoch",
    ),
    Fault(
        "lib/benchmarks/multi_rank.py",
        'with contextlib.suppress(FileExistsError), open(path, "xb") as file:',
        'with open(path, "wb") as file:',
        f"{MULTI_RANK}::test_the_first_failure_counts",
    ),
    Fault(
        "lib/benchmarks/multi_rank.py",
        "list(plans[plans.index(failure.plan) + 1 :])",
        "list(plans[plans.index(failure.plan) :])",
        f"{MULTI_RANK}::test_after_a_failure_the_rest_is_left",
    ),
    Fault(
        "lib/benchmarks/multi_rank.py",
        "means = [fmean(epoch) for epoch in zip(*gather_objects(times))]",
        "means = list(times)",
        f"{MULTI_RANK}::test_an_epochs_time_is_the_mean_of_the_ranks_and_tokens_are_those_of_all",
    ),
    Fault(
        "lib/benchmarks/rank_training.py",
        "(sequences + 1) * case.context_length",
        "sequences * case.context_length",
        "tests/benchmarks/test_rank_training.py",
    ),
    Fault(
        "lib/benchmarks/lm_matrix.py",
        "own / memory - 1 if own and memory",
        "memory / own - 1 if own and memory",
        "tests/benchmarks/test_lm_matrix.py::test_efficiency_and_overhead_compare_epoch_by_epoch_with_none",
    ),
    Fault(
        "lib/benchmarks/multi_rank_report.py",
        'or first["launch"] != second["launch"]',
        'or first["device"] != second["device"]',
        "tests/benchmarks/test_lm_matrix.py::test_flashddp_is_compared_with_peers_of_the_same_launch_alone",
    ),
    Fault(
        "lib/benchmarks/sharding.py",
        "starts[first - 1] + sizes[starts[first - 1]] > start:",
        "starts[first - 1] == start:",
        "tests/benchmarks/test_sharding.py::test_a_block_that_overlaps_a_new_one_was_freed_before",
    ),
    Fault(
        "lib/benchmarks/sharding_report.py",
        "lambda ratio: ratio <= 1.03",
        "lambda ratio: ratio < 1.03",
        "tests/benchmarks/test_sharding.py::test_the_line_of_zero1_counts_the_targets_that_are_met",
    ),
    Fault(
        "lib/benchmarks/communication.py",
        "num_bytes=int(size // row_bytes) * row_bytes,",
        "num_bytes=int(size),",
        "tests/benchmarks/test_communication.py::test_each_rank_gets_the_same_number_of_elements",
    ),
    Fault(
        "lib/benchmarks/communication_report.py",
        'config["backend"] != "nccl" or config["hosts"] > 1:',
        'config["backend"] != "nccl":',
        "tests/benchmarks/test_communication.py::test_the_peak_is_shown_only_where_it_is_known_and_used",
    ),
    Fault(
        "lib/benchmarks/multi_rank.py",
        "if remaining([config.case(plan.subject, name, dtype) for name in plan.names], done)",
        "if not done",
        f"{MULTI_RANK}::test_ranks_that_are_there_already_measure_and_rank_0_alone_keeps_records",
    ),
    Fault(
        "lib/benchmarks/sections.py",
        'for key, value in record["config"].items() if key not in ignore',
        'for key, value in record["config"].items()',
        "tests/benchmarks/test_sections.py",
    ),
]
