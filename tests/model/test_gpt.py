"""The decoder against its definition, in both shapes and with every attention."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from rehead.attention import GroupedConfig, LayerCache
from rehead.config import ModelOptions
from rehead.errors import ConfigError, UsageError
from rehead.measure import parameters
from rehead.model import GPT, build
from rehead.model.layers import Block

B, L, D, H, K, E, N, BLOCK = 3, 7, 30, 6, 2, 5, 29, 11
QUIET = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
COMMON = {"n_layer": 2, "n_embd": D, "n_query_head": H, "n_kv_head": K, "n_hidden": 19} | QUIET
VARIANTS = {
    "mha": {"n_kv_head": H},
    "gqa": {},
    "mqa": {"n_kv_head": 1},
    "gqa, rope": {"rope": True, "head_dim": 6},
    "gqa, window": {"window": 3},
    "gqa, modular, wide values": {"head_map": "modular", "v_head_dim": 8},
    "gqa, additive": {"score": "additive", "score_width": 4},
    "mla": {"attention": "mla", "kv_lora_rank": 9},
    "mla, rope": {"attention": "mla", "kv_lora_rank": 9, "head_dim": 6, "rope": True, "q_lora_rank": 8},
    "mla, rebuilt keys": {
        "attention": "mla",
        "kv_lora_rank": 9,
        "head_dim": 6,
        "rope": True,
        "qk_rope_head_dim": 0,
    },
    "llama": {"shape": "llama", "head_dim": 6},
    "pattern": {"layers": [{"window": 3}, {}]},
    "tied": {"tie_embeddings": True},
    "rnn": {"type": "rnn", "n_layer": 2, "n_embd": D, "n_hidden": 19, "embd_pdrop": 0.0},
}


def config(name="gqa", **changes):
    given = VARIANTS[name]
    return ModelOptions(**(given if "type" in given else COMMON | given) | changes).resolve(N, BLOCK)


def tokens(batch=B, length=L):
    return torch.randint(N, (batch, length))


@pytest.mark.parametrize("name", VARIANTS)
def test_token_ids_to_logits(name):
    model = build(config(name))
    assert model(tokens()).shape == (B, L, N)
    assert model.hidden(tokens()).shape[:2] == (B, L)
    assert model.device == torch.device("cpu")


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8])
def test_positions_of_any_width(name, dtype):
    """Chunks through a cache, too."""
    model, ids, positions = build(config(name)).eval(), tokens(), torch.arange(L)[None]
    wanted = model(ids, positions)
    torch.testing.assert_close(model(ids, positions.to(dtype)), wanted)
    cache = model.new_cache(B)
    chunks = [model(ids[:, part], positions[:, part].to(dtype), cache) for part in (slice(5), slice(5, L))]
    torch.testing.assert_close(torch.cat(chunks, 1), wanted)


@pytest.mark.parametrize("window", [120, 200, 4096, 40_000])
def test_narrow_positions_beside_a_wide_window(window):
    """A position minus the window has no room in int8, or int16."""
    layer = GroupedConfig(n_query_head=H, head_dim=E, window=window).build(D)
    x, positions = torch.randn(1, L, D), torch.arange(L)[None]
    for dtype in (torch.int8, torch.int16, torch.int32):
        torch.testing.assert_close(layer(x, positions=positions.to(dtype)), layer(x, positions=positions))


NAMES = {
    "gpt": {
        "embed_tokens.weight": (N, D),
        "embed_positions.weight": (BLOCK, D),
        "norm.weight": (D,),
        "norm.bias": (D,),
        "head.weight": (N, D),
        **{
            f"layers.{i}.{name}": shape
            for i in range(2)
            for name, shape in {
                "input_layernorm.weight": (D,),
                "input_layernorm.bias": (D,),
                "self_attn.q_proj.weight": (H * E, D),
                "self_attn.q_proj.bias": (H * E,),
                "self_attn.k_proj.weight": (K * E, D),
                "self_attn.k_proj.bias": (K * E,),
                "self_attn.v_proj.weight": (K * E, D),
                "self_attn.v_proj.bias": (K * E,),
                "self_attn.o_proj.weight": (D, H * E),
                "self_attn.o_proj.bias": (D,),
                "post_attention_layernorm.weight": (D,),
                "post_attention_layernorm.bias": (D,),
                "mlp.up_proj.weight": (19, D),
                "mlp.up_proj.bias": (19,),
                "mlp.down_proj.weight": (D, 19),
                "mlp.down_proj.bias": (D,),
            }.items()
        },
    },
    "llama": {
        "embed_tokens.weight": (N, D),
        "norm.weight": (D,),
        "head.weight": (N, D),
        **{
            f"layers.{i}.{name}": shape
            for i in range(2)
            for name, shape in {
                "input_layernorm.weight": (D,),
                "self_attn.q_proj.weight": (H * 6, D),
                "self_attn.k_proj.weight": (K * 6, D),
                "self_attn.v_proj.weight": (K * 6, D),
                "self_attn.o_proj.weight": (D, H * 6),
                "post_attention_layernorm.weight": (D,),
                "mlp.gate_proj.weight": (19, D),
                "mlp.up_proj.weight": (19, D),
                "mlp.down_proj.weight": (D, 19),
            }.items()
        },
    },
}


@pytest.mark.parametrize(("name", "shape"), [("gqa", "gpt"), ("llama", "llama")])
def test_weights_have_the_names_and_shapes_of_the_table(name, shape):
    found = {name: tuple(weight.shape) for name, weight in build(config(name)).state_dict().items()}
    assert found == NAMES[shape]


def shake(model):
    """Weights and biases that all matter."""
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.3)
    return model


def by_definition(model, ids):
    """Homework 4 and Llama, written out; only the attention is the module's own."""
    state = {name: weight.detach() for name, weight in model.state_dict().items()}
    llama = "layers.0.mlp.gate_proj.weight" in state

    def norm(name, x):
        if llama:
            return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * state[f"{name}.weight"]
        x = x - x.mean(-1, keepdim=True)
        return (
            x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * state[f"{name}.weight"]
            + state[f"{name}.bias"]
        )

    def linear(name, x):
        return x @ state[f"{name}.weight"].T + (0 if llama else state[f"{name}.bias"])

    def gelu(x):
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    x = state["embed_tokens.weight"][ids]
    if not llama:
        x = x + state["embed_positions.weight"][: ids.shape[1]]
    for i, layer in enumerate(model.layers):
        at = f"layers.{i}"
        x = x + layer.self_attn(norm(f"{at}.input_layernorm", x))
        y = norm(f"{at}.post_attention_layernorm", x)
        up = linear(f"{at}.mlp.up_proj", y)
        if llama:
            gate = linear(f"{at}.mlp.gate_proj", y)
            x = x + linear(f"{at}.mlp.down_proj", gate * torch.sigmoid(gate) * up)
        else:
            x = x + linear(f"{at}.mlp.down_proj", gelu(up))
    return norm("norm", x) @ state["head.weight"].T


