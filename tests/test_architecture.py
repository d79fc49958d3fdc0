"""The shape of the code base, kept by test."""

import ast
import hashlib
import importlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SRC = TESTS.parent / "src" / "rehead"
FILES = sorted(SRC.rglob("*.py"))
USERS = sorted(
    file for place in ("benchmarks", "docs", "examples") for file in (TESTS.parent / place).rglob("*.py")
)
"""Code of ours that uses the package as anyone's may."""
ROOMS = """
    errors fields registry stages system native nn attention config model decoding checkpoint tokenizer data
    sampling generation measure conversion training study report cli
"""  # low to high: a room imports from itself and from those before it
ROOMS = ROOMS.split()


@cache
def parsed(path):
    return ast.parse(path.read_text())


def faults(check, paths=FILES):
    """What `check` finds in each file, by its path; empty where it finds nothing."""
    found = {str(path.relative_to(TESTS.parent)): list(check(path)) for path in paths}
    return {path: there for path, there in found.items() if there}


def room(path):
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imported_rooms(tree):
    """Top-level rooms imported anywhere, inside functions too."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("rehead.") and "." in name)


def upward(tree, here):
    return [
        there for there in imported_rooms(tree) if there in ROOMS and ROOMS.index(there) > ROOMS.index(here)
    ]


ROOMED = [path for path in FILES if room(path) in ROOMS]  # not the package's own lazy look-up


def test_imports_point_down():
    assert faults(lambda path: upward(parsed(path), room(path)), ROOMED) == {}


def test_an_import_that_points_up_is_seen():
    assert upward(ast.parse("def f():\n    from rehead.model import GPT"), "attention") == ["model"]
    assert upward(ast.parse("from rehead import training"), "config") == ["training"]


def test_every_room_has_its_place():
    assert {room(path) for path in FILES} - {"__init__", "__main__", "presets"} <= set(ROOMS)


def imported_names(tree):
    """Module and name of everything imported from rehead, inside functions too; and private attributes of it."""
    ours = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "rehead":
                    yield alias.name, None
                    ours.add(alias.asname or "rehead")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rehead":
            for alias in node.names:
                yield node.module, alias.name
                ours.add(alias.asname or alias.name)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and getattr(node.value, "id", None) in ours
            and is_private(node.attr)
        ):
            yield None, node.attr


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def is_there(module, name):
    """Whether a module has a name, or is a package with such a module."""
    if name is None or hasattr(importlib.import_module(module), name):
        return True
    try:
        return importlib.import_module(f"{module}.{name}") is not None
    except ModuleNotFoundError:
        return False


def wrong_imports(tree):
    """Names of rehead that are private, or are not there."""
    for module, name in imported_names(tree):
        if name is not None and is_private(name):
            yield name
        elif not is_there(module, name):
            yield f"{module}.{name}"


def test_what_is_imported_is_there_and_public():
    assert faults(lambda path: wrong_imports(parsed(path)), FILES + USERS) == {}


def test_private_and_missing_imports_are_seen():
    code = "from rehead.model import GPT, _x\ndef f():\n  from rehead.data import gone\n  GPT._y, self._z, GPT.__doc__"
    assert list(wrong_imports(ast.parse(code))) == ["_x", "rehead.data.gone", "_y"]


SPEAKING = ("cli", "report")


def spoken(tree):
    """What goes to the user's terminal directly."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "print":
            yield "print"
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "sys":
            yield from {node.attr} & {"stdout", "stderr"}
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "getLogger":
            yield from {ast.unparse(argument) for argument in node.args} - {"'rehead'"}
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "warn":
            yield from [] if any(word.arg == "stacklevel" for word in node.keywords) else ["warn"]


def test_the_library_does_not_print():
    """It logs events to the logger "rehead", and warns a caller of what the caller gave it."""
    silent = [path for path in FILES if room(path) not in SPEAKING]
    assert faults(lambda path: spoken(parsed(path)), silent) == {}


def test_what_is_printed_is_seen():
    code = "print(1)\nprint(2, file=sys.stderr)\nlogging.getLogger('other').info('')\nwarnings.warn('')"
    assert sorted(spoken(ast.parse(code))) == ["'other'", "print", "print", "stderr", "warn"]


def test_one_idea_per_file():
    assert [path for path in FILES if len(path.read_text().splitlines()) > 300] == []
    assert {path.stem for path in FILES} & {"utils", "common", "helpers", "core", "misc"} == set()


def test_no_two_files_are_the_same():
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in FILES if path.stat().st_size]
    assert len(digests) == len(set(digests))


