"""llama.cpp's server in its own environment, as run_rehead.py is: jobs in, answers out, by the server's own clock.

The argument is {"model" (a GGUF file), "threads", "n_ctx", "exact"}: with `exact` the cache holds float32 and there is
no flash attention; else both are as llama.cpp chooses. It needs the standard library and xllamacpp.
"""

import json
import os
import sys
import urllib.request
from importlib.metadata import version
from typing import Any

import xllamacpp


def served(model: str, threads: int, n_ctx: int, exact: bool) -> xllamacpp.Server:
    """Start a server for one text at a time."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.n_gpu_layers = n_ctx, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    if exact:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(params)


def answer(server: xllamacpp.Server, prompt: list[int], n_new: int) -> dict[str, Any]:
    """Generate; the first token's time is the prompt's, as everywhere."""
    job = {
        "prompt": prompt,
        "n_predict": n_new,
        "temperature": 0,
        "samplers": ["temperature"],
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
    request = urllib.request.Request(server.listening_address + "/completion", json.dumps(job).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=600) as reply:
        found = json.load(reply)
    times = found["timings"]
    assert times["prompt_n"] == len(prompt), f"{times['prompt_n']} of {len(prompt)} tokens were read"
    return {
        "tokens": found["tokens"],
        "prefill": times["prompt_ms"] / 1000,
        "decode": times["predicted_ms"] / 1000,
    }


def main() -> None:
    """Answer until the input ends. llama.cpp's log goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    server = served(**json.loads(sys.argv[1]))
    build = version("xllamacpp").rpartition(".")[2]
    print(json.dumps({"name": f"llama.cpp b{build}"}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(server, **json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