class PostNorm(Block):
    """Norms after the residual sum, as in 2017."""

    def forward(self, x, positions=None, cache=None):
        x = self.input_layernorm(x + self.self_attn(x, positions=positions, cache=cache))
        return self.post_attention_layernorm(x + self.mlp(x))


class Parallel(Block):
    """Attention and MLP side by side."""

    def forward(self, x, positions=None, cache=None):
        return super().forward(x, positions, cache) - self.mlp(self.post_attention_layernorm(x))


@pytest.mark.parametrize("name", ["gqa", "llama", "mla", "pattern", "tied"])
def test_a_decoder_is_its_definition(name):
    model, ids = shake(build(config(name))).eval(), tokens()

    def check():
        torch.testing.assert_close(model(ids), by_definition(model, ids), rtol=1e-12, atol=1e-12)

    check()
    for mutant in (PostNorm, Parallel):
        for layer in model.layers:
            layer.__class__ = mutant
        with pytest.raises(AssertionError):
            check()
        for layer in model.layers:
            layer.__class__ = Block


def test_logits_read_the_past_only():
    for name in VARIANTS:
        model, ids = build(config(name)).eval(), tokens()
        changed = ids.clone()
        changed[:, 4] = (ids[:, 4] + 1) % N
        moved = (model(ids) - model(changed)).abs().amax((0, 2)) > 0
        assert not moved[:4].any(), name
        assert moved[4], name


