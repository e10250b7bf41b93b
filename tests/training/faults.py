"""Deliberate faults in training; `tests/test_faults.py` shows that the tests catch each of them."""

from tests.fault import Fault

STEP = "tests/training/test_step.py"
CHECKPOINT = "tests/training/test_checkpoint.py"
LOOP = "tests/training/test_loop.py"
FOLDER = "tests/training/test_run_folder.py"
GENERATION = "tests/training/test_generation.py"

FAULTS = [
    # a run goes while it is being trained
    Fault(
        "lib/training/runs.py",
        "busy = [run.folder.name for run, is_held in held.items() if not is_held]",
        "busy = []",
        "tests/training/test_runs.py",
    ),
    # models of other tools
    Fault(
        "lib/model/llama.py",
        "is_rotated = name.endswith(ROTATED)",
        "is_rotated = False",
        "tests/model/test_llama.py::test_a_llama_with_our_weights_gives_our_logits",
    ),
    Fault(
        "lib/model/llama.py",
        "repeat_interleave(repeats, dim=0).flatten(0, 1)",
        "repeat(repeats, 1, 1).flatten(0, 1)",
        "tests/model/test_llama.py::test_shared_key_heads_are_repeated",
    ),
    Fault(
        "lib/training/interchange.py",
        """"an unfinished export", setting="folder")""",
        """"an unfinished export", setting="folder", is_ours=True)""",
        "tests/training/test_interchange.py::test_a_folder_with_files_is_not_written_to",
    ),
    # one step
    Fault(
        "lib/training/step.py",
        "loss = self.parallel(inputs, targets) / len(self.sequences)",
        "loss = self.parallel(inputs, targets)",
        f"{STEP}::test_accumulated_passes_equal_one_large_batch",
    ),
    Fault(
        "lib/training/step.py",
        "skip = is_finite.logical_not_().logical_or_(self.hold)",
        "skip = is_finite.logical_or_(self.hold)",
        f"{STEP}::test_the_loss_falls",
    ),
    Fault(
        "lib/training/step.py",
        "torch.where(grows, 2.0, 1.0), 0.5)",
        "torch.where(grows, 2.0, 1.0), 2.0)",
        f"{STEP}::test_float16_scales_the_loss_and_halves_the_scale_after_an_overflow",
    ),
    Fault(
        "lib/training/step.py",
        ".roll(-int(self.next_row), dims=0)",
        ".roll(int(self.next_row), dims=0)",
        f"{STEP}::test_the_log_keeps_the_order_of_steps_around_its_end",
    ),
    Fault(
        "lib/training/parallelism.py",
        'if config.ddp_wrapper == "none" and config.zero1_strategy == "parameters":',
        'if config.ddp_wrapper == "none" and config.zero1_strategy == "flat":',
        "tests/training/test_parallelism.py::test_what_cannot_be_combined_on_ranks_is_refused",
    ),
    Fault(
        "lib/training/parallelism.py",
        '        {"params": vectors, "weight_decay": 0.0},',
        '        {"params": vectors, "weight_decay": settings.weight_decay},',
        f"{STEP}::test_vectors_are_not_decayed",
    ),
    Fault(
        "lib/training/parallelism.py",
        "        self.optimizer.finish_gradient_synchronization()\n",
        "        pass\n",
        "tests/training/test_parallelism.py::test_finishing_synchronization_is_the_optimizers_without_a_wrapper",
    ),
    # the loop
    Fault(
        "lib/training/loop.py",
        '    run.sampler.load_state_dict(loaded.extra["sampler"])\n',
        "",
        f"{LOOP}::test_a_signal_ends_the_run_after_the_step_with_a_checkpoint",
    ),
    Fault(
        "lib/training/loop.py",
        "    on_first_rank(lambda: _sync_metrics(training), waiting)\n",
        "",
        f"{LOOP}::test_metrics_are_on_the_disk_before_the_checkpoint_that_counts_on_them",
    ),
    Fault(
        "lib/training/loop.py",
        "progress.skipped_in_a_row + 1 if row.is_skipped else 0",
        "progress.skipped_in_a_row + row.is_skipped",
        f"{LOOP}::test_only_consecutive_steps_end_a_run_also_across_an_interruption",
    ),
    Fault(
        "lib/training/loop.py",
        "for loss, norm, is_skipped in progress.unlogged if not is_skipped]",
        "for loss, norm, is_skipped in progress.unlogged]",
        f"{LOOP}::test_steps_that_are_not_finite_are_skipped_and_counted",
    ),
    # the run's folder
    Fault(
        "lib/training/run_folder.py",
        '{"batch_size": _sequences_per_step(fields), "gradient_accumulation_steps": 1}',
        "{}",
        f"{FOLDER}::test_without_an_output_settings_and_content_of_the_data_name_the_folder",
    ),
    Fault(
        "lib/training/run_folder.py",
        "    _check_folder(run)\n    newest = newest_checkpoint(checkpoints)\n",
        "    newest = newest_checkpoint(checkpoints)\n",
        f"{FOLDER}::test_a_run_that_another_process_starts_in_the_folder_meanwhile_is_seen",
    ),
    # checkpoints
    Fault(
        "lib/training/checkpoint.py",
        "older[keep_last - 1 :]",
        "older[keep_last:]",
        f"{CHECKPOINT}::test_keep_last_deletes_oldest_first_and_hides_before_it_deletes",
    ),
    Fault(
        "lib/training/checkpoint.py",
        '{k: v.clone() for k, v in _load_tensors(path / "tensors.safetensors").items()}',
        '_load_tensors(path / "tensors.safetensors")',
        f"{CHECKPOINT}::test_every_bit_of_a_tensor_comes_back",
    ),
    Fault(
        "lib/training/checkpoint.py",
        'if path.suffix == ".replaced" and not visible.exists():',
        "if False:",
        f"{CHECKPOINT}::test_a_checkpoint_moved_aside_by_a_killed_save_is_still_found",
    ),
    Fault(
        "lib/training/checkpoint.py",
        "key=lambda path: (_step(path), path.name), reverse=True)",
        "key=lambda path: path.name, reverse=True)",
        f"{CHECKPOINT}::test_the_newest_is_that_of_the_highest_step",
    ),
    Fault(
        "lib/training/checkpoint.py",
        "if isinstance(value, Tensor) and loaded[name].dtype != value.dtype:",
        "if False:",
        f"{CHECKPOINT}::test_float32_state_of_bfloat16_parameters_is_not_rounded",
    ),
    # metrics and evaluation
    Fault(
        "lib/training/metrics.py",
        "        file.truncate(position)\n",
        "",
        "tests/training/test_metrics.py::test_a_resumed_run_repeats_no_line_and_misses_none",
    ),
    Fault(
        "lib/training/evaluation.py",
        "lengths[token_id] = 0 if token_id in special else len(token)",
        "lengths[token_id] = len(token)",
        "tests/training/test_evaluation.py::test_special_tokens_count_no_bytes_but_their_loss",
    ),
    Fault(
        "lib/training/evaluation.py",
        "total = (means.cpu().double() * sizes).sum()",
        "total = means.cpu().double().mean() * sizes.sum()",
        "tests/training/test_evaluation.py::test_equals_a_plain_loop",
    ),
    # generation
    Fault(
        "lib/training/generation.py",
        "(before >= top_p) & (before > 0)",
        "before > top_p",
        f"{GENERATION}::test_top_p_stops_at_a_probability_that_is_reached_exactly",
    ),
    Fault(
        "lib/training/generation.py",
        "stride = context_length - context_length // 2",
        "stride = context_length // 2 + 1",
        f"{GENERATION}::test_beyond_the_context_the_model_sees_the_documented_window "
        f"{GENERATION}::test_a_cache_changes_nothing",
    ),
    Fault(
        "lib/training/generation.py",
        "    was_training = model.training\n",
        "    was_training = True\n",
        f"{GENERATION}::test_the_model_comes_back_in_its_mode_and_can_be_trained",
    ),
    Fault(
        "lib/training/generation.py",
        'random.Random(f"{seed} {before[text]} {text}")',
        'random.Random(f"{seed} {text}")',
        f"{GENERATION}::test_a_seed_decides_the_text_and_torchs_global_generator_is_left_alone",
    ),
    Fault(
        "lib/training/loop.py",
        "        wandb=run.config.wandb,",
        "        wandb=False,",
        "tests/training/test_loop.py::test_training_logs_to_wandb_when_asked_and_goes_on_without_it",
    ),
    # a manifest without the weights vouches for them
    Fault(
        "lib/training/checkpoint.py",
        'expected = {"state.json", *(f"{part}.safetensors" for part in PARTS)}',
        'expected = {"state.json"}',
        "tests/training/test_checkpoint.py::test_a_damaged_checkpoint_is_refused_and_the_one_before_is_taken",
    ),
    # a tensor without memory is saved
    Fault(
        "lib/training/checkpoint.py",
        "if value.is_meta:",
        "if False:",
        "tests/training/test_checkpoint.py::test_bad_arguments_are_refused_by_name",
    ),
    # a fraction passes for an id
    Fault(
        "lib/training/generation.py",
        "operator.index(token) for token in prompt",
        "int(token) for token in prompt",
        f"{GENERATION}::test_a_prompt_alone_is_not_taken_for_a_list_of_letters",
    ),
    # a compiled model's names are saved
    Fault(
        "lib/training/checkpoint.py",
        "step, model = operator.index(step), inner_module(model)",
        "step = operator.index(step)",
        "tests/training/test_checkpoint.py::test_a_compiled_model_is_saved_and_loaded_as_the_model_itself",
    ),
    # the advice for a run with other settings
    Fault(
        "lib/training/loop.py",
        'if "imported_from" in extra:',
        "if False:",
        "tests/training/test_interchange.py"
        "::test_an_imported_model_cannot_be_trained_on_and_nothing_tells_to_remove_it",
    ),
]
