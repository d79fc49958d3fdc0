"""Calls that turn data into code, or reach the network, are not in the package."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "rehead"
FILES = sorted(SRC.rglob("*.py"))
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "os.system",
    "os.popen",
    "yaml.load",
    "tempfile.mktemp",
}
MODULES = {
    "pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "joblib",
    "requests",
    "httpx",
    "aiohttp",
    "http",
    "urllib",
}
NETWORK = {"data/corpora.py": {"urllib"}, "data/files.py": {"http"}}
"""A corpus that the user names, whose sha256 is known, is fetched; the errors of that are turned into ours."""


def banned(tree, allowed=frozenset()):
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS:
                yield name
            if any(word.arg == "shell" and getattr(word.value, "value", True) for word in node.keywords):
                yield f"{name}(shell=True)"
        for name in names:
            if name in CALLS or name.split(".")[0] in MODULES - allowed:
                yield name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_nothing_dangerous_is_called(path):
    where = str(path.relative_to(SRC))
    assert not list(banned(ast.parse(path.read_text()), NETWORK.get(where, frozenset())))


@pytest.mark.parametrize(
    "text",
    ["eval(x)", "exec(x)", "import pickle", "from pickle import loads", "torch.load(x)", "os.system(x)",
     "subprocess.run(x, shell=True)", "yaml.load(x)", "from yaml import load", "tempfile.mktemp()",
     "import requests", "from urllib.request import urlopen"],
)  # fmt: skip
def test_what_is_banned_is_seen(text):
    assert list(banned(ast.parse(text)))
