"""Time and peak memory of converting and exporting a checkpoint that is never in memory as a whole.

    python benchmarks/larger_than_memory.py FOLDER [--layers 16]

Makes a random Llama of the 1B shape (bfloat16, sharded, 2.5 GB) in FOLDER, turns its GQA into MQA and writes
that as LlamaForCausalLM, each in a process of its own; prints what each took.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from rehead.attention import GroupedConfig, RopeConfig, scalings
from rehead.checkpoint import families, publish
from rehead.checkpoint.files.deferred import Deferred
from rehead.checkpoint.files.writing import write_weights
from rehead.config import GPTConfig
from rehead.model import skeleton

SHARD = 10**9
BASE = 300 * 10**6
RUN = """
import sys
from pathlib import Path
from rehead.cli import main
code = main(sys.argv[1:])
lines = Path("/proc/self/status").read_text().splitlines()
print(code, next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))
"""
"""Not ru_maxrss, which begins with that of the process it was forked from."""


def llama(n_layer: int) -> GPTConfig:
    """Llama 3.2's 1B."""
    scaling = scalings["llama3"](
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    layer = GroupedConfig(
        n_query_head=32, n_kv_head=8, head_dim=64, rope=RopeConfig(theta=500_000.0, scaling=scaling)
    )
    return GPTConfig(
        vocab_size=128_256,
        block_size=131_072,
        n_embd=2048,
        attention=(layer,) * n_layer,
        learned_positions=False,
        norm="rmsnorm",
        norm_eps=1e-5,
        mlp="swiglu",
        n_hidden=8192,
        mlp_bias=False,
        tie_embeddings=True,
    )


def make(folder: Path, config: GPTConfig) -> int:
    """Write random weights under Hugging Face's names; returns the bytes of the largest tensor."""
    shapes = {name: weight.shape for name, weight in skeleton(config).state_dict().items()}
    family = families["llama"]

    def drawn(name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
        if "norm" in name:
            return torch.ones(shapes[name], dtype=torch.bfloat16)
        return (0.02 * torch.randn(shapes[name], generator=generator)).bfloat16()

    weights = {
        weight.theirs: Deferred(
            lambda name=weight.ours[0]: drawn(name), shapes[weight.ours[0]], torch.bfloat16
        )
        for weight in family.weights(config)
    }
    with publish(folder) as aside:
        write_weights(aside, weights, SHARD)
        table = family.write(config) | {"dtype": "bfloat16"}
        (aside / "config.json").write_text(json.dumps(table))
    return max(weight.numel() * weight.dtype.itemsize for weight in weights.values())


def measured(*arguments: str) -> dict[str, float]:
    """Wall time and peak resident memory of one command."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    code, peak = map(int, done.stdout.split()[-2:])
    if code:
        raise SystemExit(f"rehead {' '.join(arguments)} failed: {code}")
    return {"seconds": time.perf_counter() - begin, "peak_rss_bytes": peak}


def main() -> None:
    """Make, convert, export, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    options = parser.parse_args()
    source, mqa, stock = (str(options.folder / name) for name in ("llama", "mqa", "export"))
    largest = make(Path(source), llama(options.layers))
    size = sum(file.stat().st_size for file in Path(source).glob("*.safetensors"))
    bound = 3 * largest + BASE
    print(f"source {size:,} bytes, largest tensor {largest:,}, bound {bound:,}")
    for arguments in (
        ("convert", source, mqa, "--to", "mqa", "--allow-loss"),
        ("export", mqa, stock, "--format", "llama"),
    ):
        found = measured(*arguments)
        print(
            f"rehead {arguments[0]:8} {found['seconds']:7.1f} s, peak {found['peak_rss_bytes']:,.0f} bytes, "
            f"{found['peak_rss_bytes'] / bound:.2f} of the bound"
        )


if __name__ == "__main__":
    main()
