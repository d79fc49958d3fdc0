"""Runs lm-evaluation-harness with a model's adapter, ours or its own, without a network.

`python harness_numbers.py rehead|hf LENGTH FOLDER,... TASK ...` prints results and the answer to every request. Its own
adapter keeps no logits between requests: with them, 0.4.13 misplaces continuations of different lengths after which a
model has read the same.
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

        return HFLM(
            pretrained=folder,
            device="cpu",
            dtype="float32",
            batch_size=3,
            max_length=length,
            logits_cache=False,
        )
    from rehead.measure.harness import Scored, language_model
    from rehead.tokenizer import open_model

    return language_model(Scored(opened=open_model(folder), length=length, batch_size=3))


def answered(kind, folder, length, tasks):
    found = lm_eval.simple_evaluate(
        model=adapter(kind, folder, length), tasks=tasks, log_samples=True, bootstrap_iters=0,
        task_manager=lm_eval.tasks.TaskManager(include_defaults=False),
    )  # fmt: skip
    answers = {task: [one["resps"] for one in samples] for task, samples in found["samples"].items()}
    return {"results": found["results"], "answers": answers}


def main(kind, length, folders, *tasks):
    socket.socket.connect = socket.getaddrinfo = refuse
    torch.set_num_threads(1)
    found = [answered(kind, folder, int(length), list(tasks)) for folder in folders.split(",")]
    print(json.dumps(found, default=float))


if __name__ == "__main__":
    main(*sys.argv[1:])
