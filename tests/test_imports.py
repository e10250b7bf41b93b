"""`lib` is a house of floors: files import downwards only, and light ones stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A file that is not listed stands on the ground, floor 0, and imports from there only.
FLOORS = {
    "__main__": 5,
    "benchmark": 4,
    "demo_ddp": 3,
    "demo_sharding": 3,
    "demo_sharding_trace": 3,
    "exercises": 4,
    "exercises_ddp": 4,
    "exercises_flash_attention": 4,
    "flash_attention_tune": 4,
    "exercises_model": 4,
    "exercises_profiling": 4,
    "exercises_sharding": 4,
    "exercises_tokenizer": 4,
    "exercises_training": 4,
    "kaggle": 4,
    "kaggle_check": 4,
    "kaggle_leaks": 4,
    "speedrun": 4,
    "speedrun_results": 4,
    "speedrun_run": 4,
    "story_model": 4,
    "notebook": 4,
    "notebook_cells": 4,
    "notebook_kernel": 4,
    "notebook_plan": 4,
    "notebook_runs": 4,
    "pipeline": 4,
    "site": 4,
    "site_downloads": 4,
    "site_history": 4,
    "site_index": 4,
    "site_templates": 4,
    "scaling": 2,
    "widgets": 4,
    "widgets_attention": 4,
    "widgets_buckets": 4,
    "widgets_ddp": 4,
    "widgets_flash_attention": 4,
    "widgets_model": 4,
    "widgets_profiling": 4,
    "widgets_sharding": 4,
    "widgets_story": 4,
    "widgets_training": 4,
    "benchmark_attention": 4,
    "benchmark_attention_cases": 4,
    "benchmark_attention_report": 4,
    "benchmark_attention_steps": 4,
    "benchmark_attention_training": 4,
    "benchmark_communication": 4,
    "benchmark_communication_report": 4,
    "benchmark_lm_matrix": 4,
    "benchmark_lm_matrix_cases": 4,
    "benchmark_lm_matrix_report": 4,
    "benchmark_lm_matrix_training": 4,
    "benchmark_repeat": 4,
    "benchmark_sharding": 4,
    "benchmark_sharding_accounting": 4,
    "benchmark_sharding_cases": 4,
    "benchmark_sharding_memory": 4,
    "benchmark_sharding_report": 4,
    "benchmark_step": 4,
    "benchmark_step_cases": 4,
    "benchmark_training": 4,
    "benchmark_training_cpu": 4,
    "benchmark_turns": 4,
    "profile_run": 4,
    "plots_roofline": 4,
    "roofline": 4,
    "evaluate": 3,
    "generate": 3,
    "train": 3,
    "train_folder": 3,
    "train_fsdp": 3,
    "train_optimizer": 3,
    "train_run": 3,
    "train_step": 3,
    "kv_cache": 1,
    "model": 2,
    "memory_accounting": 2,
    "model_costs": 2,
    "attention": 1,
    "trace_summary": 1,
    "memory_profile": 1,
    "profile_report": 1,
}
# Files whose readers need torch in any case; no other may load it when it is imported.
WITH_TORCH = {
    "allocations",
    "attention",
    "benchmark",
    "benchmark_attention",
    "benchmark_attention_cases",
    "benchmark_attention_steps",
    "benchmark_attention_training",
    "benchmark_communication",
    "benchmark_lm_matrix",
    "benchmark_lm_matrix_training",
    "benchmark_repeat",
    "benchmark_sharding",
    "benchmark_sharding_memory",
    "benchmark_step",
    "benchmark_step_cases",
    "benchmark_training",
    "benchmark_training_cpu",
    "benchmark_turns",
    "checkpoint",
    "checkpoint_optimizer",
    "command_ranks",
    "ddp",
    "ddp_base",
    "ddp_buckets",
    "demo_ddp",
    "demo_sharding",
    "demo_sharding_trace",
    "distributed",
    "distributed_group",
    "distributed_launch",
    "distributed_restart",
    "evaluate",
    "exercises_ddp",
    "exercises_flash_attention",
    "exercises_model",
    "exercises_sharding",
    "exercises_training",
    "flash_attention",
    "flash_attention_hopper",
    "flash_attention_hopper_backward",
    "flash_attention_hopper_forward",
    "flash_attention_hopper_parts",
    "flash_attention_inputs",
    "flash_attention_tiles",
    "flash_attention_triton",
    "flash_attention_tune",
    "generate",
    "kv_cache",
    "loss",
    "loss_gluon",
    "loss_triton",
    "memory_profile",
    "model",
    "model_cpu",
    "model_triton",
    "optimizer",
    "optimizer_triton",
    "profile_run",
    "profiling",
    "ranks",
    "roofline",
    "sharded_optimizer",
    "sharded_optimizer_bucket",
    "sharded_optimizer_flat",
    "sharded_optimizer_fsdp",
    "sharded_optimizer_parts",
    "sharded_optimizer_state",
    "sharded_optimizer_torch",
    "train",
    "train_folder",
    "train_fsdp",
    "train_optimizer",
    "train_run",
    "train_step",
    "train_stop",
    "widgets_training",
}
FILES = sorted(path.stem for path in (ROOT / "lib").glob("*.py") if path.stem != "__init__")


def imported(path: Path) -> set[str]:
    """The files of `lib` that the one at `path` imports, at its top or inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = f"lib.{node.module or ''}".rstrip(".") if node.level else node.module
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "lib" and len(part) > 1 and part[1] in FILES}


@pytest.mark.parametrize("name", FILES)
def test_imports_point_down_the_floors(name):
    floor = FLOORS.get(name, 0)
    others = imported(ROOT / f"lib/{name}.py")
    upward = {other for other in others if FLOORS.get(other, 0) > floor}
    assert not upward, f"lib/{name}.py stands on floor {floor} and imports from above: {upward}"


def test_an_upward_import_is_seen(tmp_path):
    probe = tmp_path / "probe.py"
    probe.write_text("def f():\n    from lib import notebook\nimport lib.config\n")
    assert imported(probe) == {"notebook", "config"}


HEAVY = {"torch", "triton", "wandb"}
# what takes long to load and many files need; none of it loads what is heavy
SHARED = "import matplotlib.pyplot, nbclient, numba, numpy"
IN_COPIES = """
import os, sys
exec(sys.argv[1])
for statement in sys.argv[2:]:
    if os.fork():
        _, status = os.wait()
        if status:
            sys.exit(f"{statement} fails")
        continue
    status = 1
    try:
        exec(statement)
        print(*{name.split(".")[0] for name in sys.modules}, flush=True)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    # at once: to take down what the copies share would take longer than the rest
    os._exit(status)
"""


def loaded_by(*statements: str, first: str = "pass") -> list[set[str]]:
    """The top-level modules that a Python holds after each statement, which prints nothing.

    Each statement has a Python of its own, a copy of one that knows only what `first` loaded.
    """
    command = [sys.executable, "-c", IN_COPIES, first, *statements]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(statements), f"something is printed: {done.stdout}"
    return [set(line.split()) for line in lines]


def test_import_lib_loads_nothing_else():
    (loaded,) = loaded_by("import lib")
    assert not loaded & {*HEAVY, "numpy", "numba", "matplotlib"}


def test_light_files_load_no_torch():
    names = [name for name in FILES if name not in WITH_TORCH]
    loaded = loaded_by(*(f"import lib.{name}" for name in names), first=SHARED)
    assert {name: found & HEAVY for name, found in zip(names, loaded) if found & HEAVY} == {}
