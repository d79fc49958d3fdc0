"""The wheel and the sdist as PyPI would get them, installed where nothing else is: `make release-check`.

Each Python that the machine has (3.11, 3.12, 3.13 on the PATH, or the commands in PYTHONS) gets an environment
with the wheel alone; in it a user's commands run as typed, with a compiler, without one, and where the home
folder cannot be written. Nothing is uploaded.
"""

import email
import json
import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

import rehead

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.11", "3.12", "3.13")
TEXT = "O God, O God! How weary, stale, flat and unprofitable seem to me all the uses of this world!\n" * 30
MODEL = ["model.n_layer=1", "model.n_embd=24", "model.n_query_head=3", "model.n_kv_head=1", "model.rope=True"]
RUN = ["data.path=input.txt", "data.block_size=16", "trainer.max_iters=2", "trainer.batch_size=2"]
COMMANDS = [
    ["--version"],
    ["--help"],
    ["env"],
    ["train", *RUN, *MODEL, "model.shape=llama", "system.work_dir=run"],
    ["generate", "run", "--prompt", "O God", "--max-new-tokens", "9", "--temperature", "0"],
    ["eval", "run", "--data", "input.txt"],
    ["plan", "run"],
    ["convert", "run", "latent", "--to", "mla"],
    ["inspect", "latent", "--text", "O God"],
    ["export", "run", "stock"],
    ["eval", "stock", "--data", "input.txt"],
]


def pythons():
    """The Pythons to try, by version: the commands in PYTHONS, else those on the PATH that start."""
    named = os.environ.get("PYTHONS", "").split() or [f"python{version}" for version in VERSIONS]
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    answers = {
        command: subprocess.run([command, "-c", ask], capture_output=True, text=True, check=False)
        for command in named
        if shutil.which(command)
    }
    return {answer.stdout.strip(): command for command, answer in answers.items() if not answer.returncode}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel, built from the sdist, and the sdist."""
    out = tmp_path_factory.mktemp("dist")
    python = ROOT / ".venv" / "bin" / "python"
    subprocess.run([python, "-m", "build", "--outdir", out, ROOT], check=True, capture_output=True)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module", params=sorted(pythons()) or ["none"])
def installed(request, built, tmp_path_factory):
    """The folder of programs of an environment that has the wheel and what it asks for, nothing else."""
    if request.param == "none":
        pytest.fail(f"none of python{', python'.join(VERSIONS)} starts: name them, PYTHONS='python3.12 ...'")
    place = tmp_path_factory.mktemp(f"python{request.param}")
    subprocess.run([pythons()[request.param], "-m", "venv", place], check=True)
    pip = [place / "bin" / "python", "-m", "pip", "install", "--quiet", "--constraint"]
    subprocess.run([*pip, ROOT / "constraints.txt", built[0]], check=True)
    return place / "bin"


def tracked(*where):
    listed = subprocess.run(["git", "ls-files", *where], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.splitlines())


def test_one_version_everywhere(built):
    wheel, sdist = built
    assert wheel.name.startswith(f"rehead-{rehead.__version__}-py3-none-any")
    assert sdist.name == f"rehead-{rehead.__version__}.tar.gz"
    cited = re.search("^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited
    assert cited[1] == rehead.__version__
    newest = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert rehead.__version__ in newest[:2], "CHANGELOG.md has no section of this version"


def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == {name.removeprefix("src/") for name in tracked("src/rehead")}


def test_the_sdist_holds_what_is_tracked(built):
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert tracked() - names <= {".gitignore"}
    assert built[1].stat().st_size < 3_000_000
    assert names - tracked() == {"PKG-INFO"}, "files that git does not track: release from a clean tree"


def test_metadata_is_valid_and_the_page_has_no_dead_link(built):
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        raw = wheel.read(name)
    metadata = Metadata.from_email(raw, validate=True)
    assert metadata.project_urls
    assert {"Homepage", "Changelog", "Issues"} <= set(metadata.project_urls)
    page = email.message_from_bytes(raw).get_payload()
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) > 5
    assert not [link for link in links if not re.match("https://|#", link)]
    inside = [link.partition(f"/v{rehead.__version__}/")[2] for link in links if "/rehead/" in link]
    assert inside
    assert not [path for path in inside if not (ROOT / path.partition("#")[0]).exists()]


@pytest.mark.parametrize("where", ["a machine with a compiler", "no compiler", "a home that is read-only"])
def test_a_users_commands(installed, where, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "input.txt").write_text(TEXT)
    environment = {"HOME": str(home), "PATH": f"{installed}:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    if where == "no compiler":
        environment["PATH"] = str(installed)
    if where == "a home that is read-only":
        environment["HOME"] = str(
            tmp_path / "input.txt" / "home"
        )  # no folder can be made there, not even by root
    for words in COMMANDS:
        done = subprocess.run(
            [installed / "rehead", *words], cwd=tmp_path, env=environment, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (words, done.stderr)
        assert "bug in rehead" not in done.stderr
        assert "Traceback" not in done.stderr
    certificate = json.loads((tmp_path / "latent" / "conversion.json").read_text())
    assert certificate["exact"]
    assert list((home / ".cache" / "rehead" / "native").glob("*.so")) or where != "a machine with a compiler"


def test_the_library_alone(installed, tmp_path):
    code = """
import rehead, torch
from rehead.attention import GroupedConfig, RopeConfig
x = torch.randn(2, 5, 24)
attention = GroupedConfig(n_query_head=3, n_kv_head=1, head_dim=8, rope=RopeConfig()).build(d_model=24)
print(rehead.__version__, tuple(attention(x).shape))
"""
    done = subprocess.run(
        [installed / "python", "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split(" ", 1) == [rehead.__version__, "(2, 5, 24)\n"], done.stderr


def test_a_missing_extra_says_what_to_type(installed, tmp_path):
    done = subprocess.run(
        [installed / "rehead", "study", "--preset", "grid"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert 'pip install "rehead[report]"' in done.stderr
    assert not list(tmp_path.iterdir())
