"""Models of the Hub, from a server of our own that answers as it does."""

import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from unittest.mock import Mock

import pytest
from corpus import stock_folder
from huggingface_hub import errors

import rehead
from rehead.checkpoint import hub
from rehead.errors import InvalidInput
from typed_lines import typed

COMMIT, OTHER = "a1" * 20, "b2" * 20
NEVER = {
    "pytorch_model.bin": b"\x80\x04.", "modeling_x.py": b"raise SystemExit", "onnx/config.json": b"{}",
    "consolidated.safetensors": b"the same weights",
}  # fmt: skip
"""Beside the model, and never asked for."""


class Hub(BaseHTTPRequestHandler):
    """org/model at COMMIT, which main is; org/gated; nothing else."""

    files: dict[str, bytes]
    asked: list[str]

    def do_GET(self):
        self.asked.append(self.path)
        path = self.path.partition("?")[0]
        if "/org/gated" in path:
            return self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        if "/org/model" not in path:
            return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        if OTHER in path or path.endswith("/abc123"):
            return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if path in (f"/api/models/org/model/revision/{name}" for name in ("main", COMMIT)):
            return self.answer(200, json.dumps({"id": "org/model", "sha": COMMIT}).encode())
        if path == f"/api/models/org/model/tree/{COMMIT}":
            return self.answer(200, json.dumps([self.entry(name) for name in self.files]).encode())
        name = path.removeprefix(f"/org/model/resolve/{COMMIT}/")
        if name not in self.files:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        digest = self.entry(name)["oid"]
        return self.answer(200, self.files[name], {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET  # noqa: N815

    def entry(self, name):
        content = self.files[name]
        return {
            "type": "file",
            "path": name,
            "size": len(content),
            "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
        }

    def answer(self, status, content, headers=()):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hub")


@pytest.fixture
def cache(folder):
    """Where the Hub's library keeps what it fetched."""
    return folder / "cache"


@pytest.fixture(scope="module")
def run(folder):
    """Command lines in an environment of their own, as (exit status, stdout, stderr) and what was asked for."""
    stock_folder(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text("{{ messages }}")
    Hub.files = NEVER | {path.name: path.read_bytes() for path in (folder / "model").iterdir()}
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    (folder / "here").mkdir()

    def run(*lines, endpoint=f"http://127.0.0.1:{server.server_port}", cache="cache", **more):
        before = len(Hub.asked)
        there = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / cache), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        return typed(*lines, cwd=folder / "here", **there, **more), Hub.asked[before:]

    yield run
    server.shutdown()
    server.server_close()


GENERATE = ["--prompt", "abc", "--max-new-tokens", "3", "--temperature", "0", "--device", "cpu"]


MODEL = f"org/model@{COMMIT}"
SAID = {
    "org/model": f"Its main is at {MODEL}.",
    "org/model@main": f"Its main is at {MODEL}.",
    "org/model@abc123": "org/model@<40 hex digits>. It has no abc123.",
    f"org/model@{OTHER}": f"has no commit {OTHER}",
    f"org/gated@{COMMIT}": "is gated",
    f"org/nobody@{COMMIT}": "is not a model on",
    "org/nobody": "org/nobody@<40 hex digits>. There is no such model there",
}


@pytest.mark.process
def test_a_pinned_model_is_taken_by_every_command_and_nothing_else_is(run, folder, cache):
    """Nothing but its weights and texts is fetched, once; what is refused says why and how."""
    lines = [
        ["generate", MODEL, *GENERATE],
        ["plan", MODEL, "--json"],
        ["convert", MODEL, "converted", "--to", "mha"],
        ["export", MODEL, "exported"],
    ]
    wrong = [["generate", name, *GENERATE] for name in SAID]
    results, asked = run(*lines, *wrong)
    assert [code for code, _, _ in results] == [0] * len(lines) + [3] * len(wrong), results
    assert results[0][1].startswith("abc")
    assert not [path for path in asked for name in NEVER if path.endswith(name)], asked
    assert (folder / "here" / "converted" / "chat_template.jinja").read_text() == "{{ messages }}"
    for (_, _, message), words in zip(results[len(lines) :], SAID.values(), strict=True):
        assert words in message
        assert len(message.splitlines()) == 1

    offline, asked = run(lines[0], ["generate", f"org/model@{OTHER}", *GENERATE], HF_HUB_OFFLINE="1")
    assert not asked
    assert offline[0] == results[0]
    # As an earlier release fetched it: without the template.
    (cache / "hub" / "models--org--model" / "snapshots" / COMMIT / "chat_template.jinja").unlink()
    (without,), asked = run(lines[0], HF_HUB_OFFLINE="1")
    assert without == results[0]
    assert not asked
    # A folder that another program began is not the whole model; without a network it is all there is.
    begun = Path(cache) / "hub" / "models--org--model"
    for path in [*begun.glob("trees/*"), *(begun / "snapshots" / COMMIT).glob("*.safetensors")]:
        path.unlink()
    assert list(begun.glob("snapshots/*/config.json"))
    (alone,), _ = run(lines[0], HF_HUB_OFFLINE="1")
    assert alone[0] == 5
    assert "is not in the cache and cannot be fetched" in alone[2]
    (again,), asked = run(lines[0])
    assert again == results[0]
    assert any(path.endswith(".safetensors") for path in asked)
    unplugged, _ = run(lines[0], endpoint="http://127.0.0.1:9", cache="empty")
    for code, _, message in (offline[1], unplugged[0]):
        assert code == 5
        assert "is not in the cache and cannot be fetched" in message
        assert "Give a folder, or go online." in message
        assert len(message.splitlines()) == 1


@pytest.mark.process
def test_a_plan_fetches_no_weights(run, folder):
    (first,), asked = run(["plan", MODEL, "--json"], cache="planned")
    assert first[0] == 0, first
    assert {path.rpartition("/")[2] for path in asked if "/resolve/" in path} == {"config.json"}
    (again, local), asked = run(
        ["plan", MODEL, "--json"], ["plan", str(folder / "model"), "--json"], cache="planned"
    )
    assert not [path for path in asked if "org/model" in path]
    assert json.loads(again[1])["rows"] == json.loads(local[1])["rows"]
    (alone,), _ = run(["generate", MODEL, *GENERATE], cache="planned", endpoint="http://127.0.0.1:9")
    assert alone[0] == 5  # not "no weights there"
    assert "is not in the cache and cannot be fetched" in alone[2]
    (whole,), asked = run(["generate", MODEL, *GENERATE], cache="planned")
    assert whole[0] == 0
    assert any(path.endswith(".safetensors") for path in asked)
    unplugged, _ = run(["plan", f"org/model@{OTHER}"], endpoint="http://127.0.0.1:9", cache="planned")
    assert unplugged[0][0] == 5
    assert "cannot be fetched" in unplugged[0][2]
    Hub.files, kept = (
        {name: content for name, content in Hub.files.items() if name != "config.json"},
        Hub.files,
    )
    (nothing,), _ = run(["plan", MODEL], cache="without")
    Hub.files = kept
    assert nothing[0] == 3
    assert "has no config.json, so it cannot be planned" in nothing[2]
    wrong, _ = run(*(["plan", name] for name in SAID), cache="planned")
    for (code, _, message), words in zip(wrong, SAID.values(), strict=True):
        assert code == 3
        assert words in message
        assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            OSError("[Errno -2] Name or service\nnot known"),
            "could not be asked ([Errno -2] Name or service not known).",
        ),
        (
            errors.RepositoryNotFoundError("404", response=Mock()),
            " There is no such model there, or it is private.",
        ),
    ],
)
def test_why_a_newest_commit_is_unknown(raised, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", Mock(side_effect=raised))
    with pytest.raises(InvalidInput) as caught:
        rehead.load("org/model")
    assert str(caught.value).endswith(said)
    assert "pin a commit: org/model@<40 hex digits>." in str(caught.value)


def test_a_folder_of_the_same_name_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stock_folder(Path(f"org/model@{COMMIT}"))
    assert rehead.load(f"org/model@{COMMIT}").config.n_layer == 1


def test_a_misspelt_local_name_asks_nobody(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(hub, "_newest", lambda *name: pytest.fail("asked the Hub"))
    for name in ("out/gqaa", "gqa", "a/b/c", str(tmp_path / "gqa")):
        with pytest.raises(InvalidInput, match="does not exist"):
            rehead.load(name)
