"""JSON that other parsers refuse, and that takes much memory, is refused before anything is made of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from corpus import native_folder, stock_folder
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rehead.checkpoint.files.shards import Shards
from rehead.checkpoint.files.strict import strict_json
from rehead.cli import main
from rehead.errors import IntegrityError, InvalidInput

REFUSED = {
    "a number beyond float64": ('{"a": [-1e999]}', "-1e999 is not a number that float64 can hold"),
    "half a pair": (r'{"a": "x\ud800y"}', "surrogates not allowed"),
    "half a pair in a key": (r'{"\uDFFF": 1}', "surrogates not allowed"),
    "the same key twice": ('{"a": 1, "a": 2}', "a key appears twice"),
    "a million tables": ("[" + "{}," * 10**6 + "1]", "1,000,001 tables and lists, more than 1,000,000"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_strict_parsers_refuse_is_refused(case, tmp_path):
    text, said = REFUSED[case]
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InvalidInput, match=r"a\.json is not JSON: ") as caught:
        strict_json(tmp_path / "a.json", 2**24)
    assert said in str(caught.value)


def test_pairs_and_large_numbers_are_read(tmp_path):
    (tmp_path / "a.json").write_text(r'{"a": "\ud83c\udf89", "b": 1e308, "c": -0.0}')
    assert strict_json(tmp_path / "a.json", 100) == {"a": "🎉", "b": 1e308, "c": 0}


HEADERS = {
    "UTF-16": lambda text: text.encode("utf-16-le"),
    "a byte order mark": lambda text: text.encode("utf-8-sig"),
    "an offset of -0": lambda text: text.replace("[0,", "[-0,").encode(),
    "half a pair": lambda text: text.replace('"pt"', r'"\ud800"').encode(),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_safetensors_refuses_is_refused(case, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3)}, file, metadata={"format": "pt"})
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    assert Shards(tmp_path).read("a").tolist() == [1, 1, 1]
    header = HEADERS[case](whole[8 : 8 + length].decode())
    file.write_bytes(len(header).to_bytes(8, "little") + header + whole[8 + length :])
    with pytest.raises(SafetensorError):
        safe_open(file, "pt")
    with pytest.raises((IntegrityError, InvalidInput)):
        Shards(tmp_path)


MANY = r"""
import re, sys
from pathlib import Path
from rehead.checkpoint.files.shards import Shards
from rehead.errors import ReheadError
def memory(name):
    return int(re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text())[1])
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak so far is of the process that started this one
try:
    Shards(Path(sys.argv[1]))
except ReheadError as error:
    print(error)
print((memory("VmHWM") - before) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak")
def test_a_header_of_empty_tables_takes_no_memory(tmp_path):
    header = b'{"a": [' + b"{}," * (5 * 10**6) + b"{}]}"
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    done = subprocess.run(
        [sys.executable, "-c", MANY, str(tmp_path)], capture_output=True, text=True, check=True
    )
    said, grown = done.stdout.splitlines()
    assert "5,000,003 tables and lists" in said
    assert int(grown) < 100


@pytest.mark.parametrize("name", ["generation_config.json", "MANIFEST.json", "tokenizer_config.json"])
def test_a_file_with_such_json_ends_a_command_in_one_line(name, tmp_path, capsys):
    place = tmp_path / "model"
    if name == "MANIFEST.json":
        native_folder(place)
        table = json.loads((place / name).read_text())
        table["files"]["config.json"]["bytes"] = 12345.5
        (place / name).write_text(json.dumps(table).replace("12345.5", "1e999"))
    else:
        stock_folder(place)
        (place / name).write_text('{"temperature": 1e999, "chat_template": "a"}')
    assert main(["convert", str(place), str(tmp_path / "made"), "--to", "mha"]) in (3, 4)
    said = capsys.readouterr().err.strip()
    assert name in said
    assert len(said.splitlines()) == 1
