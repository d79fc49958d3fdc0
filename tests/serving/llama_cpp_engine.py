"""llama.cpp's server in a process of its own, in its own environment: a job a line comes in, its answer goes out.

A job is {"file", "prompts" (lists of ids), "max_tokens", "n_probs", "texts"}, an answer {"tokens", "logprobs", "texts"}:
greedy tokens after every prompt, the log-probabilities of the likeliest `n_probs` tokens at each of them by their ids,
and the ids of every text. The cache holds float32. llama.cpp's log goes to stderr.
"""

import json
import os
import sys
import urllib.request

import xllamacpp


def answer(file, prompts=(), max_tokens=24, n_probs=1, texts=()):
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx = 512
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.warmup = False
    params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, os.environ.get("FA", "LLAMA_FLASH_ATTN_TYPE_DISABLED"))
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)

    def ask(path, job):
        data = json.dumps(job).encode()
        request = urllib.request.Request(server.listening_address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=100) as reply:
            return json.load(reply)

    wanted = {"n_predict": max_tokens, "n_probs": n_probs, "temperature": 0, "samplers": ["temperature"]}
    found = {"tokens": [], "logprobs": [], "texts": []}
    for prompt in prompts:
        steps = ask("/completion", {"prompt": prompt, "cache_prompt": False, **wanted})
        steps = steps.get("completion_probabilities", [])
        found["tokens"].append([step["id"] for step in steps])
        found["logprobs"].append(
            [{one["id"]: one["logprob"] for one in step["top_logprobs"]} for step in steps]
        )
    for text in texts:
        found["texts"].append(ask("/tokenize", {"content": text, "add_special": False})["tokens"])
    return found


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
