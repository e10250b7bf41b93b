"""Deliberate faults in this room; `tests/test_faults.py` shows that tests catch each of them."""

from tests.fault import Fault

EXERCISE = "lib/lessons/exercise.py"
CALLS = "lib/lessons/calls.py"
RANKS = "lib/lessons/ranks.py"
EXPLORER = "lib/lessons/explorer.py"
SHOW = "lib/lessons/show.py"
GUARDS = "lib/lessons/guards.py"
PREDICTIONS = "lib/lessons/predictions.py"
HEADS = "lib/lessons/start/heads.py"
TRAINING = "tests/lessons/training/"
RECORDER = "lib/lessons/triton/recorder_triton.py"
PUZZLES = "lib/lessons/triton/exercises.py"

FAULTS = [
    # an edit that changes nothing, or something twice, is no mistake
    Fault(
        EXERCISE,
        "if source.count(old) != 1:",
        "if source.count(old) > 1:",
        "tests/lessons/test_exercise.py::test_a_mistake_is_an_edit_of_text_that_occurs_once",
    ),
    # the reader's function may change its argument
    Fault(
        CALLS,
        "arguments = copy.deepcopy(arguments)",
        "arguments = tuple(arguments)",
        "tests/lessons/test_exercise.py::test_a_function_may_change_its_argument",
    ),
    # a half-done stub counts as wrong
    Fault(
        EXERCISE,
        "            return NOT_ATTEMPTED\n        expected",
        "            break\n        expected",
        "tests/lessons/test_exercise.py::test_a_stub_that_is_half_done_is_not_attempted",
    ),
    # the time limit of a check stays on
    Fault(
        CALLS,
        "        signal.signal(signal.SIGALRM, handler)\n",
        "        pass\n",
        "tests/lessons/test_exercise.py::test_an_endless_loop_is_stopped",
    ),
    # ranks go on after the verdict
    Fault(
        RANKS,
        "ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(error))",
        "pass",
        "tests/lessons/test_ranks.py::test_ranks_that_never_end_are_stopped_and_take_no_more_time",
    ),
    # several sliders redraw at every step of the hand
    Fault(
        EXPLORER,
        "continuous_update=is_alone",
        "continuous_update=True",
        "tests/lessons/test_explorer.py",
    ),
    # the stills are lost where nobody can move a slider
    Fault(
        EXPLORER,
        "for values in still if values != setting()",
        "for values in still if values == setting()",
        "tests/lessons/test_explorer.py",
    ),
    # a slider that does nothing
    Fault(
        EXPLORER,
        '        widget.observe(update, "value")',
        '        widget.observe(update, "index_")',
        "tests/lessons/test_explorer.py",
    ),
    # a figure is drawn again for a setting that was shown before
    Fault(
        EXPLORER,
        "    @functools.cache\n    def show(",
        "    def show(",
        "tests/lessons/test_explorer.py",
    ),
    # merges that join nothing in the text are shown
    Fault(
        SHOW,
        "pair = min(known, key=ranks.__getitem__)",
        "pair = max(known, key=ranks.__getitem__)",
        "tests/lessons/test_show.py",
    ),
    # a sentence that the outputs contradict is stored
    Fault(
        GUARDS,
        "if not outcome and (always or os.environ.get(STRICT)):",
        "if not outcome and always:",
        "tests/lessons/test_guards.py",
    ),
    # a condition is true whatever was measured
    Fault(
        GUARDS,
        "return types.FunctionType(condition.__code__, {**before, **after},",
        "return types.FunctionType(condition.__code__, {**after, **before},",
        "tests/lessons/test_guards.py",
    ),
    # a guess twice too high counts as half as wrong as one twice too low
    Fault(
        PREDICTIONS,
        "return max(self.guess / self.answer, self.answer / self.guess)",
        "return self.guess / self.answer",
        "tests/lessons/test_predictions.py",
    ),
    # tests overwrite the reader's guesses
    Fault(PREDICTIONS, "if not small():", "if True:", "tests/lessons/test_predictions.py"),
    # a loss in chunks may keep the logits of all of them for one backward
    Fault(
        "lib/lessons/model/exercises.py",
        "if kept.numbers >= num_logits and",
        "if kept.numbers < 0 and",
        "tests/lessons/test_exercise.py -k LOSS_IN_CHUNKS",
    ),
    # a reader that keeps the whole stream in memory is right
    Fault(
        "lib/lessons/tokenizer/exercises.py",
        "late = late or held",
        "late = late",
        "tests/lessons/test_exercise.py::test_a_mistake_is_recognized_by_name",
    ),
    # heads are measured on stories that the model was trained on
    Fault(
        HEADS,
        'split="validation"',
        'split="train"',
        "tests/lessons/start/test_heads.py::test_the_stories_are_held_out_and_begin_at_their_beginning",
    ),
    # a program may touch what lies between the rows of a view
    Fault(
        RECORDER,
        "return np.where(is_there, self.places[np.where(is_there, index, 0)], -1)",
        "return np.where(is_there, index, -1)",
        "tests/lessons/triton/test_recorder.py",
    ),
    # two programs that store to one element are right if the result is
    Fault(
        RECORDER,
        'if strict and (races := [fault for fault in run.faults() if "both store" in fault]):',
        "if strict and (races := []):",
        "tests/lessons/triton/test_exercises.py",
    ),
    # lanes that are masked off hold 0, which hides a missing `other`
    Fault(
        RECORDER,
        "unread = np.asarray(junk, kind) if",
        "unread = np.asarray(0, kind) if",
        "tests/lessons/triton/test_recorder.py",
    ),
    # kernels cannot be compiled after one was interpreted
    Fault(
        RECORDER,
        "        finally:\n            restore_language()\n",
        "        finally:\n            pass\n",
        "tests/lessons/triton/test_recorder.py",
    ),
    # tiles may be as large as one likes
    Fault(
        PUZZLES,
        "run.largest_tile > most_numbers:",
        "run.largest_tile > 1e9:",
        "tests/lessons/triton/test_exercises.py",
    ),
    # the floor is counted on stories that models were trained on
    Fault(
        "lib/lessons/training/floor.py",
        "if in_validation(text := tell(draws)):",
        "if not in_validation(text := tell(draws)):",
        TRAINING + "test_floor.py::test_the_stories_are_those_of_the_validation_split",
    ),
    # a second thing that would be the first again is the one drawn
    Fault(
        "lib/lessons/training/floor.py",
        'second[i - 1] if s["obj2"] == thing["obj"] else s for i',
        "s for i",
        TRAINING + "test_floor.py",
    ),
    # a block computes before its parameters have come
    Fault(
        "lib/lessons/fsdp/orders.py",
        "start = max(self.now, self.arrival[block])",
        "start = self.now",
        "tests/lessons/fsdp/test_orders.py",
    ),
    # backward may use what forward gathered
    Fault(
        "lib/lessons/fsdp/exercises.py",
        "            ranks.poison()\n",
        "",
        "tests/lessons/test_exercise.py -k SHARDED_MLP",
    ),
    # a rank may hold whole matrices until backward
    Fault(
        "lib/lessons/fsdp/exercises.py",
        "ranks.forget_gathered() or any(",
        "any(",
        "tests/lessons/fsdp/test_exercises.py",
    ),
    # gradients of a tensor-parallel MLP may be wrong on processes
    Fault(
        "lib/lessons/fsdp/exercises.py",
        "return max(off.values()) < MOST_OFF, f",
        'return off["y"] < MOST_OFF, f',
        "tests/lessons/fsdp/test_exercises.py",
    ),
    # a broken run is healthy
    Fault(
        "lib/lessons/training/broken.py",
        'if fault == "targets not shifted" else (x, y)',
        'if fault == "targets" else (x, y)',
        TRAINING + "test_broken.py::test_each_fault_changes_the_run",
    ),
    # a cache that computes everything again passes
    Fault(
        "lib/lessons/training/toys.py",
        "        self.seen[position] = token\n",
        "",
        TRAINING + "test_exercises.py::test_a_token_that_is_computed_again_is_refused",
    ),
    # a kernel that visits hidden tiles passes
    Fault(
        "lib/lessons/flash_attention/kernel_task.py",
        "if count > seen:",
        "if count > 2 * seen:",
        "tests/lessons/flash_attention/test_exercises.py -k two_loops",
    ),
    # a kernel that takes head_dim for the keys in a tile passes
    Fault(
        "lib/lessons/flash_attention/kernel_task.py",
        'sizes = {"D": head_dim, **tiling._asdict()}',
        'sizes = {"D": head_dim, "BQ": tiling.BQ, "BK": head_dim}',
        "tests/lessons/flash_attention/test_exercises.py -k one_size",
    ),
    # a kernel that stores nothing is told of some other mistake
    Fault(
        "lib/lessons/flash_attention/kernel_task.py",
        'if not run.of("store", name):',
        "if not run.accesses:",
        "tests/lessons/flash_attention/test_exercises.py -k not_stored",
    ),
    # a kernel that compiles for float32 only passes
    Fault(
        "lib/lessons/flash_attention/kernel_task.py",
        "x.bfloat16() if x.ndim == 3 else x for x",
        "x for x",
        "tests/lessons/flash_attention/test_exercises.py -k 16_bits",
    ),
    # a wrong result is told to be a missing gradient
    Fault(
        "lib/lessons/profiling/stacks.py",
        "        if self.wrong_result is not None:",
        "        if self.wrong_result is self:",
        "tests/lessons/profiling/test_exercises.py -k wrong_result",
    ),
    # matmuls are never between half of the busy time and half of the whole
    Fault(
        "lib/lessons/profiling/exercises.py",
        "gap = generator.randint(longer - shorter + 1, longer + shorter)",
        "gap = 0",
        "tests/lessons/test_exercise.py -k DIAGNOSE",
    ),
    # a product of weights and values does not wait for its softmax
    Fault(
        "lib/lessons/flash_attention/schedule.py",
        'what == "scores" or (group, "softmax", tile) in done',
        'what == "scores" or (group, "scores", tile) in done',
        "tests/lessons/flash_attention/test_explorers.py -k follow_an_order",
    ),
    # one rank that waits is taken for a deadlock
    Fault(
        "lib/lessons/ranks.py",
        "if stuck and len(stuck) + len(self.ended - stuck.keys()) == self.count:",
        "if stuck:",
        "tests/lessons/test_ranks.py -k what_processes_get",
    ),
    # a wrapper that waits for each message in backward is right
    Fault(
        "lib/lessons/ranks.py",
        "        self.waits += 1\n",
        "",
        "tests/lessons/test_exercise.py -k waits",
    ),
    # the error of a check depends on which thread came first
    Fault(
        "lib/lessons/ranks.py",
        "raise errors[min(own or errors)]",
        "raise errors[next(iter(errors))]",
        "tests/lessons/test_ranks.py -k lowest_rank",
    ),
    # what ranks train is right whatever it is
    Fault(
        "lib/lessons/ranks.py",
        "return off < MOST_OFF, f",
        "return True, f",
        "tests/lessons/test_ranks.py -k any_rank",
    ),
    # the wait for a late rank is no communication
    Fault(
        "lib/lessons/ddp/stack.py",
        "(one.called, one.end)",
        "(one.start, one.end)",
        "tests/lessons/ddp/test_stack.py",
    ),
    # a ring may send whole tensors
    Fault(
        "lib/lessons/ddp/exercises.py",
        "max(sent, best)",
        "best",
        "tests/lessons/test_exercise.py -k RING",
    ),
    # the ZeRO-1 step may all-reduce
    Fault(
        "lib/lessons/zero1/exercises.py",
        "found.append(_numbers_of(own, state) | ranks.calls)",
        "found.append(_numbers_of(own, state))",
        "tests/lessons/test_exercise.py -k ZERO1_STEP",
    ),
    # weights are used before they came
    Fault(
        "lib/lessons/zero1/stack.py",
        "            self.before_part(part)\n",
        "",
        "tests/lessons/zero1/test_stack.py",
    ),
    # a run on CPUs is a row of GPUs
    Fault(
        "lib/lessons/zero1/records.py",
        'config["backend"] == "nccl" and figures["status"] == "ok"',
        'figures["status"] == "ok"',
        "tests/lessons/zero1/test_records.py",
    ),
    # a run wins by the luck of when it is judged
    Fault(
        "lib/lessons/speedrun/race.py",
        "            return Judged(*(a + share * (b - a) for a, b in zip(before, point)))\n",
        "            return point\n",
        "tests/lessons/speedrun/test_race.py -k straight_line",
    ),
    # a claim of one seed counts
    Fault(
        "lib/lessons/speedrun/race.py",
        "if len(seeds) < FEWEST_SEEDS:",
        "if len(seeds) < 1:",
        "tests/lessons/speedrun/test_race.py -k false_claim",
    ),
    # a recipe that is no faster is right
    Fault(
        "lib/lessons/speedrun/exercises.py",
        "if yours > FAST_ENOUGH * ours:",
        "if yours > 1e9 * ours:",
        "tests/lessons/speedrun/test_race.py -k no_faster",
    ),
]
