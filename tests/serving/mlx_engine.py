"""mlx-lm in its own environment: jobs come in on stdin, one a line, answers go out on stdout.

A job is {"folder", "prompts" (lists of ids), "max_tokens", "dtype", "quantize"}, an answer {"tokens", "logits",
"cache", "quantized"}, or {"error"} if the folder does not load or compute. For each prompt: the greedy tokens of
mlx-lm's own loop; the logits after every token of the prompt (read at once) and of what was written (token by token);
and the bytes of that loop's prompt cache: {"used", "held"}. With "quantize", weights have that many bits, as
`mlx_lm.convert --quantize` gives them; "quantized" counts the layers that do.
"""

import json
import os
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model, quantize_model

mx.set_default_device(mx.cpu)


def load(folder, dtype, quantize):
    """The model as `mlx_lm.convert` makes it from a folder, in memory."""
    model, config = load_model(Path(folder))
    if dtype != "float32":
        model.set_dtype(getattr(mx, dtype))
    if quantize:
        model, _ = quantize_model(model, config, None, quantize)
    return model


def write(model, prompt, max_tokens):
    """What mlx-lm writes, and its cache, which has read all of it: it computes a token ahead."""
    cache = make_prompt_cache(model)
    if max_tokens == 0:
        return [], []
    steps = generate_step(mx.array(prompt), model, max_tokens=max_tokens, prompt_cache=cache)
    return [token for token, _ in steps], cache


def read(model, tokens, n_prompt):
    """The logits after every token: those of a prompt at once, the others one by one, as in decoding."""
    cache = make_prompt_cache(model)
    logits = model(mx.array([tokens[:n_prompt]]), cache=cache)[0].astype(mx.float32).tolist()
    for token in tokens[n_prompt:]:
        logits += model(mx.array([[token]]), cache=cache)[0].astype(mx.float32).tolist()
    return logits


def answer(folder, prompts, max_tokens=24, dtype="float32", quantize=None):
    model = load(folder, dtype, quantize)
    found = {"tokens": [], "logits": [], "cache": []}
    for prompt in prompts:
        tokens, cache = write(model, prompt, max_tokens)
        found["tokens"].append(tokens)
        found["logits"].append(read(model, [*prompt, *tokens[:-1]], len(prompt)))
        found["cache"].append(
            {
                "used": sum(
                    part[..., : layer.size(), :].nbytes
                    for layer in cache
                    for part in (layer.keys, layer.values)
                ),
                "held": sum(layer.nbytes for layer in cache),
            }
        )
    found["quantized"] = sum(hasattr(module, "bits") for _, module in model.named_modules())
    return found


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            try:
                found = answer(**json.loads(line))
            except Exception as error:  # it does not load, or compute
                found = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(found), file=out, flush=True)
