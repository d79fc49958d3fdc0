"""The library as a newcomer types it."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

import rehead
from rehead.attention import LayerCache
from rehead.config import ModelOptions, RNNConfig
from rehead.errors import InvalidInput, UsageError
from rehead.model import build
from rehead.tokenizer import Tokenizer, load_tokenizer, open_model, train

PUBLIC = ["convert", "generate", "load", "load_tokenizer", "save"]
TEXT = "to be, or not to be: that is the question"


def tiny(vocab_size, **flags):
    torch.manual_seed(0)
    options = ModelOptions(
        n_layer=1, n_query_head=2, n_embd=8, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0, **flags
    )
    return build(options.resolve(vocab_size, 64)).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder with its tokenizer."""
    tokenizer = train("char", TEXT)
    place = tmp_path_factory.mktemp("library") / "model"
    rehead.save(tiny(tokenizer.vocab_size), place, files={"tokenizer.json": tokenizer.to_json()})
    return place


def test_dir_and_help_show_what_there_is(capsys):
    assert set(PUBLIC) <= set(dir(rehead))
    assert set(PUBLIC) <= set(rehead.__all__)
    assert not {"Any", "import_module", "TYPE_CHECKING"} & set(dir(rehead))
    assert rehead.attention.GroupedConfig.__name__ == "GroupedConfig"
    help(rehead)
    shown = capsys.readouterr().out
    for name in PUBLIC:
        assert f"\n    {name}(" in shown
    assert 'model = rehead.load("out/gqa")' in shown


@pytest.mark.process
@pytest.mark.parametrize(
    ("value", "program", "said"),
    [
        ("", "rehead.native.disable()", "0"),
        ("", "rehead.native.use('gpu')", "gpu"),
        ("0", "", "0"),
        ("0", "rehead.native.use('1')", "1"),
        ("", "", "1"),
    ],
)
def test_compiled_code_is_switched_by_a_call_or_the_environment(value, program, said):
    program = f"import rehead\n{program}\nprint(rehead.native.mode())"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "REHEAD_NATIVE": value}, capture_output=True, text=True
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (f"{said}\n", "")


def test_a_tokenizer_is_loaded_from_whatever_a_model_is(folder, tmp_path):
    expected = Tokenizer.load(folder).encode(TEXT).tolist()
    run = tmp_path / "run" / "checkpoints" / "step-000001"
    run.parent.mkdir(parents=True)
    run.symlink_to(folder)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    for place in (folder, str(folder), folder / "tokenizer.json", tmp_path / "run", alone):
        tokenizer = rehead.load_tokenizer(place)
        assert tokenizer.encode(TEXT).tolist() == expected
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    with pytest.raises(
        InvalidInput,
        match="nowhere does not exist: expected a model folder or a run folder, or org/name@<commit> of the Hub",
    ):
        rehead.load_tokenizer(tmp_path / "nowhere")
    rehead.save(tiny(5), tmp_path / "bare")
    with pytest.raises(InvalidInput, match=r"no file '.*bare/tokenizer\.json': give a tokenizer\.json"):
        rehead.load_tokenizer(tmp_path / "bare")


def test_a_model_is_opened_with_its_tokenizer_and_special_ids(folder, tmp_path):
    tokenizer = load_tokenizer(folder)
    place, bare = tmp_path / "model", tmp_path / "bare"
    generation = {"eos_token_id": 3, "pad_token_id": None, "temperature": 0.5, "max_length": 16}
    shutil.copytree(folder, place)
    (place / "MANIFEST.json").unlink()
    (place / "generation_config.json").write_text(json.dumps(generation))
    opened = open_model(str(place))
    assert opened.require_tokenizer().to_json() == tokenizer.to_json()
    assert opened.special == {"eos_token_id": 3}
    assert torch.equal(opened.model.head.weight, rehead.load(folder).head.weight)
    rehead.save(opened.model, bare)
    opened = open_model(bare)
    assert (opened.tokenizer, opened.special) == (None, {})
    with pytest.raises(InvalidInput, match=r"no file '.*bare/tokenizer\.json': give a tokenizer\.json"):
        opened.require_tokenizer()


