"""A kernel as an answer: how it is launched on random inputs, watched, compared and compiled.

Kernels are run by Triton's interpreter, and compiled as well where there is a GPU. An access out of
bounds, and an element that two programs store, are errors.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lib.lessons.differences import Named, first_difference
from lib.lessons.exercise import Exercise, name_of, report, result_of, verdict
from lib.lessons.triton.compile_triton import Compiled, compile_for
from lib.lessons.triton.recorder_triton import Run, plain, watch


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched."""

    results: dict[str, Tensor]
    """The tensors that it stores, by the names of its parameters; filled with NaN before."""

    grid: tuple[int, ...]
    arguments: tuple
    options: dict[str, Any]

    most_numbers: int | None = None
    """In a tile, if the exercise limits that."""

    by_hand: str = ""
    """The function of Triton that does all of it, which a kernel must not call."""


class KernelTask:
    """How a kernel is launched and run: the harness of its exercise."""

    def plan(self, *given: Any) -> Launch:
        """The launch for inputs of the exercise."""
        raise NotImplementedError

    def __call__(self, kernel: Any, *given: Any) -> Named:
        """The results by name.

        Raises:
            ValueError: see `refuse`.
        """
        launch = self.plan(*given)
        # a check wraps it
        kernel = inspect.unwrap(kernel)
        run = watch(kernel, launch.grid, *launch.arguments, strict=True, **launch.options)
        self.refuse(run, launch, *given)
        return Named(launch.results)

    def refuse(self, run: Run, launch: Launch, *given: Any) -> None:
        """ValueError if an input is stored to, a result is not stored once, or see `check_run`."""
        if inputs := {store.tensor for store in run.of("store")} - {*launch.results}:
            raise ValueError(f"programs store in {min(inputs)}, which is an input")
        for name, tensor in launch.results.items():
            stored = run.bytes_moved("store", name)
            if run.num_programs and not stored:
                raise ValueError(f"nothing is stored in {name}")
            if stored > tensor.nbytes:
                raise ValueError(
                    f"programs store {stored:,} bytes of {name}, which has {tensor.nbytes:,}; "
                    "store each element once, after the loop that it needs"
                )
        check_run(run, launch.most_numbers)
        if launch.by_hand in run.called:
            raise ValueError(f"tl.{launch.by_hand} does all of it; write it out")

    def compiled(self, kernel: Any, *given: Any) -> Named:
        """The results of the compiled kernel, on a GPU."""
        launch = self.plan(*(x.cuda() if isinstance(x, Tensor) else x for x in given))
        kernel[launch.grid](*launch.arguments, **launch.options)
        return Named(launch.results)

    def to_compile(self, *given: Any) -> Launch:
        """A launch with arguments of the types that the kernel is compiled for."""
        return self.plan(*given)

    def check(self, exercise: Exercise, kernel: Any) -> Any:
        """Print the verdict on `kernel`; return it if it is right, else the solution.

        What the interpreter runs need not compile: to be right, a kernel must also compile for an
        A100, and be right on a GPU if one is there.
        """
        import triton

        solution, name = triton.jit(exercise.solve), name_of(kernel)
        if not hasattr(kernel, "fn"):
            words = f"not yet: `{name}` can't be launched; put `@triton.jit` above it"
            report(words, name, exercise.tier)
            return solution
        # the function itself, so that an error names its line
        text = verdict(exercise, plain(kernel))
        if result_of(text) == "passed":
            inputs = exercise.draw(random.Random(0), 1)
            text = with_compilation(text, kernel, self.to_compile(*inputs))
            if torch.cuda.is_available() and result_of(text) == "passed":
                found, expected = self.compiled(kernel, *inputs), self(exercise.solve, *inputs)
                if words := first_difference(found, expected):
                    text = f"not yet: right in the interpreter, but not on this GPU\n  {words}"
        if result_of(text) == "failed":
            cures = [cure for sign, cure in CURES.items() if sign in text]
            text = "\n  ".join([text, *cures, *([ROUNDS] if rounds_float32(kernel) else [])])
        report(text, name, exercise.tier)
        return kernel if result_of(text) == "passed" else solution


@dataclass(frozen=True)
class Puzzle(KernelTask):
    """A kernel whose launch is a function of the inputs; a check shows what its programs touch."""

    launch: Callable[..., Launch]

    example: tuple
    """Inputs for which the programs of an attempt are drawn."""

    def plan(self, *given: Any) -> Launch:
        return self.launch(*given)

    def check(self, exercise: Exercise, kernel: Any) -> Any:
        """Check it as any kernel, and show what its programs touch, given the example."""
        from lib.lessons.triton.figures import show_run

        right, launch = super().check(exercise, kernel), self.plan(*self.example)
        try:
            run = watch(kernel, launch.grid, *launch.arguments, **launch.options)
        except Exception:
            # not attempted, or an error that the verdict names
            return right
        shape, name = " × ".join(map(str, self.example[0].shape)), name_of(kernel)
        title = f"An example: what each program of {name} touches in an input of {shape}"
        show_run(run, title=title)
        return right


