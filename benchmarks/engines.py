"""Decoding and prefill beside engines that people serve with: llama.cpp, and vLLM's CPU build.

Every engine, rehead too, runs in a process of its own with the same weights, llama.cpp and vLLM in the environments of
`make llama-cpp-env` and `make serving-env`. A time is the engine's own, measured in its process, without the way there.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

import tokenizers
import torch
import transformers
from harness import Arm, Case, Cases, Setting
from torch import Tensor

from rehead.checkpoint import load
from rehead.conversion.export.gguf import export_gguf
from rehead.measure.size import decode_bytes, prefill_flops
from rehead.model import LanguageModel

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048,
}  # fmt: skip
"""Of SmolLM2-135M."""
N_PROMPT, N_NEW, N_PREFILL, N_CONTEXT = 128, 128, 512, 1024
EXACT, AS_IT_COMES = "cache in float32, no flash attention", "as it comes"
AHEAD = 1.0
ROUNDING = 2**-5
"""How far the logit of an engine's token may be below the likeliest's, as a share; 0 in float32, cache included."""
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
MISSING = "not run: its environment is not there (make {})"


@dataclass(frozen=True)
class Engine:
    """An engine that has started: its process, name and version, and what it answers."""

    name: str
    pid: int
    ask: Callable[..., dict[str, Any]]


def cases(setting: Setting, sizes: dict[str, int] = SIZES) -> Cases:
    """Both formats of the weights, decoding and prefill. There is nothing for a GPU."""
    if setting.device != "cpu":
        return
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory() as place, ExitStack() as running:
            folder, file = write(Path(place), sizes, dtype)
            ours, peers = start(running, setting, folder, file, dtype)
            model = load(folder).float().eval()
            ids = torch.randint(sizes["vocab_size"], (N_PREFILL,)).tolist()
            arms = Arms(model, dtype, ids)
            yield from arms.cases(ours, peers)


def write(place: Path, sizes: dict[str, int], dtype: torch.dtype) -> tuple[Path, Path]:
    """Write a Llama with random weights as a Hugging Face folder and as a file for llama.cpp."""
    spread = (
        sizes["hidden_size"] ** -0.5
    )  # with transformers' 0.02 a random model repeats its last token for ever
    config = transformers.LlamaConfig(
        **sizes, tie_word_embeddings=True, initializer_range=spread, bos_token_id=0, eos_token_id=0
    )
    folder, file = place / "model", place / "model.gguf"
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    vocabulary(sizes["vocab_size"]).save(str(folder / "tokenizer.json"))
    export_gguf(folder, file)
    return folder, file


def vocabulary(n_token: int) -> tokenizers.Tokenizer:
    """Return a byte-level BPE of so many tokens, the most of them pairs of letters: llama.cpp needs one to start."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in letters for b in letters][: max(0, n_token - len(letters) - 1)]
    tokens = ["<|end|>", *letters, *(a + b for a, b in pairs)]
    model = tokenizers.models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs)
    found = tokenizers.Tokenizer(model)
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    found.decoder = tokenizers.decoders.ByteLevel()
    found.add_special_tokens(["<|end|>"])
    return found


def start(
    running: ExitStack, setting: Setting, folder: Path, file: Path, dtype: torch.dtype
) -> tuple[Engine, dict[str, Engine | str]]:
    """Start every engine that is there; the reason in place of one that is not."""
    of_llama, of_vllm = environment("llama-cpp"), environment("vllm")
    threads = {"threads": setting.threads}

    def begin(python: Path | str, script: str, given: dict[str, Any]) -> Engine:
        return running.enter_context(engine(python, script, given, setting.threads))

    ours = begin(sys.executable, "run_rehead.py", {"model": str(folder), **threads})
    peers: dict[str, Engine | str] = {}
    for how in (EXACT, AS_IT_COMES):
        given = {"model": str(file), **threads, "n_ctx": N_CONTEXT, "exact": how == EXACT}
        peer = None if of_llama is None else begin(of_llama, "run_llama_cpp.py", given)
        name = "llama.cpp" if peer is None else peer.name
        peers[f"{name}, {how}"] = MISSING.format("llama-cpp-env") if peer is None else peer
    if of_vllm is None:
        peers["vLLM, CPU"] = MISSING.format("serving-env")
    else:
        peer = begin(
            of_vllm, "run_vllm.py", {"model": str(folder), "dtype": DTYPES[dtype], "n_ctx": N_CONTEXT}
        )
        peers[f"{peer.name}, CPU"] = peer
    return ours, peers


