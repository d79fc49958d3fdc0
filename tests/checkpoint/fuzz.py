"""Random faults in every file that rehead reads and did not write: each is read, or refused in one clean line.

`python fuzz.py config 5000 1` reads 5,000 damaged configs, from seed 1, and prints as JSON what was wrong. An input is
wrong if reading it ends with another status than those of `CLEAN`, more than one line, more than `SECONDS` of computing
or more than `KIB` of memory; a signal ends the process, and the last input is left in the file `input`.
"""

import contextlib
import io
import json
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from corpus import TEXT, folder_of, native_folder, sharded_folder, stock_folder  # beside this file
from families_corpus import GOOD as KINDS

import rehead
from rehead.cli import main
from rehead.conversion.certificate import Certificate
from rehead.conversion.page import page
from rehead.errors import ReheadError
from rehead.training.metrics import records

CLEAN = (0, 2, 3, 4, 5, 7)
SECONDS, KIB = 2.0, 300 * 1024
EXTREMES = [
    0, -1, 1, 2, 3, 2.5, 1e-320, 1e308, 10**9, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30,
    -(2**63), float("inf"), float("nan"), True, False, None, "", "8", "x", "\x00", "\ud800", "../x", "[red]", "a" * 5000,
    [], {}, [[]], [0], [1, 2, 3], [None], {"a": 1}, [[1] * 9] * 9, "F32", "BF16", "int",
]  # fmt: skip
Damage = Callable[[bytes, random.Random], bytes]
Read = Callable[[Path], object]


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip, drop, repeat or insert some bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        at, length = rng.randrange(len(out) + 1), rng.choice((1, 1, 2, 4, 8, 64, 1000))
        match rng.randrange(5):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                del out[at : at + length]
            case 2:
                out[at:at] = out[at : at + length]
            case 3:
                out[at:at] = rng.randbytes(length)
            case _:
                out[at : at + 1] = rng.choice(
                    (b'"', b"{", b"[", b"}", b",", b":", b"9", b"-", b"\\", b"\xff", b"\x00")
                )
    return bytes(out)


def damaged_value(value: object, rng: random.Random) -> object:
    """Replace, drop, add or rename something in a JSON value."""
    places: list[tuple[object, object]] = []

    def walk(inner: object) -> None:
        keys = inner if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ()
        for key in keys:
            places.append((inner, key))
            walk(inner[key])

    value = json.loads(json.dumps(value))
    walk(value)
    if not places or rng.random() < 0.01:
        return rng.choice(EXTREMES)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        inner, key = rng.choice(places)
        with contextlib.suppress(KeyError, IndexError):
            if (kind := rng.randrange(8)) == 0:
                del inner[key]
            elif kind == 1 and isinstance(inner, dict):
                inner[rng.choice((str(key)[:-1], str(key).upper(), "x", "__class__"))] = inner.pop(key)
            elif kind == 2 and isinstance(inner, list):
                inner[key:key] = inner[key : key + 1] * rng.choice((1, 9, 1000))
            elif kind == 3 and isinstance(inner[key], int | float):
                inner[key] = inner[key] * rng.choice((-1, 2, 0.5, 1000)) + rng.choice((-1, 0, 1))
            else:
                inner[key] = rng.choice(EXTREMES)
    return value


def damaged_json(data: bytes, rng: random.Random) -> bytes:
    """Damage a JSON text: its values, more often than its bytes."""
    if rng.random() < 0.3:
        return damaged_bytes(data, rng)
    text = json.dumps(damaged_value(json.loads(data), rng)).encode()
    return text if rng.random() < 0.95 else damaged_bytes(text, rng)


def damaged_lines(data: bytes, rng: random.Random) -> bytes:
    """Damage one of the lines of JSON."""
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    lines[at] = damaged_json(lines[at], rng) + (b"\n" if rng.random() < 0.9 else b"")
    return b"".join(lines)


def damaged_weights(data: bytes, rng: random.Random) -> bytes:
    """Damage a safetensors file: its header, its length, or what follows."""
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = data[8 : 8 + length], data[8 + length :]
    match rng.randrange(10):
        case 0:
            return damaged_bytes(data, rng)
        case 1:
            wrong = rng.choice(
                (0, 1, length - 1, length + 1, 2**31, 2**63 - 1, 2**64 - 1, rng.randrange(2**64))
            )
            return struct.pack("<Q", wrong) + header + rest
        case 2:
            return data[: rng.randrange(len(data))]
    header = damaged_json(header, rng)
    return struct.pack("<Q", len(header)) + header + rest


YAML = (
    b"!!int ", b"!!float ", b"!!python/name:os.system ", b"!!binary ", b"!!set ", b"!!timestamp ", b"&a ", b"*a ", b"<<: ",
    b"---\n", b"? ", b"0x", b"1:2:3", b".inf", b".nan", b"~", b"'", b"|\n", b">\n", b"- ", b"2001-01-01", b"1e999",
    b"9" * 5000, b"[" * 200, b"{a: " * 200,
)  # fmt: skip


