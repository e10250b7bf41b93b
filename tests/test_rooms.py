"""`lib` is a list of rooms: a file imports its own room or rooms below, and there is no circle."""

import ast
import functools
import graphlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From top to bottom. `lib/__main__.py` and the doors, which lie beside the rooms, see all of them.
ROOMS = [
    "tools.publish",
    "lessons",
    "tools.benchmarks",
    "profiling",
    "training",
    "tools.peers",
    "fsdp",
    "sharded_optimizer",
    "ddp",
    "optimizer",
    "model",
    "flash_attention",
    "data",
    "tokenizer",
    "core",
]
# Rooms whose import loads no torch, and the two files of core that need it.
LIGHT = ("core", "tokenizer", "data", "tools.publish")
WITH_TORCH = {"lib.core.allocator", "lib.core.ranges"}
# Settings of commands are read before anything heavy is loaded.
LIGHT_FILES = (
    "lib.model.config",
    "lib.model.costs",
    "lib.ddp.settings",
    "lib.profiling.memory_formula",
    "lib.training.config",
    "lib.training.pipeline",
)
HEAVY = {"torch", "triton", "wandb"}


def module_name(path: Path) -> str:
    """`lib.lessons.ddp.ring` for lib/lessons/ddp/ring.py, and `lib.ddp` for its __init__.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


FILES = {module_name(path): path for path in sorted((ROOT / "lib").rglob("*.py"))}


def room(module: str) -> str:
    """The room of a module of `lib`; empty for those beside the rooms."""
    return next((name for name in ROOMS if f"{module}.".startswith(f"lib.{name}.")), "")


def behind_face(package: str) -> dict[str, str]:
    """Each name that the face of `package` gives on demand, and the module that it comes from."""
    face = FILES.get(package)
    if not face or face.name != "__init__.py":
        return {}
    nodes = ast.walk(ast.parse(face.read_text(encoding="utf-8")))
    tables = [n.value for n in nodes if isinstance(n, ast.keyword) and n.arg == "submod_attrs"]
    names = ast.literal_eval(tables[0]) if tables else {}
    return {name: f"{package}.{module}" for module, given in names.items() for name in given}


def imported(path: Path) -> set[str]:
    """The modules of `lib` that the file at `path` imports or names in a string, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are written from `lib` on"
            behind = behind_face(node.module)
            for name in (alias.name for alias in node.names):
                module = f"{node.module}.{name}"
                names.add(module if module in FILES else behind.get(name, node.module))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # what importlib, __import__ or lazy_loader would be given
            module = node.value.split(":")[0]
            names |= {module} & set(FILES)
    return {name for name in names if name.split(".")[0] == "lib"} - {"lib"}


@functools.cache
def imports() -> dict[str, set[str]]:
    """The imports of each module of `lib`; read once, and only by the process that tests it."""
    return {name: imported(path) for name, path in FILES.items()}


def test_every_room_is_listed_and_only_doors_lie_beside_them():
    packages = {name for name, path in FILES.items() if path.name == "__init__.py"}
    listed = {f"lib.{name}" for name in ROOMS} | {"lib", "lib.tools"}
    assert {name for name in packages if name.count(".") < 2 or "tools" in name} == listed
    beside = {path.name for path in (ROOT / "lib").glob("*.py")}
    assert beside == {"__init__.py", "__main__.py", "checkpoint.py", "flash_attention_triton.py"}


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_only_itself_and_rooms_below(name):
    below = ROOMS[ROOMS.index(name) :]
    for module in (module for module in FILES if room(module) == name):
        upward = {other for other in imports()[module] if room(other) not in below}
        assert not upward, f"{module} imports {upward}, which is not below {name}"


def test_there_is_no_circle():
    tuple(graphlib.TopologicalSorter(imports()).static_order())


def test_an_upward_import_is_seen(tmp_path):
    probe = tmp_path / "probe.py"
    probe.write_text(
        "def f():\n    from lib.lessons import notebook\n    load('lib.training.loop:train')\n"
        "import lib.core.settings\nfrom lib.ddp import wrap\n"
    )
    assert imported(probe) == {
        "lib.lessons.notebook", "lib.training.loop", "lib.core.settings", "lib.ddp.wrappers"
    }  # fmt: skip


