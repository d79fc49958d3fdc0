"""What every model promises when it generates: the cache changes nothing, neither do the other rows."""

import weakref
from contextlib import contextmanager

import pytest
import torch

from rehead import generation, sampling
from rehead.attention import LayerCache, variants
from rehead.attention.rope import Rotary
from rehead.config import GPTConfig, ModelOptions, RNNConfig
from rehead.errors import NumericError, UsageError
from rehead.generation import generate, stream
from rehead.model import GPT, build

B, V, D, BLOCK = 3, 23, 14, 12
NEW = 20
"""Enough tokens after a prompt of 5 to fill the context three times."""


def gpt(*attention, learned_positions=None, block_size=BLOCK):
    if learned_positions is None:
        learned_positions = any(kind.rope is None for kind in attention)
    return GPTConfig(
        vocab_size=V, block_size=block_size, n_embd=D, attention=attention, learned_positions=learned_positions,
        norm="rmsnorm", norm_eps=1e-5, mlp="gelu", n_hidden=17, mlp_bias=True,
    )  # fmt: skip


EXAMPLES = {name: kind for variant in variants for name, kind in variants[variant].examples().items()}
DISTINCT = {kind: name for name, kind in reversed(EXAMPLES.items()) if kind.causal}
FLAGS = {"n_layer": 2, "n_query_head": 2, "n_embd": D, "head_dim": 6, "attn_pdrop": 0.3}
CONFIGS = {name: gpt(kind, kind) for kind, name in reversed(DISTINCT.items())} | {
    "pattern, learned positions": gpt(EXAMPLES["gqa, window"], EXAMPLES["mla"], EXAMPLES["mqa"]),
    "pattern, rope": gpt(*[EXAMPLES["gqa, rope, window"]] * 2, EXAMPLES["mla, rebuilt keys"]),
    "window in every layer, no limit": gpt(EXAMPLES["gqa, rope, window"], EXAMPLES["mla, window"]),
    "flags": ModelOptions(**FLAGS).resolve(V, BLOCK),
    "rnn": RNNConfig(vocab_size=V, block_size=BLOCK, n_embd=D, n_layer=2, n_hidden=9, n_output=V),
}
SOME = ["gqa", "gqa, rope", "gqa, rope, window", "mla", "mla, rebuilt keys, window", "pattern, rope", "rnn"]
each_model = pytest.mark.parametrize("name", CONFIGS)


def make(name, config=None):
    model = build(CONFIGS[name] if config is None else config)
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.4)
    return model


def tokens(length, batch=B):
    return torch.randint(V, (batch, length))


@contextmanager
def watched(model):
    """Tokens fed and whether a cache was given, for every pass through `model`."""
    passes, hidden, decoder = [], model.hidden, generation.decoder

    def watch(ids, positions=None, cache=None):
        passes.append((ids.shape[1], cache is not None))
        return hidden(ids, positions, cache)

    def watched_decoder(model):
        decode = decoder(model)

        def one_more(ids, cache):
            n_pass = len(passes)
            logits = decode(ids, cache)
            if len(passes) == n_pass:  # not by way of `hidden`
                passes.append((1, True))
            return logits

        return one_more

    model.hidden, generation.decoder = watch, watched_decoder
    try:
        yield passes
    finally:
        del model.hidden
        generation.decoder = decoder


def by_definition(model, ids, n_new):
    """Greedy tokens from whole passes: past its limit N a model sees from a start in strides of N/2."""
    limit = model.config.context_limit
    for _ in range(n_new):
        start, length = 0, ids.shape[1]
        while limit is not None and length - start > limit:
            start += limit // 2
        ids = torch.cat([ids, model(ids[:, start:])[:, -1].argmax(-1, keepdim=True)], 1)
    return ids


@each_model
def test_greedy_cached_is_uncached_is_the_definition(name):
    model, ids = make(name).eval(), tokens(5)
    wanted = by_definition(model, ids, NEW)
    assert torch.equal(generate(model, ids, NEW, 0), wanted)
    assert torch.equal(generate(model, ids, NEW, 0, use_cache=False), wanted)


@pytest.mark.parametrize("name", SOME)
def test_sampled_cached_is_uncached(name):
    model, ids = make(name), tokens(5)
    settings = {"temperature": 1.5, "top_k": 15, "top_p": 0.97, "seed": [7, 8, 9]}
    cached = generate(model, ids, NEW, **settings)
    assert torch.equal(cached, generate(model, ids, NEW, **settings, use_cache=False))
    assert len(set(cached[:, 5:].flatten().tolist())) > 8