def damaged_yaml(data: bytes, rng: random.Random) -> bytes:
    """Damage a YAML text."""
    if rng.random() < 0.3:
        return damaged_bytes(data, rng)
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    name, colon, value = lines[at].partition(b": ")
    value = rng.choice((value, b"\n", str(rng.choice(EXTREMES)).encode(errors="replace") + b"\n"))
    lines[at] = name + colon + rng.choice(YAML) + value if rng.random() < 0.7 else name + colon + value
    return b"".join(lines)


def typed(*words: str) -> int:
    """Run a command line; raise what it says as an error of its status."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        status = main([*words])
    said = [line for line in err.getvalue().splitlines() if re.match("rehead: (?!warning: )", line)]
    assert status in CLEAN, (status, said)
    assert (len(said) == 1) == bool(status), said
    return status


def certificate(folder: Path) -> None:
    """Read a certificate as healing does, and write it as its last save does."""
    read = Certificate.read(folder)
    read.to_json(), page(read)


def run_folder(folder: Path) -> None:
    """A run that has trained two steps."""
    small = [
        "model.n_layer=1",
        "model.n_embd=8",
        "model.n_query_head=2",
        "data.block_size=8",
        "trainer.batch_size=2",
    ]
    text = folder.parent / "text.txt"
    text.write_text(TEXT * 40)
    run = [f"data.path={text}", "trainer.max_iters=2", "trainer.eval_batches=1", "trainer.device=cpu"]
    assert typed("train", *small, *run, f"system.work_dir={folder}") == 0


def converted_folder(folder: Path) -> None:
    """A converted model, with its certificate."""
    native_folder(folder.parent / "source")
    to = ["--to", "mqa", "--length", "8", "--allow-loss"]
    assert typed("convert", str(folder.parent / "source"), str(folder), *to) == 0


def load(folder: Path) -> None:
    rehead.load(folder)


def plan(folder: Path) -> None:
    typed("plan", str(folder), "--json")


def planned(folder: Path) -> None:
    typed("plan", str(folder / "config.yaml"), "--json")


def tokenizer(folder: Path) -> None:
    read = rehead.load_tokenizer(folder)
    assert isinstance(read.decode(read.encode(TEXT)), str)


def resumed(folder: Path) -> None:
    typed("train", f"system.work_dir={folder}", "trainer.resume=True", "trainer.max_iters=3")


Fuzzed = tuple[Callable[[Path], None], str, Damage, Read]
FUZZED: dict[str, Fuzzed] = {
    "header": (stock_folder, "model.safetensors", damaged_weights, load),
    "index": (sharded_folder, "model.safetensors.index.json", damaged_json, load),
    "config": (stock_folder, "config.json", damaged_json, plan),
    **{f"config-{kind}": (folder_of(kind), "config.json", damaged_json, plan) for kind in KINDS},
    "config-loaded": (stock_folder, "config.json", damaged_json, load),
    "native-loaded": (native_folder, "config.json", damaged_json, load),
    "native": (native_folder, "config.json", damaged_json, plan),
    "manifest": (native_folder, "MANIFEST.json", damaged_json, load),
    "tokenizer": (stock_folder, "tokenizer.json", damaged_json, tokenizer),
    "certificate": (converted_folder, "conversion.json", damaged_json, certificate),
    "metrics": (run_folder, "metrics.jsonl", damaged_lines, lambda folder: list(records(folder / "metrics.jsonl"))),
    "yaml": (run_folder, "config.yaml", damaged_yaml, planned),
    "metrics-resumed": (run_folder, "metrics.jsonl", damaged_lines, resumed),
}  # fmt: skip


def memory(name: str) -> int:
    """VmRSS or VmHWM of this process, in KiB."""
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def wrong(read: Read, folder: Path) -> str:
    """Read; return what was wrong with that, or nothing."""
    before, begun = memory("VmRSS"), time.process_time()
    Path("/proc/self/clear_refs").write_text("5")
    signal.setitimer(signal.ITIMER_PROF, 10 * SECONDS)  # rather an end than a reader that computes for ever
    fault = ""
    try:
        read(folder)
    except ReheadError as error:
        text = str(error)
        if error.exit_code not in CLEAN or "\n" in text:
            fault = f"{type(error).__name__}: {text!r:.200}"
    except BaseException as error:
        fault = f"{type(error).__name__}: {error!s:.200}"
    signal.setitimer(signal.ITIMER_PROF, 0)
    if (seconds := time.process_time() - begun) > SECONDS:
        fault += f" {seconds:.1f} s"
    if (more := memory("VmHWM") - before) > KIB:
        fault += f" {more // 1024} MiB"
    return fault


def fuzz(name: str, count: int, seed: int) -> dict[str, int | dict[str, str]]:
    """Read `count` damaged files; return how many were taken and refused, and the faults by the file's text."""
    make, file, damage, read = FUZZED[name]
    faults: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, folder = Path(place, "good"), Path(place, "model")
        make(whole)
        good = (whole / file).read_bytes()
        for number in range(-1, count):
            bad = damage(good, random.Random(f"{name} {seed} {number}")) if number >= 0 else good
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(whole, folder)
            (folder / file).write_bytes(bad)
            Path("input").write_bytes(bad)
            if (fault := wrong(read, folder)) and number >= 0:  # before, imports take their time
                faults[f"{number}: {fault}"] = repr(bad)[:400]
    return faults


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    print(json.dumps(fuzz(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])), indent=1))
