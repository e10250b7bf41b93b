"""Deliberate faults in the command line; `tests/test_faults.py` shows that each is caught."""

from tests.fault import Fault

MAIN = "tests/end_to_end/test_main.py"

FAULTS = [
    Fault(
        "lib/__main__.py",
        "outermost = min(path.count",
        "outermost = max(path.count",
        f"{MAIN}::test_a_flag_needs_no_more_of_its_path_than_tells_it_apart",
    ),
    Fault(
        "lib/__main__.py",
        'result.status == "stopped" and "RANK" not in os.environ',
        'result.status == "stopped"',
        f"{MAIN}::test_an_orderly_stop_is_no_failure_to_torchrun",
    ),
    Fault(
        "lib/__main__.py",
        "        **start,\n",
        "",
        f"{MAIN}::test_flags_are_the_names_of_the_fields_on_top_of_a_config_file_or_preset",
    ),
    Fault(
        "lib/__main__.py",
        "return result if isinstance(result, int) else 0",
        "return 0",
        f"{MAIN}::test_what_a_command_returns_decides_what_is_printed_and_the_exit_code",
    ),
    Fault(
        "lib/__main__.py",
        "for words in (2, 1):",
        "for words in (1,):",
        f"{MAIN}::test_a_command_of_two_words_gets_the_flags_behind_them",
    ),
    Fault(
        "lib/__main__.py",
        "    except KeyboardInterrupt:\n        if is_debug:",
        "    except MemoryError:\n        if is_debug:",
        f"{MAIN}::test_an_interruption_says_how_to_go_on_and_is_exit_code_130",
    ),
    Fault(
        "lib/__main__.py",
        '"lib.publish.run_notebooks:clean_notebooks"',
        '"lib.publish.run_notebooks:refresh_notebooks"',
        f"{MAIN}::test_notebooks_are_run_refreshed_and_cleaned_as_asked",
    ),
    Fault(
        "lib/__main__.py",
        '"lib.training.config:TrainConfig"',
        '"lib.training.loop:TrainConfig"',
        f"{MAIN}::test_help_loads_nothing_that_takes_time",
    ),
    Fault(
        "lib/__main__.py",
        'logging.getLogger("lib").setLevel(logging.INFO)',
        "logging.getLogger().setLevel(logging.INFO)",
        f"{MAIN}::test_what_other_libraries_only_note_is_not_printed",
    ),
]