BAD_CALLS = """
import json, sys, warnings
import numpy as np, torch
import rehead
from rehead.attention import GroupedConfig, LatentConfig, Mask
from rehead.attention.kernels import attend
from rehead.measure import evaluate_text, kv_bytes_per_token, parameters

warnings.simplefilter("error")
folder = sys.argv[1]
model, tokenizer = rehead.load(folder), rehead.load_tokenizer(folder)
hooked, replaced, changed, cut = (rehead.load(folder) for _ in range(4))
hooked.layers[0].self_attn.o_proj.register_forward_hook(lambda part, args, output: output * 2)
replaced.layers[0].mlp.forward = lambda x: x
changed.layers[0].mlp = type("Other", (type(model.layers[0].mlp),), {})(model.config)
cut.layers = cut.layers[:0]
def compiled():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's own imports
        return torch.compile(model)
ids = torch.tensor([[1, 2, 3]])
gqa = GroupedConfig(n_query_head=4, n_kv_head=2, head_dim=4)
mla = LatentConfig(n_query_head=4, kv_lora_rank=6, qk_nope_head_dim=4, v_head_dim=4)
x = torch.randn(2, 5, 16)
calls = {
    "list": lambda: rehead.generate(model, [[1, 2, 3]], 2),
    "text": lambda: rehead.generate(model, "to be, or not", 2),
    "none": lambda: rehead.generate(model, None, 2),
    "float": lambda: rehead.generate(model, ids.float(), 2),
    "float array": lambda: rehead.generate(model, np.array([1.5, 2.0]), 2),
    "bool": lambda: rehead.generate(model, ids > 1, 2),
    "deep": lambda: rehead.generate(model, ids[None], 2),
    "scalar": lambda: rehead.generate(model, torch.tensor(3), 2),
    "empty": lambda: rehead.generate(model, torch.zeros(1, 0, dtype=torch.long), 2),
    "no rows": lambda: rehead.generate(model, torch.zeros(0, 4, dtype=torch.long), 2),
    "too large": lambda: rehead.generate(model, ids + 90, 2),
    "negative": lambda: rehead.generate(model, ids - 2, 2),
    "path": lambda: rehead.generate(folder, ids, 2),
    "half": lambda: rehead.generate(model, ids, 2.5),
    "many seeds": lambda: rehead.generate(model, ids, 2, seed=[1, 2]),
    "half a seed": lambda: rehead.generate(model, ids, 2, seed=1.5),
    "cold": lambda: rehead.generate(model, ids, 2, temperature="cold"),
    "model of one text": lambda: model(ids[0]),
    "model of floats": lambda: model(ids.float()),
    "model of a list": lambda: model([[1, 2]]),
    "model too large": lambda: model(ids + 90),
    "model of nothing": lambda: model(torch.zeros(1, 0, dtype=torch.long)),
    "save a path": lambda: rehead.save(folder, folder + "-2"),
    "save over": lambda: rehead.save(model, folder),
    "load cuda": lambda: rehead.load(folder, device="cuda"),
    "load gpu": lambda: rehead.load(folder, device="gpu"),
    "load nothing": lambda: rehead.load(""),
    "flat x": lambda: gqa.build(16)(x[0]),
    "no width": lambda: gqa.build(0),
    "half a width": lambda: mla.build(2.5),
    "cache list": lambda: gqa.build(16)(x, cache=[]),
    "cache of a model": lambda: gqa.build(16)(x, cache=model.new_cache(2)),
    "another kind": lambda: gqa.build(16)(x, cache=mla.cache(2)),
    "another batch": lambda: mla.build(16)(x, cache=mla.cache(3)),
    "another dtype": lambda: mla.build(16)(x, cache=mla.cache(2, dtype=torch.bfloat16)),
    "convert a path": lambda: rehead.convert(folder, "mqa"),
    "convert to nothing": lambda: rehead.convert(model, None),
    "convert to a number": lambda: rehead.convert(model, 5),
    "convert to a class": lambda: rehead.convert(model, GroupedConfig),
    "convert a layer to nothing": lambda: rehead.convert(model, [None]),
    "convert without a seed": lambda: rehead.convert(model, "mqa", seed=None),
    "convert in parts": lambda: rehead.convert(model, "mqa", length=1.5),
    "encode nothing": lambda: tokenizer.encode(None),
    "encode bytes": lambda: tokenizer.encode(b"to be"),
    "encode a list": lambda: tokenizer.encode(["to be"]),
    "decode nothing": lambda: tokenizer.decode(None),
    "decode text": lambda: tokenizer.decode("12"),
    "decode a batch": lambda: tokenizer.decode(ids),
    "load none": lambda: rehead.load(None),
    "load a number": lambda: rehead.load_tokenizer(5),
    "save nowhere": lambda: rehead.save(model, None),
    "convert on floats": lambda: rehead.convert(model, "mqa", calibration=np.array([1.5, 2.5])),
    "convert on a batch": lambda: rehead.convert(model, "mqa", calibration=ids.numpy()),
    "load a name of a dtype": lambda: rehead.load(folder, dtype="bf16"),
    "load whole numbers": lambda: rehead.load(folder, dtype=torch.int32),
    "generate compiled": lambda: rehead.generate(compiled(), ids, 2),
    "a mask as positions": lambda: gqa.build(16)(x, positions=torch.ones(2, 5, dtype=torch.bool)),
    "a cache of less than nothing": lambda: mla.cache(-1),
    "a cache of no tokens": lambda: gqa.cache(2, 0),
    "a cache of half a token": lambda: gqa.cache(2, 1.5),
    "decode halves": lambda: tokenizer.decode([1.5]),
    "begin beyond the vocabulary": lambda: evaluate_text(model, [1, 2, 3], bos=99),
    "begin with a word": lambda: rehead.convert(model, "mqa", test=np.array([1, 2, 3]), bos="<s>"),
    "evaluate a path": lambda: evaluate_text(folder, [1, 2, 3]),
    "the size of a model": lambda: kv_bytes_per_token(model),
    "parameters of a model": lambda: parameters(model),
    "hooks": lambda: rehead.convert(hooked, "mqa"),
    "its own forward": lambda: rehead.convert(replaced, "mqa"),
    "another part": lambda: rehead.convert(changed, "mqa"),
    "fewer layers": lambda: rehead.convert(cut, "mqa"),
    "a mask of other sizes": lambda: attend(*torch.randn(3, 1, 5, 2, 4), Mask(n_query=4, n_key=5)),
}
said = {}
for name, call in calls.items():
    try:
        said[name] = ["", repr(call())]
    except Exception as error:
        said[name] = [type(error).__name__, str(error)]
print(json.dumps(said))
"""

