"""A model whose weights stay in their files computes what it computes in memory."""

import copy
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import rehead
from rehead.attention import GroupedConfig
from rehead.checkpoint.files.deferred import Deferred, map_deferred, materialise
from rehead.checkpoint.files.shards import Shards
from rehead.checkpoint.files.writing import write_file, write_weights
from rehead.errors import IntegrityError, UsageError
from rehead.measure.fidelity import compare
from rehead.model import build
from small import llama_shaped


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    layer = GroupedConfig(n_query_head=6, n_kv_head=3, head_dim=4, rope=True, qkv_bias=True)
    config = llama_shaped(
        layer, layer, vocab_size=31, block_size=13, n_embd=20, n_hidden=28, tie_embeddings=True
    )
    rehead.save(build(config).double(), tmp_path / "model")
    return tmp_path / "model"


def test_the_same_function(folder):
    inside, outside = rehead.load(folder), rehead.checkpoint.load(folder, in_memory=False)
    assert all(isinstance(weight, Deferred) for weight in outside.parameters())
    ids = torch.randint(31, (5, 11))
    assert torch.allclose(outside(ids), inside(ids), rtol=0, atol=1e-13)
    assert outside.head.weight is outside.embed_tokens.weight
    for name, weight in inside.state_dict().items():
        assert torch.equal(materialise(outside.state_dict()[name]), weight)


UNNEEDED = """
import sys
import rehead
rehead.save(rehead.checkpoint.load("model", in_memory=False), "copy")
print(*sorted({"sympy", "torch.distributed.tensor"} & set(sys.modules)))
"""