@pytest.mark.parametrize("name", SOME)
def test_float32_greedy_cached_is_uncached_for_64_tokens(name):
    model, ids = make(name).float(), tokens(3, 1)
    assert torch.equal(generate(model, ids, 64, 0), generate(model, ids, 64, 0, use_cache=False))


CUTS = [[11], [1] * 11, [4, 1, 6], [5, 6], [6, 5], [7, 1, 1, 2], [2, 2, 2, 2, 3]]
"""Prefills shorter than, equal to and longer than the window of 5, then steps and chunks."""


def check_logits(name, all_cuts):
    model, ids = make(name).eval(), tokens(11)
    whole = model(ids)
    for cuts in all_cuts:
        cache = model.new_cache(B)
        parts = [model(part, cache=cache) for part in ids.split(cuts, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9, msg=f"fed in {cuts}")


@each_model
def test_logits_do_not_depend_on_how_the_text_is_fed(name):
    check_logits(name, CUTS)


def check_ragged(name):
    model = make(name).eval()
    prompts = [torch.randint(V, (length,)) for length in (3, 1, BLOCK)]
    settings = {"max_new_tokens": NEW, "temperature": 0.8, "top_k": 9, "seed": 5}
    alone = [generate(model, prompt[None], **settings)[0, len(prompt) :] for prompt in prompts]
    for use_cache in (True, False):
        rows = stream(model, prompts, **settings, use_cache=use_cache)
        assert torch.equal(torch.stack(list(rows), 1), torch.stack(alone))


@each_model
def test_a_ragged_batch_is_its_rows_alone(name):
    check_ragged(name)


def check_samples(name):
    """Several samples of one prompt: the prompt is read once, and each is what it would be alone."""
    model, ids = make(name).eval(), tokens(5, 1)
    settings = {"max_new_tokens": NEW, "temperature": 1.5}
    alone = [generate(model, ids, **settings, seed=seed) for seed in (3, 4, 5, 6)]
    fed, hidden = [], model.hidden

    def watch(ids, positions=None, cache=None):
        fed.append(tuple(ids.shape))
        return hidden(ids, positions, cache)

    model.hidden = watch
    together = generate(model, ids.expand(4, -1), **settings, seed=[3, 4, 5, 6])
    assert torch.equal(together, torch.cat(alone))
    assert fed[0] == (1, 5)
    assert len(set(map(tuple, together.tolist()))) > 1
    other = torch.cat([ids[0], ids[0, :2]])
    mixed = torch.stack(list(stream(model, [ids[0], other, ids[0]], 6, seed=[3, 1, 5])), 1)
    alone = [
        generate(model, row[None], 6, seed=seed)[0, len(row) :] for row, seed in ((ids[0], 3), (other, 1))
    ]
    assert torch.equal(mixed[:2], torch.stack(alone))


@pytest.mark.parametrize("name", SOME)
def test_samples_of_one_prompt(name):
    check_samples(name)


def test_broken_samples_are_caught(monkeypatch):
    take = LayerCache.select_batch
    monkeypatch.setattr(
        LayerCache, "select_batch", lambda self, rows: take(self, rows) or self._store["key"].zero_()
    )
    with pytest.raises(AssertionError):
        check_samples("gqa")


class LateLength(LayerCache):
    """Stands one token behind after every chunk."""

    def append(self, positions=None, **new):
        out = super().append(positions, **new)
        self.length -= positions is None
        return out


def broken_cache(monkeypatch):
    monkeypatch.setattr("rehead.attention.base.LayerCache", LateLength)


def stale_next(monkeypatch):
    following = LayerCache.next
    monkeypatch.setattr(
        LayerCache, "next", lambda self, n: None if self.positions is None else following(self, n) - 1
    )


def late_rotation(monkeypatch):
    turn = Rotary.__call__
    monkeypatch.setattr(
        Rotary, "__call__", lambda self, x, at=None, start=0: turn(self, x, at, max(start - 1, 0))
    )


def late_table(monkeypatch):
    table_rows = GPT._table_rows
    monkeypatch.setattr(
        GPT, "_table_rows", lambda self, ids, at, start: table_rows(self, ids, at, max(start - 1, 0))
    )


def wide_window(monkeypatch):
    rows = LayerCache.__init__
    monkeypatch.setattr(
        LayerCache,
        "__init__",
        lambda self, *a, window=None, **k: rows(self, *a, window=window and window - 1, **k),
    )


def seen_padding(monkeypatch):
    monkeypatch.setattr("rehead.generation.EMPTY", 0)


@pytest.mark.parametrize(
    ("breaks", "name"),
    [
        (broken_cache, "gqa"),
        (broken_cache, "mla, rebuilt keys"),
        (late_rotation, "gqa, rope"),
        (late_rotation, "mla"),
        (late_table, "gqa"),
        (late_table, "mla, no position, no norm, bias"),
        (wide_window, "gqa, window"),
        (wide_window, "pattern, rope"),
    ],
)
def test_a_broken_cache_is_caught(breaks, name, monkeypatch):
    check_logits(name, CUTS)
    breaks(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, UsageError)):
        check_logits(name, [[4, 1, 6]])