def reach(name, **changes):
    """How far back the last logits read."""
    model, ids = shake(build(config(name, **changes))).eval(), tokens(1, BLOCK)
    tokens_seen = []
    model.embed_tokens.register_forward_hook(lambda _, __, out: tokens_seen.append(out.requires_grad_()))
    grad = torch.autograd.grad(model(ids)[0, -1].sum(), tokens_seen)[0]
    return int((grad.abs().amax(-1)[0] > 0).sum())


def test_windows_reach_n_times_w_minus_one_and_one():
    assert reach("gqa", window=3, n_layer=2) == 5
    assert reach("gqa", window=3, n_layer=4) == 9
    assert reach("gqa", n_layer=1) == BLOCK
    assert reach("pattern", layers=[{"window": 2}, {"window": 4}], n_layer=2) == 5
    assert reach("pattern", layers=[{"window": 2}, {}], n_layer=2) == BLOCK


def test_each_layer_has_its_own_attention():
    model = build(
        config(layers=[{"window": 3}, {"n_kv_head": 1}, {"attention": "mla", "kv_lora_rank": 9}], n_layer=3)
    )
    kinds = [layer.self_attn.config for layer in model.layers]
    assert [(kind.name, kind.window) for kind in kinds] == [("gqa", 3), ("mqa", None), ("mla", None)]
    assert kinds == list(model.config.attention)


TOO_LONG = {
    "tokens": lambda model: model(tokens(length=BLOCK + 1)),
    "positions": lambda model: model(tokens(length=2), torch.tensor([[4, BLOCK]])),
    "cache": lambda model: (
        cache := model.new_cache(B),
        model.hidden(tokens(length=BLOCK), cache=cache),
        model.hidden(tokens(length=1), cache=cache),
    ),
}


@pytest.mark.parametrize("way", TOO_LONG)
def test_learned_positions_end_at_block_size(way):
    with pytest.raises(UsageError) as caught:
        TOO_LONG[way](build(config()))
    assert "12 tokens exceed block_size=11" in str(caught.value)
    assert "data.block_size" in str(caught.value)


def test_rope_goes_on_past_block_size():
    model = build(config("gqa, rope"))
    assert model(tokens(length=3 * BLOCK)).shape == (B, 3 * BLOCK, N)


def test_each_position_takes_its_own_row():
    model, ids = build(config(n_layer=1)).eval(), tokens(1)
    before = model(ids)
    model.embed_positions.weight.data[4] += 1
    moved = (model(ids) - before).abs().amax((0, 2)) > 0
    assert moved.tolist() == [False] * 4 + [True] * 3


def test_tied_embeddings_are_one_tensor_counted_once():
    tied, apart = build(config("tied")), build(config())
    assert tied.head.weight is tied.embed_tokens.weight
    assert apart.head.weight is not apart.embed_tokens.weight
    count = sum(p.numel() for p in tied.parameters())
    assert count == parameters(tied.config) == sum(p.numel() for p in apart.parameters()) - N * D
    tied(tokens()).sum().backward()
    both = tied.embed_tokens.weight.grad
    assert (both.abs().amax(1) > 0).all()  # also of tokens that were not read: through the head


@pytest.mark.parametrize("name", VARIANTS)
def test_tie_puts_one_tensor_back(name):
    model = build(config(name))
    model.head.weight = torch.nn.Parameter(torch.randn(N, D))
    model.tie()
    assert (model.head.weight is model.embed_tokens.weight) == (name == "tied")