WHOLE = "token ids are a tensor or an array of whole numbers, "
ENCODE = "Encode text with rehead.load_tokenizer(path).encode(text); wrap a list in torch.tensor(ids)."
REFUSED = {
    "list": ("ids is a list", WHOLE + "(L,) or (B, L)", ENCODE),
    "text": ("ids is 'to be, or not', text", WHOLE + "(L,) or (B, L)", ENCODE),
    "none": ("ids is a NoneType", WHOLE + "(L,) or (B, L)", ENCODE),
    "float": ("ids has dtype float32", WHOLE, "Convert with ids.long()"),
    "float array": ("ids has dtype float64", WHOLE, 'Convert with ids.astype("int64")'),
    "bool": ("ids has dtype bool", WHOLE, "Convert with ids.long()"),
    "deep": ("ids has shape (1, 1, 3)", WHOLE, "ids[0] is one text"),
    "scalar": ("ids has shape ()", WHOLE, "ids[None, None] is a batch of one token"),
    "empty": ("prompt 0 is empty", "at least one token"),
    "no rows": ("no prompts", "give at least one"),
    "too large": ("prompt 0 holds 91 to 93", "tokens are 0 to 14", "the model's own tokenizer"),
    "negative": ("prompt 0 holds -1 to 1", "tokens are 0 to 14", "the model's own tokenizer"),
    "path": ("model is '", "expected a rehead model", "Use rehead.load(path) first"),
    "half": ("max_new_tokens=2.5", "not a whole number", "Use 0 to 10,000,000"),
    "many seeds": ("2 seeds for 1 prompts", "Give one, or one per prompt"),
    "half a seed": ("seed=1.5", "not a whole number", "such as 0"),
    "cold": ("temperature='cold'", "not a number", "like 0.8"),
    "model of one text": ("ids has shape (3,)", WHOLE + "(B, L)", "ids[None] is a batch of one text"),
    "model of floats": ("ids has dtype float32", WHOLE, "ids.long()"),
    "model of a list": ("ids is a list", WHOLE, ENCODE),
    "model too large": ("ids holds 91 to 93", "tokens are 0 to 14", "the model's own tokenizer"),
    "model of nothing": ("ids has shape (1, 0)", "it has no tokens", "at least one"),
    "save a path": ("model is '", "expected a rehead model", "Use rehead.load(path) first"),
    "save over": (" exists", "choose another name"),
    "load cuda": ("device=cuda", "this machine has ", "Use one of them, or auto"),
    "load gpu": ("device=gpu", "this machine has ", "Use one of them, or auto"),
    "load nothing": ("neither a model folder", "config.json"),
    "flat x": ("x has shape (5, 16)", "an attention reads (B, L, D)", "Use x[None] for one text"),
    "no width": ("d_model=0", "a whole number of at least 1", "such as 192"),
    "half a width": ("d_model=2.5", "a whole number of at least 1", "such as 192"),
    "cache list": ("cache is a list", "a LayerCache", "attention.config.cache(batch_size)"),
    "cache of a model": ("cache is a list", "a LayerCache", "attention.config.cache(batch_size)"),
    "another kind": (
        "keeps {'latent': (6,)}",
        "the layer {'key': (2, 4)",
        "Build it with attention.config.cache",
    ),
    "another batch": ("holds batch_size=3 sequences", "x has 2", "Build it with batch_size=2"),
    "another dtype": ("keeps torch.bfloat16", "the layer computes torch.float32", "with dtype=torch.float32"),
    "convert a path": ("model is '", "expected a rehead model", "Use rehead.load(path) first"),
    "convert to nothing": ("to=None: expected a name (mha, ", "one per layer", 'Use "mla", for example.'),
    "convert to a number": ("to=5: expected a name (mha, ",),
    "convert to a class": ("GroupedConfig'>: expected a name (mha, ",),
    "convert a layer to nothing": ("to=[None]: expected a name (mha, ",),
    "convert without a seed": ("seed=None. Use 0 up to",),
    "convert in parts": ("length=1.5: the model reads at most block_size=64 tokens", "Use 1 to 64"),
    "encode nothing": ("text is None (NoneType): expected one text (str).",),
    "encode bytes": ("text is b'to be' (bytes): expected one text (str).",),
    "encode a list": ("text is ['to be'] (list): expected one text (str).",),
    "decode nothing": ("ids are None (NoneType): expected whole numbers, (N,).",),
    "decode text": ("ids are '12' (str): expected whole numbers, (N,).",),
    "decode a batch": ("(Tensor): expected whole numbers, (N,).",),
    "load none": ("path is None (NoneType): expected a text or a pathlib.Path.",),
    "load a number": ("path is 5 (int): expected a text or a pathlib.Path.",),
    "save nowhere": ("path is None (NoneType): expected a text or a pathlib.Path.",),
    "convert on floats": (
        "float64 and shape (2,)",
        "whole numbers, (N,)",
        "Encode it with the model's tokenizer",
    ),
    "convert on a batch": ("shape (1, 3)", "whole numbers, (N,)", "Encode it with the model's tokenizer"),
    "load a name of a dtype": ("dtype='bf16'", "held in torch.float32, bfloat16"),
    "load whole numbers": ("dtype=torch.int32", "held in torch.float32, bfloat16"),
    "generate compiled": ("model is a compiled copy", "the model itself", "model.compile()"),
    "a mask as positions": ("positions are torch.bool", "if it is a mask", "mask.long().cumsum(1) - 1, -1)"),
    "a cache of less than nothing": ("batch_size=-1", "Use 0 or more"),
    "a cache of no tokens": ("capacity=0", "Use 1 or more"),
    "a cache of half a token": ("capacity=1.5", "Use 1 or more"),
    "decode halves": ("ids are [1.5] (list): expected whole numbers, (N,).",),
    "begin beyond the vocabulary": ("bos=99", "the id of a token, 0 to 14, or None"),
    "begin with a word": ("bos='<s>'", "the id of a token, 0 to 14, or None"),
    "evaluate a path": ("model is '", "expected a rehead model", "Use rehead.load(path) first"),
    "the size of a model": ("config is a GPT", "Use model.config"),
    "parameters of a model": ("config is a GPT", "Use model.config"),
    "hooks": ("layers.0.self_attn.o_proj has hooks", "compute without it", "as it was built"),
    "its own forward": ("layers.0.mlp has a forward of its own", "compute without it", "as it was built"),
    "another part": ("layers.0.mlp is of class Other, by its config of ", "compute without it"),
    "fewer layers": ("layers.0.", "the model has none, its config says"),
    "a mask of other sizes": ("of 4 queries and 5 keys", "has 5 and 5", "Mask(n_query=5, n_key=5)"),
}