@pytest.mark.parametrize(
    ("breaks", "name"),
    [(stale_next, "gqa, rope"), (stale_next, "mla"), (seen_padding, "gqa"), (seen_padding, "rnn")],
)
def test_a_broken_batch_is_caught(breaks, name, monkeypatch):
    check_ragged(name)
    breaks(monkeypatch)
    with pytest.raises(AssertionError):
        check_ragged(name)


@pytest.mark.parametrize("name", SOME)
def test_without_cache_everything_is_fed_every_time(name):
    model = make(name)
    with watched(model) as passes:
        generate(model, tokens(4), 6, use_cache=False)
    assert passes == [(length, False) for length in range(4, 10)]


@pytest.mark.parametrize("name", SOME)
def test_with_cache_one_token_is_fed_per_step(name):
    model = make(name)
    with watched(model) as passes:
        generate(model, tokens(4), 6)
    assert passes == [(4, True)] + [(1, True)] * 5


def test_a_full_context_is_fed_again_from_its_later_half():
    model = make("gqa")
    with watched(model) as passes:
        generate(model, tokens(4), 20)
    again = [(BLOCK // 2 + 1, True)] + [(1, True)] * 5
    assert passes == [(4, True)] + [(1, True)] * 8 + again + again[:5]


def test_no_limit_means_no_second_prefill():
    for name in ("window in every layer, no limit", "rnn"):
        model = make(name)
        with watched(model) as passes:
            generate(model, tokens(3 * BLOCK), 40)
        assert passes == [(3 * BLOCK, True)] + [(1, True)] * 39


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_a_full_context_lets_go_of_its_cache_before_another_is_made(name, monkeypatch):
    """Or the memory of both were needed."""
    model, alive = make(name).eval(), weakref.WeakSet()
    create = model.new_cache

    def noting(*given):
        assert not alive
        caches = create(*given)
        alive.update(caches)
        return caches

    monkeypatch.setattr(model, "new_cache", noting)
    assert generate(model, tokens(2), 3 * BLOCK, 0).shape[1] > 3 * BLOCK


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_the_shortest_contexts(block_size):
    model = make("", gpt(EXAMPLES["gqa"], block_size=block_size)).eval()
    ids = tokens(1)
    for length in range(1, 8):
        seen = generate(model, ids, length - 1, 0)
        start = 0 if length <= block_size else length - block_size
        if block_size == 3:
            start = max(0, length - 3)
        assert torch.equal(generate(model, ids, length, 0)[:, -1], model(seen[:, start:])[:, -1].argmax(-1))


@pytest.mark.parametrize("name", SOME)
def test_the_rest_of_the_process_is_left_alone(name):
    model, ids = make(name), tokens(4)
    before, random = ids.clone(), torch.get_rng_state()
    weights = [weight.clone() for weight in model.parameters()]
    out = generate(model, ids, 5, seed=3)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(ids, before)
    assert torch.equal(out[:, :4], ids)
    assert all(map(torch.equal, weights, model.parameters()))
    assert not out.is_inference()
    model(out[:, :BLOCK]).sum().backward()  # tables made while generating serve training too


def test_without_a_seed_it_comes_from_torch():
    model, ids = make("gqa"), tokens(4)

    def new(seed):
        torch.manual_seed(seed)
        return generate(model, ids, 9)

    assert torch.equal(new(1), new(1))
    assert not torch.equal(new(1), new(2))
    assert not torch.equal(generate(model, ids, 9), generate(model, ids, 9))


def test_one_seed_for_all_rows_or_one_each():
    model, ids = make("gqa"), tokens(4, 1).expand(3, -1)
    same = generate(model, ids, 9, seed=4)
    assert torch.equal(same[0], same[1])
    each = generate(model, ids, 9, seed=[4, 2**64 - 1, -6])
    assert torch.equal(each[0], same[0])
    assert not torch.equal(each[1], each[2])


def test_seeds_that_torchs_generator_confuses_are_told_apart():
    """It reads 32 bits of a seed."""
    model, ids = make("gqa"), tokens(4)
    for seed in (4, 0, 2**32 - 1):
        texts = {tuple(generate(model, ids, 30, seed=seed + n * 2**32)[0].tolist()) for n in range(3)}
        assert len(texts) == 3
    uniform = torch.rand(30, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    drawn = []
    for token, number in zip(generate(model, ids, 30, seed=4)[0, 4:], uniform, strict=True):
        text = torch.cat([ids[0], torch.tensor(drawn, dtype=torch.long)])
        likely = model(text[None])[0, -1].softmax(-1) if len(text) <= BLOCK else None
        if likely is not None:
            assert int((likely.cumsum(0) <= number).sum()) == int(token)
        drawn.append(int(token))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("end", ["finished", "left early", "failed"])
def test_mode_is_restored(training, end):
    model = make("flags").train(training)
    modes = []
    model.layers[0].register_forward_hook(lambda layer, *_: modes.append(layer.training))
    rows = stream(model, list(tokens(4)), 3)
    if end == "finished":
        list(rows)
    elif end == "left early":
        next(rows)
        rows.close()
    else:
        model.norm.weight.data.fill_(float("nan"))
        with pytest.raises(NumericError):
            list(rows)
    assert not any(modes)
    assert modes
    assert model.training == model.layers[1].mlp.training == training


def test_generation_has_no_dropout():
    model, ids = make("flags"), tokens(4)
    assert torch.equal(generate(model.train(), ids, 9, 0), generate(model.eval(), ids, 9, 0))


def test_no_new_tokens_is_the_prompt():
    ids = tokens(4)
    assert torch.equal(generate(make("gqa"), ids, 0), ids)


def test_a_stream_gives_the_tokens_of_generate():
    model, ids = make("gqa"), tokens(4)
    rows = list(stream(model, list(ids), 7, seed=1))
    assert all(row.shape == (B,) for row in rows)
    assert torch.equal(torch.stack(rows, 1), generate(model, ids, 7, seed=1)[:, 4:])


@pytest.mark.parametrize("use_cache", [True, False])
def test_what_a_stream_yields_is_the_caller_s(use_cache):
    model, ids, seen = make("gqa"), tokens(4), []
    for token in stream(model, list(ids), 7, 0, use_cache=use_cache):
        seen.append(token.clone())
        token.fill_(V + 90)
    assert torch.equal(torch.stack(seen, 1), generate(model, ids, 7, 0)[:, 4:])


REFUSED = [  # how it is called, what the message must name, the remedy it must offer
    (lambda m: stream(m, [tokens(2)[0], tokens(0)[0]], 3), "prompt 1 is empty", "at least one"),
    (lambda m: generate(m, tokens(4, 0), 3), "no prompts", "at least one"),
    (lambda m: generate(m, tokens(0), 3), "prompt 0 is empty", "at least one"),
    (
        lambda m: generate(m, tokens(13), 3),
        "prompt 0 has 13 tokens and the model's context is 12",
        "12 tokens",
    ),
    (lambda m: generate(m, tokens(13), 0), "prompt 0 has 13 tokens", "shorten it"),
    (lambda m: generate(m, tokens(4), -1), "max_new_tokens=-1", "0 to 10,000,000"),
    (lambda m: generate(m, tokens(4), 3, -0.5), "temperature=-0.5", "0 (always"),
    (lambda m: generate(m, tokens(4), 3, top_k=0), "top_k=0", "1 or more"),
    (lambda m: generate(m, tokens(4), 3, top_p=0), "top_p=0", "more than 0"),
    (
        lambda m: generate(m, tokens(4), 3, seed=[1, 2]),
        "2 seeds for 3 prompts",
        "Give one, or one per prompt",
    ),
    (lambda m: generate(m, torch.tensor([[3, V]]), 3), "prompt 0 holds 3 to 23", "tokens are 0 to 22"),
    (lambda m: generate(m, torch.tensor([[3, 1], [2, -1]]), 3), "prompt 1 holds -1 to 2", "tokenizer"),
]


@pytest.mark.parametrize(("call", "named", "remedy"), REFUSED)
def test_refused_at_once(call, named, remedy):
    with pytest.raises(UsageError) as caught:
        call(make("gqa"))  # a stream too: before its first token is asked for
    assert named in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_logits_that_are_not_finite_stop_generation(temperature, monkeypatch):
    """They are looked at once for every token."""
    model, looked, check = make("gqa"), [], sampling.require_finite
    for module in (generation, sampling):
        monkeypatch.setattr(module, "require_finite", lambda logits: looked.append(1) or check(logits))
    generate(model, tokens(4), 3, temperature)
    assert len(looked) == 3
    model.head.weight.data[2, 3] = float("nan")
    with pytest.raises(NumericError, match="not finite"):
        generate(model, tokens(4), 3, temperature)
