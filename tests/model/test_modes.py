"""What needs eval mode for a while leaves every part in the mode it was in, also where it fails."""

import tempfile
from pathlib import Path

import pytest
import torch

from rehead.config import ModelOptions
from rehead.conversion import convert
from rehead.conversion.fit.layerwise import gather
from rehead.generation import generate, stream
from rehead.measure import evaluate
from rehead.measure.attention_maps import attention_maps
from rehead.measure.fidelity import compare
from rehead.measure.memory_in_use import held_cache_bytes
from rehead.measure.training import step_memory
from rehead.model import build, evaluated, evaluating, modes_kept

IDS = torch.arange(9)[None]
BLOCKS = [(IDS[:, :-1], IDS[:, 1:])]


@pytest.fixture
def model():
    """In training, but for one layer, as in fine-tuning with a frozen part."""
    model = build(ModelOptions(n_layer=2, n_embd=12, n_query_head=2).resolve(11, 16))
    model.train()
    model.layers[0].eval()
    return model


def modes(model):
    return {name: part.training for name, part in model.named_modules()}


def in_moments(model):
    with tempfile.TemporaryDirectory() as folder:
        gather(model, BLOCKS, Path(folder), needs={"pair"})


def in_maps(model):
    attention_maps(model, IDS[0])


USES = {
    "generate": lambda model: generate(model, IDS, 3, 0),
    "evaluate": lambda model: evaluate(model, BLOCKS),
    "compare": lambda model: compare(model, model, BLOCKS),
    "attention maps": in_maps,
    "moments": in_moments,
    "certificate": lambda model: convert(model, to="mqa"),
    "held bytes": lambda model: held_cache_bytes(model, 5),
    "step memory": lambda model: step_memory(
        model, lambda ids, _: model(ids).sum(), torch.optim.AdamW(model.parameters()), IDS
    ),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_part_is_in_the_mode_it_was_in(model, use):
    before = modes(model)
    assert set(before.values()) == {True, False}
    use(model)
    assert modes(model) == before


def test_no_dropout_while_evaluating(model):
    model.embd_dropout.p = 0.9
    with evaluating(model):
        assert not any(modes(model).values())
        once, twice = model(IDS), model(IDS)
    assert torch.equal(once, twice)
    assert not torch.equal(model(IDS), model(IDS))


@pytest.mark.parametrize("manager", [evaluating, modes_kept])
def test_also_after_a_failure(model, manager):
    before = modes(model)

    def fail():
        with manager(model, build(model.config)):
            model.train(not model.training)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert modes(model) == before


def test_a_generation_takes_no_mode_from_a_training(model):
    """Between two tokens, as in another thread, the model that is trained has dropout; what is generated has none."""
    for dropout in (model.embd_dropout, *(layer.resid_dropout for layer in model.layers)):
        dropout.p = 0.9
    before, evaluated = modes(model), build(model.config)
    evaluated.load_state_dict(model.state_dict())
    tokens = stream(model, list(IDS), 5, 0)
    texts = []
    for token in tokens:
        texts.append(int(token))
        assert modes(model) == before
        assert not torch.equal(model(IDS), model(IDS))
    assert texts == generate(evaluated.eval(), IDS, 5, 0)[0, IDS.shape[1] :].tolist()


def test_a_model_in_training_is_trained_while_it_generates(model):
    """The copy that generates has the model's own weights."""
    own = list(model.parameters())
    assert all(a is b for a, b in zip(evaluated(model).parameters(), own, strict=True))
    tokens = stream(model, list(IDS), 9, 0)
    next(tokens)
    with torch.no_grad():
        model.head.weight[3] = 100 * model.head.weight[3].abs() + 100
        model.head.weight[4] = -model.head.weight[3]
    assert set(map(int, tokens)) <= {3, 4}


def test_what_refers_to_the_model_itself_generates_in_eval_mode(model):
    """A closure calls the layer that is trained, so the mode of that is changed meanwhile."""
    model.embd_dropout.p, whole = 0.9, model.embd_dropout.forward
    model.embd_dropout.forward = lambda x: whole(x)
    before = modes(model)
    once, twice = (generate(model, IDS, 9, 0) for _ in range(2))
    assert torch.equal(once, twice)
    tokens = stream(model, list(IDS), 5, 0)
    next(tokens)
    assert not any(modes(model).values())
    tokens.close()
    assert modes(model) == before


def test_the_old_way_is_caught(model):
    """`train(training)` of the whole model sets every part to one mode."""
    before, training = modes(model), model.training
    model.eval()
    model.train(training)
    assert modes(model) != before
