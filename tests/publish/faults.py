"""Deliberate faults in this room; `tests/test_faults.py` shows that its tests catch each one."""

from tests.fault import Fault

RUN = "tests/publish/test_run_notebooks.py"
COPIES = "tests/publish/test_readers_copies.py"
FAULTS = [
    # a notebook may need a later one
    Fault(
        "lib/publish/run_notebooks.py",
        "if not matches or matches[0] >= notebook.stem:",
        "if not matches:",
        f"{RUN}::test_only_an_earlier_notebook_can_be_needed",
    ),
    # a notebook whose numbers are timings starts beside others
    Fault(
        "lib/publish/run_notebooks.py",
        "[job for job in ready if job.runs_alone and not running]",
        "[job for job in ready if job.runs_alone]",
        f"{RUN}::test_the_next_job_may_run_beside_those_running",
    ),
    # the second notebook that runs alone waits until the first one's page is written
    Fault(
        "lib/publish/run_notebooks.py",
        "if job.name not in executed]",
        "]",
        f"{RUN}::test_the_next_that_runs_alone_starts_while_the_page_of_the_last_is_written",
    ),
    # a notebook waits in the queue of a process, and starts after Ctrl-C
    Fault(
        "lib/publish/run_notebooks.py",
        "while len(running) < workers and (",
        "while (",
        f"{RUN}::test_no_job_waits_for_a_process_since_it_would_start_after_ctrl_c",
    ),
    # kernels take ports, which others may have taken by then
    Fault(
        "lib/publish/kernels.py",
        'if not zmq.has("ipc"):',
        "if True:",
        f"{RUN}::test_kernels_are_reached_through_files_since_ports_may_be_taken_before_they_start",
    ),
    # the limit of threads also holds for a notebook that has all cores
    Fault(
        "lib/publish/run_notebooks.py",
        "shared = workers > 1 and not job.runs_alone",
        "shared = workers > 1",
        f"{RUN}::test_the_one_that_runs_alone_starts_when_all_others_have_finished",
    ),
    # lines that end as on Windows are lost with what a progress bar overwrote
    Fault(
        "lib/publish/cells.py",
        r"""re.sub(r"(?m)^[^\n]*\r(?!\n)", "", output.text)""",
        r"""re.sub(r"(?m)^[^\n]*\r", "", output.text)""",
        "tests/publish/test_cells.py::test_clean_joins_streams_and_keeps_the_last_state_of_a_line",
    ),
    # papermill's own cell about the error stays on the page
    Fault(
        "lib/publish/pages.py",
        """[cell for cell in shown.cells if f'href="#{ERROR_ID}"' not in cell.source]""",
        "shown.cells",
        "tests/publish/test_pages.py",
    ),
    # a prime is a superscript
    Fault(
        "lib/publish/pages.py",
        r"""return PRIMED.sub(r"<mrow>\1</mrow>", formula)""",
        "return formula",
        "tests/publish/test_pages.py::test_a_prime_is_beside_its_letter",
    ),
    # files from anywhere on the disk go into the report
    Fault(
        "lib/publish/links.py",
        "if not source.is_file() or not source.is_relative_to(root):",
        "if not source.is_file():",
        "tests/publish/test_pages.py",
    ),
    # comments in code are too faint on a dark page
    Fault(
        "lib/publish/templates/look.css",
        "--comment: #a3adb8; --shade",
        "--comment: #636c76; --shade",
        "tests/publish/test_look.py",
    ),
    # links of documents leave the report's folder
    Fault(
        "lib/publish/documents.py",
        """up = "../" * len(source.relative_to(root).parts)""",
        """up = "../" * (len(source.relative_to(root).parts) + 1)""",
        "tests/publish/test_documents.py",
    ),
    # the newest earlier runs are removed, not the oldest
    Fault(
        "lib/publish/front_page.py",
        "if is_claimed(path, REPORT)), reverse=True)",
        "if is_claimed(path, REPORT)))",
        "tests/publish/test_front_page.py",
    ),
    # home folders are found at the start of a file only
    Fault(
        "lib/publish/kaggle.py",
        r"""r"(?<![\w./:-])/(?:home|Users|root)/[\w.-]+",""",
        r"""r"^/(?:home|Users|root)/[\w.-]+",""",
        "tests/publish/test_kaggle.py::test_each_kind_of_leak_is_found",
    ),
    # the notebook's own sizes come after Kaggle's
    Fault(
        "lib/publish/kaggle.py",
        "cells.insert(index + 1, cell)",
        "cells.insert(index, cell)",
        "tests/publish/test_kaggle.py::test_kaggle_gets_its_sizes_and_the_test_here_the_small_ones",
    ),
    # the report's templates stay behind
    Fault(
        "lib/publish/kaggle.py",
        '*("LICENSE", "lib/**/*"),',
        '*("LICENSE", "lib/**/*.py"),',
        "tests/publish/test_kaggle.py::test_the_dataset_holds_code_and_records_and_no_runs",
    ),
    # what a reader wrote into the note about a new version is replaced by the next one
    Fault(
        "lib/publish/readers_copies.py",
        "is_mine = {cell.id for cell in mine if not _is_as(cell, base)}",
        "is_mine = {cell.id for cell in mine if not (_is_as(cell, base) or NOTE in cell.source)}",
        f"{COPIES}::test_what_the_reader_wrote_into_a_new_version_stays",
    ),
    # a full disk leaves part of a copy, which then counts as the reader's
    Fault(
        "lib/publish/readers_copies.py",
        "write_atomically(copy, fresh)",
        "copy.write_bytes(fresh)",
        f"{COPIES}::test_a_full_disk_leaves_no_part_of_a_copy",
    ),
    # a report goes over whatever is in its folder, answers too
    Fault(
        "lib/publish/run_notebooks.py",
        "is_ours=report == default",
        "is_ours=True",
        f"{RUN}::test_a_report_never_goes_where_the_readers_files_are",
    ),
    # folders of the reader's are removed with the oldest reports
    Fault(
        "lib/publish/front_page.py",
        "if is_claimed(path, REPORT))",
        "if path.is_dir())",
        "tests/publish/test_front_page.py::test_only_the_newest_runs_are_kept_each_once",
    ),
]
