"""rehead in a process of its own: a job a line comes in, its answer goes out.

The argument is {"model" (a folder), "threads"}. A job is {"prompt" (ids), "n_new"}, an answer {"tokens", "prefill",
"decode"}: greedy tokens, the seconds until the first of them, and those from there to the last. The first line that
goes out has the engine's name and version.
"""

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import torch

from rehead.checkpoint import load
from rehead.generation import stream
from rehead.model import LanguageModel


def answer(model: LanguageModel, prompt: list[int], n_new: int) -> dict[str, Any]:
    """Generate, with the time of each part."""
    begin = time.perf_counter()
    tokens = stream(model, [torch.tensor(prompt)], n_new, 0)
    new = [int(next(tokens))]
    first = time.perf_counter()
    new += [int(token) for token in tokens]
    return {"tokens": new, "prefill": first - begin, "decode": time.perf_counter() - first}


def main() -> None:
    """Answer until the input ends."""
    given = json.loads(sys.argv[1])
    torch.set_num_interop_threads(1)
    torch.set_num_threads(given["threads"])
    model = load(given["model"]).eval()
    print(json.dumps({"name": f"rehead {version('rehead')}"}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, **json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