def may_import_triton(module: str) -> bool:
    return module.endswith(
        ("_triton", "_gluon", ".triton_kernels", ".triton_attention")
    ) or module.startswith(("lib.flash_attention.hopper.", "lib.flash_attention.cuda."))


def test_triton_is_imported_by_its_own_files_only_or_inside_functions():
    for module, path in FILES.items():
        statements = list(ast.parse(path.read_text(encoding="utf-8")).body)
        names = set()
        # `if` and `try` at the top, too
        for node in statements:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module)
            elif isinstance(node, (ast.If, ast.Try)) and not is_for_types(node):
                statements += node.body
        uses = {name for name in names if name.split(".")[0] == "triton"}
        assert not uses or may_import_triton(module), f"{module} imports {uses}"


def is_for_types(node: ast.stmt) -> bool:
    """Whether a statement is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def test_a_face_is_short_and_loads_nothing():
    faces = {name: path for name, path in FILES.items() if path.name == "__init__.py"}
    for name, path in faces.items():
        text = path.read_text(encoding="utf-8")
        code = [line for line in text.splitlines() if line.strip()]
        assert len(code) <= 15, f"{name} has {len(code)} lines"
        assert imports()[name] == set(), f"{name} imports {imports()[name]}"


def run(program: str, *words: str) -> None:
    """Run a program, which prints nothing and succeeds, in a Python that knows nothing yet."""
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


LOADS_NONE_OF = """
import importlib, sys
forbidden = set(sys.argv[1].split())
for name in sys.argv[2:]:
    importlib.import_module(name)
    if found := forbidden & {name.split(".")[0] for name in sys.modules}:
        sys.exit(f"{name} loads {found}")
"""


def test_import_lib_loads_nothing_else():
    run(LOADS_NONE_OF, " ".join([*HEAVY, "numpy", "numba", "matplotlib", "lazy_loader"]), "lib")


def test_light_rooms_load_no_torch():
    names = [name for name in FILES if room(name) in LIGHT and name not in WITH_TORCH]
    run(LOADS_NONE_OF, " ".join(HEAVY), *names, *LIGHT_FILES, *(f"lib.{name}" for name in ROOMS))


TRAINS = """
import sys, torch
from lib.model import ModelConfig, TransformerLM
from lib.optimizer import AdamW

model = TransformerLM(ModelConfig(vocab_size=8, d_model=8, num_heads=1, num_layers=1, d_ff=8))
optimizer = AdamW(model.parameters())
optimizer.zero_grad()
tokens = torch.zeros(1, 2, dtype=torch.int64)
model.loss(tokens, tokens).backward()
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
# torch's compiler cannot be loaded without it
assert "sympy" not in sys.modules
"""


def test_a_step_that_compiles_nothing_loads_no_compiler():
    run(TRAINS)


EXAMPLES = re.findall(
    r"^\*\*`([\w/.]+)`\*\*(.*?)^```python\n(.*?)^```",
    (ROOT / "lib/README.md").read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.slow
@pytest.mark.parametrize(("taken", "words", "code"), EXAMPLES, ids=[found[0] for found in EXAMPLES])
def test_a_room_that_is_taken_along_needs_no_more_than_is_said(tmp_path, taken, words, code):
    rooms = {taken.split("/")[0], *re.findall(r"`(\w+)/`", words)}
    for name in rooms:
        shutil.copytree(ROOT / "lib" / name, tmp_path / "lib" / name)
    shutil.copy(ROOT / "lib/__init__.py", tmp_path / "lib")
    (tmp_path / "example.py").write_text(code)
    ranks = 2 if "init_process_group" in code else 1
    # a file for what each rank prints
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--redirects=1"]
    command += ["--log-dir=said", f"--nproc-per-node={ranks}", "example.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = [path.read_text() for path in tmp_path.glob("said/**/stdout.log")]
    assert len(said) == ranks
    assert said[0]
    assert said == said[:1] * ranks


def test_each_room_that_engineers_take_has_an_example():
    taken = [name for name, _, _ in EXAMPLES]
    rooms = ["tokenizer", "flash_attention", "ddp", "sharded_optimizer", "fsdp"]
    assert taken == [f"{name}/" for name in rooms] + ["training/checkpoint.py"]
