"""`rehead export --push`, as typed, against an endpoint on this machine that speaks the Hub's routes."""

import base64
import hashlib
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import transformers

import forked
import rehead
from typed_lines import typed

pytestmark = pytest.mark.process

TOKEN = "hf_" + "secretSECRET" * 2
NAME = "me/small"


class Hub(ThreadingHTTPServer):
    """One account's repositories: by name their files, commits and visibility."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Routes)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos, self.large, self.seen = {}, {}, []
        self.status, self.corrupt, self.moves, self.creates = None, False, False, True

    def add(self, name, files=(), private=False):
        files = {".gitattributes": b"*.safetensors filter=lfs\n", **dict(files)}
        self.repos[name] = {"files": files, "private": private, "commits": []}
        self.commit(name, "initial commit")

    def commit(self, name, summary):
        state = self.repos[name]
        digest = hashlib.sha1(f"{name}{len(state['commits'])}".encode()).hexdigest()
        state["commits"].append((digest, summary))
        return digest


class Routes(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, document, status=200):
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(data)

    def refused(self, body):
        hub = self.server
        hub.seen.append((self.command, self.path.partition("?")[0]))
        if self.path.startswith("/large/"):
            return False
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid username or password."}, 401)
        elif hub.status is not None:
            self.answer({"error": f"no, {self.headers['Authorization']}"}, hub.status)
        else:
            return False
        return True

    def do_GET(self):
        if self.refused(b""):
            return
        path = self.path.partition("?")[0]
        if match := re.fullmatch("/api/models/([^/]+/[^/]+)(/revision/.*)?", path):
            repo = self.server.repos[match[1]]
            self.answer({"id": match[1], "private": repo["private"], "sha": repo["commits"][-1][0]})
        elif match := re.fullmatch("/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            self.answer([self.entry(*file) for file in self.server.repos[match[1]]["files"].items()])
        else:
            self.answer({"error": f"no route {path}"}, 404)

    def entry(self, path, data):
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry = {"type": "file", "path": path, "size": len(data), "oid": oid}
        if path.endswith(".safetensors"):
            entry |= {
                "oid": "0" * 40,
                "lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1},
            }
        return entry

    def do_PUT(self):
        data = self.body()
        if self.refused(data):
            return
        self.server.large[self.path.rpartition("/")[2]] = data[1:] if self.server.corrupt else data
        self.answer({})

    def do_POST(self):
        body, hub = self.body(), self.server
        if self.refused(body):
            return
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if not hub.creates:
                self.answer({"error": "this token may not create"}, 403)
                return
            if name in hub.repos:
                self.answer({"error": "You already created this model repo"}, 409)
                return
            hub.add(name, private=asked.get("visibility") == "private" or bool(asked.get("private")))
            self.answer({"url": f"{hub.url}/{name}"})
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif match := re.fullmatch("/api/models/([^/]+/[^/]+)/preupload/main", path):
            files = hub.repos[match[1]]["files"]
            self.answer({"files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                    "oid": self.entry(file["path"], files[file["path"]])["oid"] if file["path"] in files else None,
                }
                for file in json.loads(body)["files"]
            ]})  # fmt: skip
        elif path.endswith("/info/lfs/objects/batch"):
            upload = {"upload": {"href": f"{hub.url}/large/", "header": {}}}
            self.answer({"transfer": "basic", "objects": [
                {**one, "actions": {"upload": {**upload["upload"], "href": f"{hub.url}/large/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]})  # fmt: skip
        elif match := re.fullmatch("/api/models/([^/]+/[^/]+)/commit/main", path):
            self.commit(match[1], [json.loads(line) for line in body.splitlines()])
        else:
            self.answer({"error": f"no route {path}"}, 404)

    def commit(self, name, lines):
        hub, repo = self.server, self.server.repos[name]
        if hub.moves:
            hub.commit(name, "somebody else's")
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                if value.get("parentCommit") not in (None, repo["commits"][-1][0]):
                    self.answer({"error": "A commit has happened since."}, 412)
                    return
                summary = value["summary"]
            elif line["key"] == "file":
                repo["files"][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repo["files"][value["path"]] = hub.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del repo["files"][value["path"]]
        oid = hub.commit(name, summary)
        self.answer({"commitUrl": f"{hub.url}/{name}/commit/{oid}", "commitOid": oid})


@pytest.fixture
def hub():
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("source") / "llama"
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=32,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def export(hub, source, tmp_path):
    """Type `rehead export SOURCE out ...` with this Hub for endpoint."""

    def typed(*words, token=TOKEN, **changes):
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        own |= {} if token is None else {"HF_TOKEN": token}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        done = forked.python(
            forked.SCRIPT, "export", str(source), "out", *words, cwd=tmp_path, env=kept | own | changes
        )
        assert TOKEN not in done.stdout + done.stderr
        assert ("Traceback" in done.stderr) is ("--debug" in words)
        return done

    typed.out = tmp_path / "out"
    return typed


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def uploaded(hub, name=NAME):
    return {path: data for path, data in hub.repos[name]["files"].items() if path != ".gitattributes"}


def last_line(done):
    """The error, after lines of progress and warnings."""
    return done.stderr.splitlines()[-1]


def test_what_is_uploaded_is_the_folder(hub, export):
    done = export("--push", NAME, "--json")
    assert done.returncode == 0, done.stderr
    assert uploaded(hub) == contents(export.out)
    (oid, _), facts = hub.repos[NAME]["commits"][-1], json.loads(done.stdout)
    assert facts["url"] == f"{hub.url}/{NAME}"
    assert facts["commit"] == oid
    assert facts["folder"] == "out"
    assert hub.repos[NAME]["private"] is False
    warning = f"rehead: warning: the licence of {NAME} is unknown, and its card on the Hub will say so."
    assert warning in done.stderr.splitlines()
    assert f'from_pretrained("{NAME}")' in (export.out / "README.md").read_text()
    assert TOKEN not in "".join(map(repr, uploaded(hub).values()))


def test_a_new_model_may_be_private_and_the_text_names_page_and_commit(hub, export):
    done = export("--push", NAME, "--private")
    assert done.returncode == 0, done.stderr
    assert hub.repos[NAME]["private"] is True
    oid = hub.repos[NAME]["commits"][-1][0]
    assert done.stdout == f"LlamaForCausalLM in out\nuploaded to {hub.url}/{NAME} at commit {oid}\n"


def test_an_upload_that_was_cut_short_goes_on(hub, export):
    assert export("--push", NAME).returncode == 0
    for gone in ("config.json", "model.safetensors"):
        del hub.repos[NAME]["files"][gone]
    export.out.rename(export.out.with_name("first"))
    assert export("--push", NAME).returncode == 0
    assert uploaded(hub) == contents(export.out)


def test_a_token_of_one_repository_is_enough(hub, export):
    hub.creates = False
    hub.add(NAME)
    assert export("--push", NAME).returncode == 0
    assert uploaded(hub) == contents(export.out)


def test_other_files_are_never_touched_unless_asked(hub, export):
    theirs = {
        "model-00001-of-00002.safetensors": b"weights",
        "config.json": b"{}",
        "a.txt": b"",
        "b.txt": b"",
    }
    hub.add(NAME, theirs)
    done = export("--push", NAME)
    assert done.returncode == 3
    assert uploaded(hub) == theirs
    assert len(hub.repos[NAME]["commits"]) == 1
    assert last_line(done) == (
        f"rehead: {NAME} holds other files (a.txt, b.txt, config.json and 1 more), so nothing was uploaded. Give "
        "--push another name, or --replace to put the export in their place. The export is in out; "
        "hf upload me/small out . --delete '*' uploads it later."
    )
    export.out.rename(export.out.with_name("first"))
    done = export("--push", NAME, "--replace")
    assert done.returncode == 0, done.stderr
    assert uploaded(hub) == contents(export.out)
    assert ".gitattributes" in hub.repos[NAME]["files"]
    assert len(hub.repos[NAME]["commits"]) == 2


def test_a_public_model_does_not_become_private(hub, export):
    hub.add(NAME)
    done = export("--push", NAME, "--private")
    assert done.returncode == 3
    assert f"{NAME} is there and is public" in last_line(done)
    assert last_line(done).endswith("hf upload ORG/NAME out . --private uploads it later.")
    assert uploaded(hub) == {}


LATER = f"The export is in out; hf upload {NAME} out . uploads it later."
FAILURES = {
    "no token": (
        {"token": None},
        5,
        "no token for the Hugging Face Hub was found. Log in with `hf auth login`",
    ),
    "wrong token": (
        {"token": "hf_other"},
        5,
        "the Hub does not accept the token. Log in with `hf auth login`",
    ),
    "offline": ({"HF_HUB_OFFLINE": "1"}, 5, "HF_HUB_OFFLINE is set."),
    "no server": ({"HF_ENDPOINT": "http://127.0.0.1:9"}, 5, "http://127.0.0.1:9 failed ("),
    "forbidden": (403, 5, "the token may not write there."),
    "broken": (500, 5, "failed ("),
    "changed": ("moves", 5, "it was changed at the same time."),
    "corrupt": ("corrupt", 4, "does not hold model.safetensors as it was uploaded."),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_one_line_and_leaves_the_folder(name, hub, export):
    change, status, words = FAILURES[name]
    if isinstance(change, int):
        hub.status = change
    elif isinstance(change, str):
        setattr(hub, change, True)
    done = export("--push", NAME, "--json", **(change if isinstance(change, dict) else {}))
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    *before, error = done.stderr.splitlines()
    assert not [line for line in before if line.startswith("rehead:") and "licence" not in line]
    assert len(before) <= 4, before
    assert words in error
    assert error.endswith(LATER)
    assert "hf_other" not in done.stderr
    assert rehead.load(export.out).config.n_layer == 1


REFUSED = {
    "small": "--push 'small' is not a valid name on the Hub: write org/name, for example me/my-model.",
    "a/b/c": "is not a valid name on the Hub",
    "https://huggingface.co/me/small": "is not a valid name on the Hub",
    "me/two--dashes": "no `--` or `..`",
    "me/x.git": "does not end in",
    f"me/{'x' * 99}": "at most 96 characters",
    "me/sm\u00e4ll": "is not a valid name on the Hub",
    "me/small --format gguf": "a .gguf file has no card to go with it. Upload it yourself: hf upload me/small FILE.",
}
ALONE = ["--private", "--replace"]


def test_what_cannot_be_pushed_is_refused_before_any_work(hub, source, tmp_path):
    """Flags of an upload need one, too."""
    asked = {f"--push {words}": text for words, text in REFUSED.items()}
    asked |= {flag: f"rehead: {flag} is about an upload: give --push org/name.\n" for flag in ALONE}
    lines = [f"export {source} out {words}" for words in asked]
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
    results = typed(*lines, cwd=tmp_path, **own)
    for (code, out, err), (words, text) in zip(results, asked.items(), strict=True):
        assert (code, out) == (2, ""), words
        assert text in err
        assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
    assert hub.seen == []


def test_a_traceback_does_not_have_the_token(hub, export):
    """The Hub's answer has it here."""
    hub.status = 500
    done = export("--push", NAME, "--debug")
    assert done.returncode == 5
    assert "failed (no, Bearer ***)" in last_line(done)
