"""Every command that reads a model folder, watched: what it opens, runs, takes and leaves behind.

`python readers.py 2/3` runs the second of three parts of the corpus and prints what was not as it should be; without
pytest, whose checks of annotations would be code, too. Each case is loaded, and read by a command in turn: every row of
the corpus by all of them. `python readers.py 2/3 all` runs all of them on every case.
"""

import atexit
import contextlib
import functools
import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

from corpus import CANARY, CORPUS, TEXT, folder_of, stock_folder  # beside this file
from families_corpus import UNCONVERTIBLE

import rehead
from rehead.cli import main
from rehead.cli.entry import app
from rehead.errors import ReheadError

SECONDS, KIB = 2.0, 300 * 1024
PARTS = {"load": {"config", "weights"}, "plan": {"config"}}
"""What each reads; the others read all."""
COMMANDS = {
    "plan": ["plan", "{model}"],
    "convert": ["convert", "{model}", "{out}", "--to", "mha"],
    "export": ["export", "{model}", "{out}"],
    "eval": ["eval", "{model}", "--data", "{text}", "--device", "cpu"],
    "generate": ["generate", "{model}", "--prompt", "abc", "--max-new-tokens", "2", "--device", "cpu"],
    "inspect": ["inspect", "{model}", "--text", "abc"],
}
READERS = ["load", *(name for name in COMMANDS if name in app)]
RUNS = ("pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork")
PLACES = [place for place in (sys.prefix, sys.base_prefix, *sys.path) if place]
PYTHON = tuple({*PLACES, *map(os.path.realpath, PLACES)})
REMOVES = "_rmtree_safe_fd"
"""Of shutil: opens names in a folder that it has opened by its path."""
HARMLESS = ("/proc/cpuinfo", "/proc/self/", "/proc/meminfo", "/sys/fs/cgroup", "/dev/null")

_events: list[tuple[str, str]] | None = None


def _hook(event, arguments):
    if _events is None or (event == "open" and sys._getframe(1).f_code.co_name.startswith(REMOVES)):
        return
    if event in RUNS or event.startswith("socket.") or event in ("open", "exec"):
        what = arguments[0] if arguments else ""
        _events.append((event, str(getattr(what, "co_filename", what))))


sys.addaudithook(_hook)


@contextlib.contextmanager
def watched():
    """The audit events of the block, into the list it gives."""
    global _events
    seen = _events = []
    try:
        yield seen
    finally:
        _events = None


def outside(events, own):
    """Events that no reader of a folder may cause: a file elsewhere, code, a process, a connection."""
    for event, what in events:
        place = os.path.realpath(what) if not what.isdigit() else ""
        if event == "open" and (what.isdigit() or what.startswith(HARMLESS)):
            continue
        if event == "open" and (
            place.startswith((*own, *PYTHON)) or os.path.abspath(what).startswith(PYTHON)
        ):
            continue  # packages may be links
        if event == "exec" and place.startswith(PYTHON):
            continue
        yield f"{event} {what}"


def memory(name):
    """VmRSS or VmHWM of this process, in KiB."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+)", text)[1])


def read(reader, model, out):
    """Run one reader; give its exit status and what it printed."""
    err, printed = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if reader == "load":
            try:
                rehead.load(model)
            except ReheadError as error:
                print(f"rehead: {error}", file=err)
                return error.exit_code, err.getvalue()
            return 0, ""
        text = model.parent / "text.txt"
        words = [word.format(model=model, out=out, text=text) for word in COMMANDS[reader]]
        return main(words), err.getvalue()


@functools.cache
def good(base):
    """A good folder, made once."""
    folder = Path(tempfile.mkdtemp(prefix="good-")) / "model"
    atexit.register(shutil.rmtree, folder.parent)
    base(folder)
    return folder


def faults(name, reader, place):
    """All that is wrong with how `reader` takes a case; `place` is an empty folder."""
    case = CORPUS[name]
    place.mkdir(parents=True)
    model, out = place / "model", place / "made" / "out"
    (place / "text.txt").write_text(TEXT * 40)
    shutil.copytree(good(case.base or stock_folder), model)
    case.damage(model)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    begun = time.process_time()  # of this process: others may keep the machine busy
    with watched() as events:
        signal.alarm(60)  # rather an end than a reader that waits for ever
        code, message = read(reader, model, out)
        signal.alarm(0)
    seconds, more = time.process_time() - begun, memory("VmHWM") - before
    wanted = case.codes if case.part in PARTS.get(reader, {case.part}) else (0,)
    if reader == "convert" and case.base in map(folder_of, UNCONVERTIBLE):
        wanted = (2,)
    if code not in wanted:
        yield f"exit {code}, not {wanted}: {message}"
    if seconds > SECONDS:
        yield f"{seconds:.1f} s"
    if more > KIB:
        yield f"{more // 1024} MiB"
    own = tuple(
        os.path.realpath(p) for p in (model, out.parent, place / "text.txt", tempfile.gettempdir() + "/tmp")
    )
    yield from outside(events, own)
    if code and out.parent.exists():
        yield f"left {list(out.parent.iterdir())}"
    lines = [line for line in message.splitlines() if "warning" not in line]
    if code and (
        len(lines) != 1 or len(lines[0]) > (900 if reader == "load" else 320) or not lines[0].isprintable()
    ):
        yield f"said {message!r}"
    if (place / CANARY).exists():
        yield "ran code"


def dealt():
    """The readers of each case: `load` and one command in turn, of a row with less than six cases more."""
    rows, turns = Counter(map(row, CORPUS)), Counter()
    for name in CORPUS:
        turn, commands = turns[row(name)], READERS[1:]
        turns[row(name)] += 1
        yield name, [READERS[0], *commands[turn % len(commands) :: rows[row(name)]]]


def row(name):
    return name[:3]


def warm(place):
    """Import all that the readers import, and see that they read a good folder."""
    for reader in READERS:
        (place / reader).mkdir(parents=True)
        (place / reader / "text.txt").write_text(TEXT * 40)
        stock_folder(place / reader / "model")
        code, message = read(reader, place / reader / "model", place / reader / "out")
        assert code == 0, (reader, message)
    bases = {case.base for case in CORPUS.values() if case.base}
    for number, base in enumerate(bases):  # each has a class in transformers, imported when it is written
        code, message = read("export", good(base), place / f"base{number}" / "out")
        assert code == 0, (base, message)


if __name__ == "__main__":
    part, parts = map(int, sys.argv[1].split("/"))
    with tempfile.TemporaryDirectory(prefix="corpus-") as folder:
        warm(Path(folder, "warm"))
        wrong = {}
        cases = list(dealt())[part - 1 :: parts]
        for number, (name, readers) in enumerate(cases):
            for reader in READERS if "all" in sys.argv else readers:
                found = list(faults(name, reader, Path(folder, f"{number}-{reader}")))
                if found:
                    wrong[f"{reader}: {name}"] = found
        print(json.dumps({"cases": len(cases), "readers": READERS, "wrong": wrong}, indent=1))
