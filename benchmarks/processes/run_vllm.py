"""vLLM's CPU build in its own environment, as run_rehead.py is: jobs in, answers out.

The argument is {"model" (a Hugging Face folder), "dtype", "n_ctx"}; threads are OMP_NUM_THREADS. The engine is stepped
here, one token a step, so that the time of the first token is known.
"""

import json
import os
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams, __version__


def answer(engine: LLM, number: int, prompt: list[int], n_new: int) -> dict[str, Any]:
    """Generate, with the time of each part."""
    greedy = SamplingParams(temperature=0, max_tokens=n_new, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    engine.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, greedy)
    first, tokens = None, []
    while engine.llm_engine.has_unfinished_requests():
        for output in engine.llm_engine.step():
            tokens = list(output.outputs[0].token_ids)
        first = time.perf_counter() if first is None and tokens else first
    assert first is not None
    return {"tokens": tokens, "prefill": first - begin, "decode": time.perf_counter() - first}


def main() -> None:
    """Answer until the input ends. vLLM's log goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    given = json.loads(sys.argv[1])
    engine = LLM(
        given["model"],
        dtype=given["dtype"],
        max_model_len=given["n_ctx"],
        max_num_seqs=1,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        async_scheduling=False,
    )
    print(json.dumps({"name": f"vLLM {__version__}"}), file=out, flush=True)
    for number, line in enumerate(sys.stdin):
        print(json.dumps(answer(engine, number, **json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
