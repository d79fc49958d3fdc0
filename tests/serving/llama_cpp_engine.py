"""llama.cpp's server in its own environment: a job comes in on stdin, its answer goes out on stdout.

A job is {"file", "prompts" (lists of ids), "max_tokens", "n_probs", "texts", "special", "flash_attention"}, an answer
{"tokens", "logprobs", "texts"}: greedy tokens after every prompt, the log-probabilities of the likeliest `n_probs`
tokens at each of them by their ids, and the ids of every text. The cache holds float32. llama.cpp's log goes to stderr.
"""

import json
import os
import sys
import urllib.request

import xllamacpp

KEPT = []
"""Servers whose destructors do not run: one waits for ever for a loop that has not begun when it is told to end."""


def answer(file, prompts=(), max_tokens=24, n_probs=1, texts=(), special=False, flash_attention=False):
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx = 512
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.warmup = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    kinds = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = (
        kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash_attention else kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    server = xllamacpp.Server(params)
    KEPT.append(server)

    def ask(path, **job):
        request = urllib.request.Request(server.listening_address + path, json.dumps(job).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=100) as reply:
            return json.load(reply)

    wanted = {"n_predict": max_tokens, "n_probs": n_probs, "temperature": 0, "samplers": ["temperature"]}
    found = {"tokens": [], "logprobs": [], "texts": []}
    for prompt in prompts:
        steps = ask("/completion", prompt=prompt, cache_prompt=False, **wanted)["completion_probabilities"]
        found["tokens"].append([step["id"] for step in steps])
        found["logprobs"].append(
            [{one["id"]: one["logprob"] for one in step["top_logprobs"]} for step in steps]
        )
    for text in texts:
        found["texts"].append(
            ask("/tokenize", content=text, add_special=special, parse_special=special)["tokens"]
        )
    return found


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        json.dump(answer(**json.load(sys.stdin)), out)
    os._exit(0)