def environment(name: str) -> Path | None:
    """Return the Python of an engine's environment, if that has been made."""
    file = HERE.parent / "tests" / "serving" / "environment.py"
    spec = importlib.util.spec_from_file_location("environment", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    place: Path = module.place(name)
    python = place / "bin" / "python"
    return python if (place / "finished").exists() and python.exists() else None


@contextmanager
def engine(python: Path | str, script: str, given: dict[str, Any], threads: int) -> Iterator[Engine]:
    """A process that answers by lines and ends with the block; what it logs is shown if it dies."""
    settings = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    settings.pop("PYTHONPATH", None)
    command = [str(python), str(HERE / "processes" / script), json.dumps(given)]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=log, text=True, env=settings) as process,
    ):
        talk, listen = process.stdin, process.stdout
        assert talk is not None
        assert listen is not None

        def hear() -> dict[str, Any]:
            line = listen.readline()
            if not line:
                log.seek(0)
                raise RuntimeError(f"{script} ended:\n{log.read()[-3000:]}")
            return dict(json.loads(line))

        def ask(**job: Any) -> dict[str, Any]:
            print(json.dumps(job), file=talk, flush=True)
            return hear()

        try:
            yield Engine(hear()["name"], process.pid, ask)
        finally:
            talk.close()
            process.terminate()


class Arms:
    """The cases of one model. An engine's tokens are judged by the exact logits of `model` on that engine's text."""

    def __init__(self, model: LanguageModel, dtype: torch.dtype, ids: Sequence[int]) -> None:
        self.model, self.dtype, self.ids = model, dtype, list(ids)

    def cases(self, ours: Engine, peers: dict[str, Engine | str]) -> Iterator[Case]:
        """Decoding after a short prompt, then a longer prompt."""
        config = self.model.config
        steps = range(N_PROMPT + 1, N_PROMPT + N_NEW + 1)
        common: dict[str, Any] = {
            "dtype": self.dtype,
            "tolerance": ROUNDING,
            "at_least": dict.fromkeys(peers, AHEAD),
        }
        yield Case(
            name=f"135M Llama, {N_NEW} tokens after {N_PROMPT}",
            ours=self.arm(ours, "decode", N_PROMPT, N_NEW + 1),
            peers=self.arms(peers, "decode", N_PROMPT, N_NEW + 1),
            n_bytes=sum(decode_bytes(config, n, dtype=self.dtype) for n in steps),
            **common,
        )
        yield Case(
            name=f"135M Llama, prefill of {N_PREFILL}",
            ours=self.arm(ours, "prefill", N_PREFILL, 1),
            peers=self.arms(peers, "prefill", N_PREFILL, 1),
            flops=prefill_flops(config, N_PREFILL),
            **common,
        )

    def arms(
        self, peers: dict[str, Engine | str], part: str, n_prompt: int, n_new: int
    ) -> dict[str, Arm | str]:
        """The peers' ways; an absent peer's reason."""
        return {
            name: peer
            if isinstance(peer, str)
            else self.arm(peer, part, n_prompt, n_new, strict=EXACT in name)
            for name, peer in peers.items()
        }

    def arm(self, one: Engine, part: str, n_prompt: int, n_new: int, strict: bool = True) -> Arm:
        """One engine, timed by itself: `part` of what it answers is the time that counts."""
        prompt = self.ids[:n_prompt]

        def run() -> float:
            return float(one.ask(prompt=prompt, n_new=n_new)[part])

        def result() -> Tensor:
            tokens = one.ask(prompt=prompt, n_new=n_new)["tokens"]
            assert len(tokens) == n_new, f"{one.name} gave {len(tokens)} tokens, not {n_new}"
            likely = self.likelihood(prompt, tokens)
            if strict and self.dtype == torch.float32:
                assert bool((likely == 1).all()), f"{one.name} has other greedy tokens"
            return likely

        return Arm(run, result, pid=one.pid)

    @torch.no_grad()
    def likelihood(self, prompt: list[int], tokens: list[int]) -> Tensor:
        """Return the logit of every token over that of the likeliest there, (N,): 1 where it is that."""
        whole = torch.tensor([[*prompt, *tokens[:-1]]])
        logits = self.model(whole)[0, len(prompt) - 1 :]
        return logits.gather(1, torch.tensor(tokens)[:, None])[:, 0] / logits.amax(-1)