def hidden_modules(package):
    """Names that a package's `__init__` gives to something else than its module of that name."""
    tree = ast.parse((package / "__init__.py").read_text())
    imported = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    here = f"rehead.{'.'.join(package.relative_to(SRC).parts)}".rstrip(".")
    names = {alias.asname or alias.name for node in imported if node.module != here for alias in node.names}
    return names & {path.stem for path in package.iterdir()}


def test_no_name_hides_a_module():
    packages = [path.parent for path in FILES if path.name == "__init__.py"]
    assert faults(hidden_modules, packages) == {}


def test_a_hidden_module_is_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SRC", tmp_path)
    (tmp_path / "factor.py").touch()
    (tmp_path / "__init__.py").write_text("from rehead.factor import factor")
    assert hidden_modules(tmp_path) == {"factor"}


BANNED = {"eval", "exec", "compile", "__import__", "pickle", "cPickle", "marshal", "shelve", "dill", "joblib"}
BANNED |= {"accelerate", "sqlitedict"}  # SECURITY.md's accepted advisories, as torch.jit below
NETWORK = {"requests", "httpx", "aiohttp", "http", "urllib"}
BANNED_ATTRIBUTES = {
    "torch.load",
    "torch.jit",
    "yaml.load",
    "tempfile.mktemp",
    "os.system",
    "os.popen",
    "os.environ",
    "os.getenv",
}


def dangers(tree):
    """Code from data, the environment and the network."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED:
            yield node.func.id
        if isinstance(node, ast.Attribute) and ast.unparse(node) in BANNED_ATTRIBUTES:
            yield ast.unparse(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            firsts = {name.partition(".")[0] for name in names}
            yield from firsts & (BANNED | NETWORK) | BANNED_ATTRIBUTES & set(names)
        if isinstance(node, ast.keyword) and node.arg in ("shell", "trust_remote_code"):
            yield node.arg


def test_nothing_runs_code_from_data():
    """One file each reads the terminal's size, REHEAD_NATIVE, XDG_CACHE_HOME and what torchrun says.

    A corpus that the user names, whose sha256 is known, is fetched; the errors of that are turned into ours.
    """
    readers = "cli/entry.py", "native/switch.py", "system/folders.py", "system/torchrun.py"
    allowed = {f"src/rehead/{reader}": ["os.environ"] for reader in readers}
    allowed |= {"src/rehead/data/corpora.py": ["urllib"], "src/rehead/data/files.py": ["http"]}
    assert faults(lambda path: dangers(parsed(path))) == allowed


@pytest.mark.parametrize(
    "text",
    ["eval(x)", "exec(x)", "compile(x, y, z)", "__import__(x)", "import pickle", "import pickle as p, os",
     "from pickle import loads", "import joblib.numpy_pickle", "from other import dill", "torch.load(x)",
     "from torch import load", "torch.jit.script(x)", "import torch.jit", "from torch.jit import script",
     "from accelerate import load_checkpoint_in_model", "os.system(x)", "os.popen(x)", "from os import popen",
     "os.environ['A']", "os.getenv('A')", "run(x, shell=True)", "subprocess.run(x, shell=True)",
     "f(trust_remote_code=True)", "yaml.load(x)", "from yaml import load", "tempfile.mktemp()",
     "import requests", "import http.client", "from urllib.request import urlopen", "from urllib import request"],
)  # fmt: skip
def test_dangers_are_seen(text):
    assert list(dangers(ast.parse(text)))


def test_pytest_sees_every_test():
    for path in TESTS.rglob("*.py"):
        if "\ndef test_" in path.read_text():
            assert path.name.startswith("test_"), f"{path.name} is never collected"


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.process
def test_the_library_needs_torch_safetensors_and_jaxtyping_only():
    blocked = ["omegaconf", "cyclopts", "rich", "matplotlib", "yaml", "tokenizers", "transformers"]
    code = f"""
import sys
for name in {blocked}: sys.modules[name] = None
import torch, rehead, rehead.attention
from rehead.config import ModelOptions
from rehead.model import build
model = build(ModelOptions(n_layer=1, n_embd=12).resolve(11, 8))
import tempfile
with tempfile.TemporaryDirectory() as folder:
    rehead.save(model, folder + "/m")
    model = rehead.load(folder + "/m")
for again in range(2):  # a name that is a module's too would be the module from then on
    print(rehead.generate(model, torch.zeros(1, 2, dtype=torch.long), 3, 0).shape)
"""
    done = run(code)
    assert done.stdout.split("\n")[:2] == ["torch.Size([1, 5])"] * 2, done.stderr
