"""Runs lm-evaluation-harness with a model's adapter, ours or its own, without a network.

`python harness_numbers.py rehead|hf LENGTH FOLDER TASK ...` prints the results and the answer to every request.
"""

import json
import socket
import sys

import lm_eval
import torch


def refuse(*_, **__):
    raise OSError("the network is blocked in this test")


def adapter(kind, folder, length):
    if kind == "hf":
        from lm_eval.models.huggingface import HFLM

        return HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=3, max_length=length)
    from rehead.measure.harness import Scored, language_model
    from rehead.tokenizer import open_model

    return language_model(Scored(opened=open_model(folder), length=length, batch_size=3))


def main(kind, length, folder, *tasks):
    socket.socket.connect = socket.getaddrinfo = refuse
    torch.set_num_threads(1)
    found = lm_eval.simple_evaluate(
        model=adapter(kind, folder, int(length)), tasks=list(tasks), log_samples=True, bootstrap_iters=0,
        task_manager=lm_eval.tasks.TaskManager(include_defaults=False),
    )  # fmt: skip
    answers = {task: [one["resps"] for one in samples] for task, samples in found["samples"].items()}
    print(json.dumps({"results": found["results"], "answers": answers}, default=float))


if __name__ == "__main__":
    main(*sys.argv[1:])