def check_run(run: Run, most_numbers: int | None = None) -> None:
    """Refuse programs that store nothing, tiles that are too large, and matmuls that are too thin.

    Raises:
        ValueError: no program runs or none stores anything, a tile has more than `most_numbers`
            numbers, or a `tl.dot` adds up fewer than 16 products, which does not compile.
    """
    if not run.num_programs:
        raise ValueError(f"no program ran: the grid is {run.grid}; round up, with triton.cdiv")
    if not run.of("store"):
        raise ValueError("no program stores anything: tl.store is missing")
    if run.least_depth < 16:
        raise ValueError(
            f"compiled, tl.dot has to add up at least 16 products, got {run.least_depth}: a tile "
            "must be at least 16 deep"
        )
    if most_numbers and run.largest_tile > most_numbers:
        raise ValueError(
            f"a tile must have at most {most_numbers:,} numbers, got {run.largest_tile:,}"
        )


TILES_ARE_TRITONS = "tiles are Triton's: `tl.exp`, `tl.log`, `tl.where`, not PyTorch's or Python's"
WHERE = "a tile is not changed in place: `tl.where(condition, a, b)` makes a new one"
# An error of Triton's interpreter or compiler -> the cure.
CURES = {
    "does not support item assignment": WHERE,
    "no attribute 'masked_fill'": WHERE,
    "must be Tensor, not tensor": TILES_ARE_TRITONS,
    "got (tensor": TILES_ARE_TRITONS,
    "can only convert an array of size 1": TILES_ARE_TRITONS,
    "incompatible dimensions": "two shapes do not go together: `x[:, None]` goes with its rows,"
    " `x[None, :]` with its columns; pointers, mask and values have one shape",
    "equal reduction dimensions": "the columns of a are the rows of b in `tl.dot(a, b)`: "
    "`tl.trans` turns a tile on its side",
    "is not string": "take out the `print`",
    "Loop-carried variable": "start with a tile of its shape, in `tl.float32`: "
    "`tl.full((BQ,), …)` or `tl.zeros(…)`",
    "unsupported AST node type: Break": "Triton has no `break`: put the end into `range(…)`",
    "unsupported AST node type: Continue": "Triton has no `continue`: put the end into `range(…)`",
    "Both operands must be same dtype": "cast the factor in float32 to the type of the "
    "other: `p.to(v.dtype)`, and dS likewise",
}


def with_compilation(text: str, kernel: Any, launch: Launch) -> str:
    """The verdict `text` with registers, or "not yet" and the reason if it does not compile."""
    dtype = str(launch.arguments[0].dtype).removeprefix("torch.")
    try:
        made = compile_launch(kernel, launch)
    except Exception as error:
        line = f"not yet: right in the interpreter, but for {dtype} it does not compile"
        return "\n  ".join([line, *compile_error_lines(error)])
    return f"{text}\n  compiled for an A100, {dtype}: {made.registers} registers of each thread"


ROUNDS = 'on a GPU, and here too, `tl.dot` rounds float32 unless it has input_precision="ieee"'


def rounds_float32(kernel: Any) -> bool:
    """Whether a kernel's source has a `tl.dot` without a precision."""
    source = inspect.getsource(plain(kernel))
    return source.count("tl.dot(") > source.count("input_precision")


def compile_error_lines(error: Exception) -> list[str]:
    """The line of the kernel that Triton's compiler shows, if it shows one, and its reason."""
    words = str(error).strip().splitlines()
    # above the reason it shows the source, and a caret below where it is wrong
    carets = [number for number, line in enumerate(words) if line.strip() == "^"]
    shown = [f"in `{words[carets[-1] - 1].strip()}`"] if carets and carets[-1] > 0 else []
    return [*shown, words[-1]]


def compile_launch(kernel: Any, launch: Launch) -> Compiled:
    """`kernel` for an A100, for arguments of the types that `launch` has."""
    tensors = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
    names = [
        name for name in inspect.signature(plain(kernel)).parameters if name not in launch.options
    ]
    types = {
        name: tensors[x.dtype] if isinstance(x, Tensor) else "i32" if isinstance(x, int) else "fp32"
        for name, x in zip(names, launch.arguments)
    }
    return compile_for(80, kernel, types, **launch.options)
