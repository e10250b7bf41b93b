"""Python imports this at its start under `make test`: no test may change a file of the reader's.

That is, in data/, work/, notebooks/ and artifacts/ of the workbook nothing may be written, made,
renamed or removed. Tests have folders of their own there, and may do all of that in other places.
"""

import gc
import os
import sys

# Tests start hundreds of processes, and most of what these import lasts: to look through it for
# garbage every 700 objects would take a tenth of their time.
gc.set_threshold(20_000)

# No test lasts through a power cut: to wait for the disk took half the time of tests that save.
# Where something is to be on the disk first, tests look at the calls of this.
os.fsync = lambda file: None

# jsonschema, which nbformat imports, loads this to check addresses if it is there. Nothing here
# asks for that, and it compiles 38 grammars: more than a second in every process.
sys.modules.setdefault("rfc3987_syntax", None)

ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "../.."))
KEPT = tuple(os.path.join(ROOT, name, "") for name in ("data", "work", "notebooks", "artifacts"))
OF_TESTS = tuple(os.path.join(ROOT, "artifacts", name, "") for name in ("small", "screenshots"))
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# Event -> which of its arguments are paths, and which one is the folder they are relative to.
EVENTS = {
    "os.remove": ((0,), 1),
    "os.rmdir": ((0,), 1),
    "os.mkdir": ((0,), 2),
    "os.rename": ((0, 1), 2),
    "os.link": ((1,), 3),
    "os.symlink": ((1,), 2),
    "os.truncate": ((0,), None),
    "shutil.rmtree": ((0,), None),
}


def refuse_changes(event, arguments):
    """Raise PermissionError if the audited event would change a file of the reader's."""
    if event == "open":
        paths = arguments[:1] if arguments[2] & WRITES else ()
    elif event in EVENTS:
        indices, folder = EVENTS[event]
        # what `shutil.rmtree` removes below an open folder, it has announced before
        is_inside = folder is not None and arguments[folder] not in (-1, None)
        paths = () if is_inside else [arguments[index] for index in indices]
    else:
        return
    for path in paths:
        if isinstance(path, int):
            continue
        # with a slash: a folder is in itself
        name = os.path.join(os.path.realpath(os.fsdecode(path)), "")
        is_there = event == "os.mkdir" and os.path.isdir(name)
        if name.startswith(KEPT) and not name.startswith(OF_TESTS) and not is_there:
            message = "a test must leave the reader's files alone"
            raise PermissionError(f"{message}: {event} {name[:-1]}")


sys.addaudithook(refuse_changes)