@pytest.mark.process
def test_what_is_read_and_written_waits_for_no_module_that_nothing_uses(folder):
    """PyTorch's first operation on a tensor of a class like this one imports both, in most of a second."""
    program = [sys.executable, "-c", UNNEEDED]
    done = subprocess.run(program, cwd=folder.parent, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "\n"


def test_read_at_every_use_and_not_kept():
    calls = []

    def make():
        calls.append(1)
        return torch.arange(6.0).view(2, 3)

    weight = Deferred(make, (2, 3), torch.float64)
    assert weight.shape == (2, 3)
    assert weight.detach().dtype == torch.float64
    assert not calls
    assert (weight @ torch.ones(3)).tolist() == [3, 12]
    assert len(calls) == 1
    turned = map_deferred(lambda one, other: torch.cat([one, other]).T.float(), weight, torch.ones(1, 3))
    assert isinstance(turned, Deferred)
    assert turned.shape == (3, 3)
    assert turned.dtype == torch.float32
    assert len(calls) == 1
    assert materialise(turned).tolist() == [[0, 3, 1], [1, 4, 1], [2, 5, 1]]
    calls.clear()
    other = copy.deepcopy(turned)
    assert not calls
    assert other is not turned
    assert torch.equal(materialise(other), materialise(turned))
    assert not isinstance(map_deferred(torch.neg, torch.ones(2)), Deferred)


def test_moved_and_cast_afterwards(folder):
    """As a module does it: by putting other data into its parameters."""
    inside, outside = rehead.load(folder), rehead.checkpoint.load(folder, in_memory=False)
    ids = torch.arange(7)[None]
    outside.to(torch.float32)
    assert all(isinstance(weight, Deferred) for weight in outside.parameters())
    assert torch.equal(outside(ids), inside.to(torch.float32)(ids))
    copied = copy.deepcopy(outside).half()
    assert copied.head.weight is copied.embed_tokens.weight
    assert all(isinstance(weight, torch.nn.Parameter) for weight in copied.parameters())
    assert materialise(copied.head.weight).dtype == torch.float16
    assert materialise(outside.head.weight).dtype == torch.float32
    assert outside.to("meta")(ids.to("meta")).is_meta
    assert materialise(outside.head.weight).is_meta
    back = outside.head.weight.cpu()
    assert isinstance(back, Deferred)
    assert torch.equal(materialise(back), inside.head.weight)


def test_files_stay_readable_when_their_folder_goes(folder):
    """A run drops its older checkpoints while one of them is being converted."""
    import shutil

    outside, ids = rehead.checkpoint.load(folder, in_memory=False), torch.arange(7)[None]
    before = outside(ids)
    shutil.rmtree(folder)
    assert torch.equal(outside(ids), before)


def test_a_file_cut_short_meanwhile(folder):
    outside = rehead.checkpoint.load(folder, in_memory=False)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(IntegrityError, match="cut short"):
        outside(torch.arange(7)[None])


def some_weights():
    torch.manual_seed(1)
    return {
        "b": torch.randn(3, 5),
        "a.weight": torch.randn(7).bfloat16(),
        "c": torch.randn(2, 2, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(2.5),
        "half": torch.randn(4, 3).half().T,
    }


def test_files_are_those_of_safetensors(tmp_path):
    weights = some_weights()
    save_file({k: v.contiguous() for k, v in weights.items()}, tmp_path / "theirs", metadata={"format": "pt"})
    write_file(tmp_path / "ours", weights)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize(("most_bytes", "n_file"), [(10**6, 1), (60, 3), (1, 6)])
def test_sharded_and_read_again(most_bytes, n_file, tmp_path):
    weights = some_weights()
    write_weights(tmp_path, weights, most_bytes)
    assert len(list(tmp_path.glob("*.safetensors"))) == n_file
    assert (tmp_path / "model.safetensors.index.json").exists() == (n_file > 1)
    shards = Shards(tmp_path)
    assert shards.entries.keys() == weights.keys()
    for name, weight in weights.items():
        again = shards.read(name)
        assert again.dtype == weight.dtype
        assert torch.equal(again, weight)


def step(model, **more):
    model(torch.randint(31, (2, 5))).sum().backward()
    torch.optim.AdamW(model.parameters(), **more).step()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.load_state_dict({name: 0 * one for name, one in model.state_dict().items()}),
        step,
        lambda model: torch.nn.init.zeros_(model.head.weight),
        lambda model: model.head.weight.data.mul_(2),
        lambda model: step(model, foreach=True),
        lambda model: torch.zeros(31, 20, out=model.head.weight.data),
    ],
)
def test_weights_in_files_are_not_changed(folder, change):
    """Not without a word: the change would be made to values that are dropped."""
    model = rehead.checkpoint.load(folder, in_memory=False)
    with pytest.raises((UsageError, RuntimeError), match="are in files, and cannot be changed: load it with"):
        change(model)


def test_weights_in_files_are_read_into_others(folder):
    outside, inside = rehead.checkpoint.load(folder, in_memory=False), rehead.load(folder)
    wanted = {name: weight.clone() for name, weight in inside.state_dict().items()}
    for weight in inside.parameters():
        weight.data.zero_()
    inside.load_state_dict(outside.state_dict())
    assert all(torch.equal(weight, wanted[name]) for name, weight in inside.state_dict().items())


def test_models_are_compared_with_one_reading_of_each_head_per_batch(folder, monkeypatch):
    """Not with one per part of the vocabulary, which of a large one has a hundred tokens."""
    models = tuple(rehead.checkpoint.load(folder, in_memory=False) for _ in range(2))
    vocab, read, heads = models[0].config.vocab_size, Shards.read, []
    monkeypatch.setattr("rehead.measure.logits.LOGITS", 2 * vocab)
    monkeypatch.setattr(Shards, "read", lambda shards, name: (heads.append(name), read(shards, name))[1])
    ids = torch.arange(13) % vocab
    found = compare(*models, [(ids[None, :-1], ids[None, 1:])] * 3)
    assert (found.tokens, found.max_error) == (36, 0)
    assert heads.count("embed_tokens.weight") == 2 * 3 * 2  # the head's, too
