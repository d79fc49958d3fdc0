"""A study small enough to run in a second, with every kind of variant in it."""

from pathlib import Path

import pytest
import torch

LINE = "O God, O God! How weary, stale, flat and unprofitable\n"
TINY = """
about: Tiny models.
run:
  system: {seed: [3, 4]}
  data: {path: input.txt, block_size: 16}
  model: {n_layer: 2, n_query_head: 2, n_embd: 12}
  trainer: {max_iters: 4, batch_size: 3, eval_every: 2, eval_batches: 1, save_every: 1, sample_every: 0, keep: 1}
variants:
  Two heads: {}
  One head: {model: {n_kv_head: 1}}
  Longer: {from: Two heads, data: {block_size: 24}, trainer: {max_iters: 3}}
  Latent: {from: Two heads, convert: {to: mla, kv_fraction: 0.25}}
  Healed: {from: Latent, heal: true, trainer: {max_iters: 2}}
questions:
  - ask: Do fewer heads cost anything?
    of: [Two heads, One head]
    show: [loss, memory, speed]
  - ask: Which one?
    show: [frontier]
prompt: "O God"
new_tokens: 5
"""


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with the preset tiny.yaml and a text."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "input.txt").write_text(LINE * 40)
    (folder / "tiny.yaml").write_text(TINY)
    return folder


@pytest.fixture
def here(place, monkeypatch):
    """That folder as the current one, in float32."""
    monkeypatch.chdir(place)
    torch.set_default_dtype(torch.float32)
    return Path()