@pytest.fixture(scope="module")
def said(folder):
    """What every bad call answers, without the type checks of these tests."""
    done = subprocess.run(
        [sys.executable, "-c", BAD_CALLS, str(folder)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.process
@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_one_clear_error(name, said):
    if name == "load cuda" and torch.cuda.is_available():
        pytest.skip("it is there")
    kind, message = said[name]
    assert kind in ("UsageError", "InvalidInput", "ConfigError"), message
    assert "\n" not in message
    for part in REFUSED[name]:
        assert part in message


@pytest.mark.process
def test_every_bad_call_is_checked(said):
    assert said.keys() == REFUSED.keys()


def test_one_text_gives_one_text_and_a_batch_a_batch(folder):
    model, tokenizer = rehead.load(folder), rehead.load_tokenizer(folder)
    ids = tokenizer.encode("to be")
    one = rehead.generate(model, ids, max_new_tokens=7, temperature=0)
    assert (one.shape, one.dtype) == ((12,), torch.int64)
    assert one[:5].tolist() == ids.tolist()
    assert len(tokenizer.decode(one)) == 12
    batch = torch.from_numpy(ids)[None].repeat(3, 1)
    for given in (batch, batch.int(), batch.numpy()):
        more = rehead.generate(model, given, max_new_tokens=7, temperature=0)
        assert (more.shape, more.dtype) == ((3, 12), torch.int64)
        assert (more == one).all()
    for given in (torch.from_numpy(ids), ids.astype("uint16")):
        assert torch.equal(rehead.generate(model, given, 7, 0), one)
    assert torch.equal(rehead.generate(model, ids, 0), torch.from_numpy(ids))


def test_a_device_by_name(folder):
    assert rehead.load(folder, device="auto").device.type in ("cpu", "cuda")
    assert rehead.load(folder, device=torch.device("cpu")).device.type == "cpu"


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's, of the latent norm
@pytest.mark.parametrize(
    "flags", [{"n_kv_head": 1}, {"attention": "mla", "kv_lora_rank": 6}], ids=["gqa", "mla"]
)
def test_a_window_is_generated_with_under_autocast(flags):
    """The cache stays in the weights' float32; the first token is that of the whole text."""
    model = tiny(15, window=5, **flags).float()
    ids = torch.randint(15, (3, 9))
    with torch.autocast("cpu", torch.bfloat16):
        more = rehead.generate(model, ids, max_new_tokens=12, temperature=0)
        assert torch.equal(more[:, 9], model(ids)[:, -1].argmax(-1))
    assert more.shape == (3, 21)


IDS = torch.arange(6).view(2, 3)


def models():
    rnn = RNNConfig(vocab_size=9, block_size=8, n_embd=5, n_layer=2, n_hidden=4, n_output=9)
    return [tiny(9), tiny(9, rope=True), tiny(9, attention="mla"), build(rnn)]


@pytest.mark.mistyped
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    ("positions", "said"),
    [
        (torch.arange(4)[None], r"positions have shape \(1, 4\): one for each token"),
        ([0], "positions is a list: expected a tensor"),
    ],
)
def test_positions_of_other_tokens_are_refused(cached, positions, said):
    """Also where a table of positions is read before any attention."""
    for model in models():
        cache = model.new_cache(2) if cached else None
        with pytest.raises(UsageError, match=said):
            model(IDS, positions, cache)
        assert not cached or not isinstance(cache[0], LayerCache) or cache[0].n_token == 0


@pytest.mark.mistyped
def test_states_of_other_sequences_and_layers_are_refused():
    model = models()[-1]
    for cache in (model.new_cache(1), model.new_cache(2)[:1], [None, None], model.new_cache(2)[0]):
        with pytest.raises(UsageError, match="one StateCache of 2 sequences for each of the 2 layers"):
            model(IDS, cache=cache)