@pytest.mark.parametrize("drop", ["embd_pdrop", "resid_pdrop", "attn_pdrop"])
def test_b21_dropout_in_training_only(drop):
    ids = tokens()

    def check(model):
        assert torch.equal(model.eval()(ids), model.eval()(ids))
        model.train()
        assert not torch.allclose(model(ids), model(ids))

    model = build(config(**{drop: 0.5}))
    plain = build(config())
    plain.load_state_dict(model.state_dict())
    check(model)
    assert torch.equal(model.eval()(ids), plain(ids))
    with pytest.raises(AssertionError):
        check(plain)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.forward = lambda x: F.dropout(x, 0.5)  # whatever the mode
    if drop != "attn_pdrop":
        with pytest.raises(AssertionError):
            check(model)


@pytest.mark.parametrize("silent", ["self_attn.o_proj", "mlp.down_proj"])
def test_b21_both_branches_of_a_layer_drop(silent):
    """With one branch writing nothing, the other still drops."""
    model, ids = build(config(resid_pdrop=0.5, n_layer=1)), tokens()
    for weight in model.layers[0].get_submodule(silent).parameters():
        weight.data.zero_()
    assert not torch.allclose(model.train()(ids), model.eval()(ids))


@pytest.mark.parametrize("name", VARIANTS)
def test_arguments_are_left_alone(name):
    ids = tokens()
    before = ids.clone()
    build(config(name))(ids)
    assert torch.equal(ids, before)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_near_float64(name, dtype):
    model, ids = build(config(name)).eval(), tokens()
    exact = model(ids)
    got = model.to(dtype)(ids)
    assert got.dtype == dtype
    bound = {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    assert (got - exact).abs().max() <= bound * exact.abs().max()


@pytest.mark.parametrize("name", VARIANTS)
def test_untrained_loss_is_ln_v(name):
    model = build(config(name))
    loss = F.cross_entropy(model(tokens(40, BLOCK)).flatten(0, 1), tokens(40, BLOCK).flatten())
    assert abs(loss / math.log(N) - 1) < 0.05


@pytest.mark.parametrize("name", ["mha", "gqa", "mla, rope", "gqa, window", "llama", "rnn"])
def test_one_batch_is_learned_by_heart(name):
    torch.set_default_dtype(torch.float32)
    model, batch = build(config(name, n_layer=1)), tokens(4, 9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(300):
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        if loss < 0.05:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pytest.fail(f"loss {loss:.3f} after 300 steps")


def test_two_models_interleaved_are_each_alone():
    ids = tokens(1)

    def decode(models):
        caches = [model.new_cache(1) for model in models]
        steps = [
            [
                model.hidden(ids[:, t : t + 1], cache=cache)
                for model, cache in zip(models, caches, strict=True)
            ]
            for t in range(L)
        ]
        return [torch.cat(rows, 1) for rows in zip(*steps, strict=True)]

    models = [build(config(name)).eval() for name in ("gqa, rope", "mla, rope", "gqa, window", "rnn")]
    together = decode(models)
    for model, out in zip(models, together, strict=True):
        assert torch.equal(decode([model])[0], out)


def test_new_cache_has_the_weights_dtype_and_a_layer_each():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        cache = build(config("pattern")).to(dtype).new_cache(B, 9)
        assert [type(layer) for layer in cache] == [LayerCache] * 2
        assert cache[0].n_bytes == B * 3 * 2 * K * E * dtype.itemsize
        assert cache[1].n_bytes == B * 9 * 2 * K * E * dtype.itemsize


def test_a_decoder_takes_no_encoder_layers():
    good = config()
    with pytest.raises(ConfigError, match=r"layer 1 of a GPT has causal=False.*causal=True"):
        replace(good, attention=(good.attention[0], replace(good.attention[0], causal=False)))


def test_build_makes_the_class_of_the_config():
    assert type(build(config())) is GPT
    assert build(config()).config == config()


@pytest.mark.parametrize("name", ["gqa", "gqa, rope", "gqa, window", "mla, rope", "rnn"])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("first", [3, 0])
def test_any_position_below_0_is_padding(name, cached, first):
    """As users count from the first token: -3, -2, ...; also behind the text, in a cache with no row to spare."""
    model, ids = build(config(name)).eval(), tokens(2, 9)
    pads, places = tokens(2, 3), torch.arange(9)
    padded = torch.cat([pads[:, :first], ids, pads[:, first:]], 1)
    positions = torch.cat([torch.arange(-3, 0)[:first], places, torch.arange(-3, 0)[first:]])[None]
    cache = model.new_cache(2, 11) if cached else None
    seen = model(padded, positions.expand(2, -1), cache)[:, first : first + 9]
    torch.testing.assert_close(seen, model(ids), atol=1e-5, rtol=1e-5)
    if cached:
        more = tokens(2, 2)
        whole = model(torch.cat([ids, more], 1))[:, -2:]
        torch.testing.assert_close(model(more, cache=cache), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gqa, rope", "gqa, window", "mla, rope", "rnn"])
@pytest.mark.parametrize("given", [False, True])
def test_a_call_that_fails_reads_nothing(name, given):
    """Neither a whole text nor a token after it: whoever catches the error can try again."""
    if given and name == "rnn":
        pytest.skip("no positions")
    model, ids = build(config(name)).eval(), tokens(2, 9)
    right, cache = model(ids), model.new_cache(2)

    def read(part, at):
        places = torch.arange(at, at + part.shape[1])[None].expand(2, -1) if given else None
        return model(part, places, cache)

    for start, stop in ((0, 7), (7, 8), (8, 9)):
        refuse = model.head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            read(ids[:, start:stop], start)
        refuse.remove()
        torch.testing.assert_close(
            read(ids[:, start:stop], start), right[:, start:stop], atol=1e-5, rtol=1e-5
        )


def test_a_full_ring_that_lost_tokens_says_so():
    model = build(config("gqa, window")).eval()
    cache = model.new_cache(2)
    model(tokens(2, 7), cache=cache)
    refuse = model.head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        model(tokens(2, 2), cache=cache)
    refuse.remove()
    with pytest.raises(
        UsageError, match="overwritten what an earlier token sees: read the text with a new cache"
    ):
        model(tokens(2, 2), cache=cache)


@pytest.mark.parametrize("first", ["gqa, rope", "gqa, window"])
def test_an_old_token_is_refused_before_any_layer_writes(first):
    """The first layer keeps all rows, or has the wider window."""
    narrow = replace(config("gqa, window").attention[0], window=3)
    model = build(replace(config(first), attention=(config(first).attention[0], narrow))).eval()
    ids, cache = tokens(2, 9), model.new_cache(2)
    right = model(ids)
    model(ids[:, :8], cache=cache)
    with pytest.raises(UsageError, match="overwritten what an earlier token sees"):
        model(ids[:, :1], torch.tensor([[6]]), cache)
    torch.testing.assert_close(model(ids[:, 8:], cache=cache), right[:, 8:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "at"), [("gqa, rope", [3, 4]), ("gqa, rope", [8]), ("gqa, window", [8])])
def test_rows_given_again_are_lost_if_the_call_fails(name, at):
    """Until the text is read anew. A call that is refused has written nothing."""
    model, ids = build(config(name)).eval(), tokens(2, 9)
    right, cache = model(ids), model.new_cache(2)
    empty = [layer.count for layer in cache]
    model(ids[:, :8], cache=cache)
    with pytest.raises(UsageError, match="1000000"):
        model(torch.full((2, len(at)), 1_000_000), torch.tensor([at]), cache)
    torch.testing.assert_close(model(ids[:, 8:], cache=cache), right[:, 8:], atol=1e-5, rtol=1e-5)
    refuse = model.head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        model(ids[:, at].flip(0), torch.tensor([at]), cache)
    refuse.remove()
    with pytest.raises(UsageError, match="a call that failed had been given positions again"):
        model(ids[:, :1], cache=cache)
    for layer, count in zip(cache, empty, strict=True):
        layer.count = count
    torch.testing.assert_close(model(ids, cache=cache), right, atol=1e-5, rtol=1e-5)
