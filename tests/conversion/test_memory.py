"""Converting and exporting take the memory of a few tensors, not of a model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers as hf
import torch

from rehead.attention import GroupedConfig
from rehead.checkpoint import families, publish
from rehead.checkpoint.files.deferred import Deferred
from rehead.checkpoint.files.writing import write_weights
from rehead.model import skeleton
from small import llama_shaped

WIDTH, N_LAYER, N_TOKEN = 768, 38, 32_768
BASE = 300 * 10**6
TOKENS = 1000
ACTIVATIONS = TOKENS * 16 * WIDTH * 4
"""Bytes of what one layer computes for the text and its gradients."""
COMMANDS = {
    "convert": "convert --to mqa --method mean --allow-loss",
    "calibrated": "convert --to mla --kv-fraction 0.5 --calibration {text} --teach 2 --allow-loss",
    "export": "export --format llama",
}
RUN = """
import sys
from pathlib import Path
from rehead.cli import main
code = main(sys.argv[1:])
lines = Path("/proc/self/status").read_text().splitlines()
print(code, next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))
"""
"""Not ru_maxrss, which begins with that of the process it was forked from."""


pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here"),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder of 0.9 GB in float32 whose largest tensors have 100 MB."""
    layer = GroupedConfig(n_query_head=12, n_kv_head=2, head_dim=64, rope=True)
    sizes = {"vocab_size": N_TOKEN, "block_size": 16, "n_embd": WIDTH, "n_hidden": 2 * WIDTH}
    config = llama_shaped(*[layer] * N_LAYER, **sizes)
    shapes = {name: weight.shape for name, weight in skeleton(config).state_dict().items()}

    noise = torch.randn(10_007, dtype=torch.float32) / WIDTH**0.5

    def drawn(shape):
        """The noise again and again, which is faster than drawing all."""
        start = int(torch.randint(len(noise), ()))
        return noise.roll(start).repeat(-(-shape.numel() // len(noise)))[: shape.numel()].view(shape)

    folder = tmp_path_factory.mktemp("large") / "llama"
    weights = {
        weight.theirs: Deferred(
            lambda shape=shapes[weight.ours[0]]: drawn(shape), shapes[weight.ours[0]], torch.float32
        )
        for weight in families["llama"].weights(config)
    }
    words = {f"t{token}": token for token in range(N_TOKEN)}
    tokenizer = hf.Tokenizer(hf.models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.WhitespaceSplit()
    with publish(folder) as aside:
        write_weights(aside, weights, 200 * 10**6)
        (aside / "config.json").write_text(json.dumps(families["llama"].write(config)))
        (aside / "tokenizer.json").write_text(tokenizer.to_str())
    return folder, max(shape.numel() * 4 for shape in shapes.values())


def whole_of(folder):
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.timeout(600)  # reads a gigabyte a few times, on a machine that may be busy
@pytest.mark.parametrize(
    "command",
    [name if name == "export" else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS],
)
def test_peak_memory(command, llama, tmp_path):
    folder, largest = llama
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"t{7 * token % N_TOKEN}" for token in range(TOKENS)))
    command, *options = COMMANDS[command].format(text=text).split()
    layers = (whole_of(folder) - 2 * largest) // N_LAYER * 2
    extra = layers + ACTIVATIONS if "--calibration" in options else 0
    done = subprocess.run(
        [sys.executable, "-c", RUN, command, folder, tmp_path / "new", *options],
        capture_output=True,
        text=True,
        check=True,
    )
    code, peak = map(int, done.stdout.split()[-2:])
    assert code == 0, done.stderr
    assert whole_of(folder) > 1.4 * (3 * largest + BASE)  # or it would show nothing
    assert peak <= 3 * largest + BASE + extra, f"{peak / 1e6:.0f} MB for tensors of {largest / 1e6:.0f} MB"
