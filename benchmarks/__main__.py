"""How fast rehead is beside others: `make bench`, `make bench-gpu`.

    python benchmarks [GROUP ...] [--threads 1 2] [--rounds 15] [--peers FOLDER] [--device cuda]

Groups are the files of this folder that `page.TITLES` names; each has `cases`. `--peers` is a folder with
checkouts of repositories that are no packages (minGPT, nanoGPT); without it they are reported as absent. So are
llama.cpp and vLLM (group `engines`) where `make llama-cpp-env` and `make serving-env` have not put them. Results
replace those of the same group, device and threads in docs/benchmarks.json, from which docs/benchmarks.md is
written.
"""

import argparse
import importlib
import json
import shlex
import sys
import time
from pathlib import Path

import torch
from harness import Setting
from page import TITLES, page, row

from rehead import native
from rehead.measure.environment import environment

HERE = Path(__file__).parent
GROUPS = [name for name in TITLES if (HERE / f"{name}.py").exists()]
DOCS = HERE.parent / "docs"


def main() -> None:
    """Measure, and write the results down after every case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; all by default")
    parser.add_argument("--only", default="", help="cases whose name has this in it; nothing is written")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peers", type=Path, help="folder with checkouts of minGPT and nanoGPT")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--results", type=Path, default=DOCS / "benchmarks.json")
    given = parser.parse_args()
    unknown = set(given.groups) - set(GROUPS)
    if unknown:
        parser.error(f"no group {', '.join(unknown)}: there are {', '.join(GROUPS)}")
    native.use("gpu" if given.device == "cuda" else "1")
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here: nothing measured, docs/benchmarks.md stays as it is")
    torch.set_num_interop_threads(1)
    command = shlex.join(["python", "benchmarks", *sys.argv[1:]])
    for name in given.groups or GROUPS:
        for threads in given.threads if given.device == "cpu" else [1]:
            torch.set_num_threads(threads)
            setting = Setting(given.device, threads, given.rounds, given.peers)
            done = []
            torch.manual_seed(0)  # of the first case, made before the loop's
            for case in importlib.import_module(name).cases(setting):
                if given.only not in case.name:
                    continue
                torch.manual_seed(0)
                print(f"{name}, {threads} threads: {case.name}", flush=True)
                done.append(case.measure(setting))
                print(row(done[-1]), flush=True)
                if not given.only:
                    run = {
                        "group": name,
                        "device": given.device,
                        "threads": threads,
                        "date": time.strftime("%Y-%m-%d"),
                        "command": command,
                        "environment": environment(),
                        "cases": done,
                    }
                    write(given.results, run)


def write(results: Path, run: dict) -> None:
    """Put one group's results in the place of its earlier ones; write the page anew."""
    key = ("group", "device", "threads")
    before = json.loads(results.read_text()) if results.exists() else []
    kept = [old for old in before if [old[name] for name in key] != [run[name] for name in key]]
    runs = sorted([*kept, run], key=lambda one: (GROUPS.index(one["group"]), one["device"], one["threads"]))
    results.write_text(json.dumps(runs, indent=1) + "\n")
    results.with_suffix(".md").write_text(page(runs))


if __name__ == "__main__":
    main()
