"""vLLM in a process of its own, in its own environment: a job a line comes in, its answer goes out.

A job is {"folder", "prompts" (lists of ids), "max_tokens", "dtype", "implementation", "custom_ops"}, an answer
{"architecture", "tokens", "logprobs"}: greedy tokens after every prompt and the log-probability
of each of its tokens but the first. vLLM's log goes to stderr.
"""

import gc
import json
import os
import sys

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory


def answer(folder, prompts, max_tokens, dtype, implementation, custom_ops):
    engine = LLM(
        folder,
        dtype=dtype,
        model_impl=implementation,
        attention_backend="CPU_MLA",  # on processors with AMX it would take a kernel for bfloat16 alone
        compilation_config={"custom_ops": custom_ops},
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_num_seqs=4,
    )
    greedy = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=0, detokenize=False
    )
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    done = engine.generate(asked, greedy, use_tqdm=False)
    return {
        "architecture": engine.model_config.architecture,
        "tokens": [list(one.outputs[0].token_ids) for one in done],
        "logprobs": [
            [
                found[token].logprob
                for token, found in zip(one.prompt_token_ids, one.prompt_logprobs, strict=True)
                if found
            ]
            for one in done
        ],
    }


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=answers, flush=True)
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
