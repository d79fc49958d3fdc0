"""Random faults in bytes, JSON, YAML, safetensors files and command lines."""

import contextlib
import json
import random
import struct

EXTREMES = [
    0, -1, 1, 2, 3, 2.5, 1e-320, 1e308, 10**9, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30,
    -(2**63), float("inf"), float("nan"), True, False, None, "", "8", "x", "\x00", "\ud800", "../x", "[red]",
    "a" * 5000, [], {}, [[]], [0], [1, 2, 3], [None], {"a": 1}, [[1] * 9] * 9, "F32", "BF16", "int",
]  # fmt: skip


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
    b'!!int ', b'!!float ', b'!!python/name:os.system ', b'!!binary ', b'!!set ', b'!!timestamp ', b'&a ',
    b'*a ', b'<<: ', b'---\n', b'? ', b'0x', b'1:2:3', b'.inf', b'.nan', b'~', b"'", b'|\n', b'>\n', b'- ',
    b'2001-01-01', b'1e999', b"9" * 5000, b"[" * 200, b"{a: " * 200,
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


COMMANDS = (
    "plan", "eval", "generate", "inspect", "bench", "convert", "export", "heal", "import", "study", "train",
    "nosuch", "",
)  # fmt: skip
OPTIONS = (
    "--json", "--data", "--length", "--to", "--kv-fraction", "--calibration", "--prompt", "--seed",
    "--temperature", "--top-k", "--text", "--dtype", "--device", "--rounds", "--format", "--for",
    "--method", "--tp", "--context", "--help", "-h", "--no", "--max-new-tokens", "--jobs", "--preset",
    "--config", "--html", "--", "-", "--version",
)  # fmt: skip
FLAGS = (
    "model.n_layer", "model.n_embd", "model.n_query_head", "model.n_kv_head", "model.window", "model.rope",
    "model.attention", "model.kv_lora_rank", "model.layers", "model.rope_scaling.factor", "data.block_size",
    "data.val_fraction", "data.tokenizer", "trainer.learning_rate", "trainer.batch_size", "trainer.resume",
    "trainer.device", "system.seed", "system.x", "x.y", "x",
)  # fmt: skip
VALUES = (
    "", "0", "-1", "1", "2", "3", "2.5", "1e9", "-0", "nan", "inf", "1e400", "9" * 30, "1_000", "0x10",
    "010", "１２", "1:30", "true", "null", "[]", "[1,2]", "{}", "{a: 1}", "[", "!!int ''", "&a 1", "*a",
    "a\nb", "\x1b[31m", "[red]", "[/red]", "run[/bold]", "\ud800", "\udcff", "../..", "/", "/dev/null", "~",
    ".", "model", "text.txt", "a" * 300, "mla", "mqa", "bf16", "cuda:9", "meta", "${x}", "???",
)  # fmt: skip


SMALL = ("data.path=text.txt", "trainer.max_iters=0", "trainer.eval_batches=1", "system.work_dir=run")
GOOD_LINES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("plan", "model"): ("--batch", "--context", "--dtype", "--kv-dtype", "--parts", "--tp"),
    ("eval", "model", "--data", "text.txt"): (
        "--batch-size", "--bos", "--device", "--dtype", "--kv-dtype", "--length", "--limit", "--no-bos",
        "--num-fewshot", "--stored-as", "--stride", "--tasks",
    ),
    ("generate", "model", "--prompt", "abc", "--max-new-tokens", "2"): (
        "--cache", "--device", "--dtype", "--ignore-eos", "--max-new-tokens", "--no-cache", "--prompt",
        "--samples", "--seed", "--temperature", "--top-k", "--top-p",
    ),
    ("inspect", "model", "--text", "abc"): ("--compare", "--head", "--html", "--layer", "--length", "--max-tokens"),
    ("bench", "model", "--prompt-lengths", "4", "--rounds", "1", "--new-tokens", "2"): (
        "--batch", "--device", "--dtype", "--explain", "--length", "--new-tokens", "--prompt-lengths",
    ),
    ("convert", "model", "made", "--to", "mla", "--kv-fraction", "0.5", "--allow-loss"): (
        "--calibration", "--device", "--head-map", "--kv-fraction", "--kv-rank", "--length", "--max-loss",
        "--measured-ranks", "--method", "--n-kv-head", "--resume", "--rope-dim", "--rope-layout", "--seed", "--target",
        "--teach", "--test", "--to",
    ),
    ("export", "model", "made"): ("--dtype", "--for", "--format", "--replace"),
    ("check", "model"): ("--data", "--device", "--dtype", "--length"),
    ("train", "model.n_layer=1", "model.n_embd=8", "model.n_query_head=2", "data.block_size=8", *SMALL): tuple(
        f"{flag}=" for flag in FLAGS
    ),
}  # fmt: skip
"""Commands that succeed with these words alone, and more that each understands."""
BARE = (
    "--bos", "--cache", "--ignore-eos", "--measured-ranks", "--no-bos", "--no-cache", "--parts", "--replace",
    "--resume",
)  # fmt: skip
"""Options without a value."""
LIKELY = (
    "0", "1", "2", "3", "8", "24", "0.5", "0.99", "1e9", "9" * 30, "bf16", "true", "model", "text.txt", ".", "self",
)  # fmt: skip


def command_line(rng: random.Random) -> list[str]:
    """Draw a command line: mostly one that is good up to a value or two, else words as they come."""
    if rng.random() < 0.2:
        return random_words(rng)
    good = rng.choice(list(GOOD_LINES))
    words = [*good]
    for name in rng.choices(GOOD_LINES[good], k=rng.choice((1, 1, 2, 3))):
        value = rng.choice(LIKELY if rng.random() < 0.7 else VALUES)
        words += [name] if name in BARE else [name + value] if name.endswith("=") else [name, value]
    return words


def random_words(rng: random.Random) -> list[str]:
    """Draw a command line from all words there are; what would train does nothing else, and nothing long."""
    words = [rng.choice(COMMANDS)]
    for _ in range(rng.randrange(6)):
        match rng.randrange(4):
            case 0:
                words.append(rng.choice(VALUES))
            case 1:
                words.append(rng.choice(OPTIONS))
            case 2:
                words += [rng.choice(OPTIONS), rng.choice(VALUES)]
            case _:
                words.append(f"{rng.choice(('', '', '--'))}{rng.choice(FLAGS)}={rng.choice(VALUES)}")
    if words[0] in ("train", "heal"):
        words += SMALL
    if words[0] == "bench":
        words += ["--prompt-lengths", "4", "--rounds", "1"]
    if words[0] == "study":
        words += ["--preset", rng.choice(("nosuch", "", "..", "text.txt"))]
    return words
