"""The library as a newcomer types it."""

import pytest
import torch

import rehead
from rehead.config import ModelOptions
from rehead.errors import InvalidInput
from rehead.model import build
from rehead.tokenizer import Tokenizer, train

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
    with pytest.raises(InvalidInput, match="nowhere does not exist: expected a model folder or a run folder"):
        rehead.load_tokenizer(tmp_path / "nowhere")
    rehead.save(tiny(5), tmp_path / "bare")
    with pytest.raises(InvalidInput, match=r"no file '.*bare/tokenizer\.json': give a tokenizer\.json"):
        rehead.load_tokenizer(tmp_path / "bare")
