"""Weights and parts that C++ must not read or pass over; each in a process of its own, which a fault would end."""

import pytest

import forked
from rehead.decoding.native_op import kernel
from rehead.native import KernelUnavailable

built = pytest.mark.skipif(isinstance(kernel(), KernelUnavailable), reason=str(kernel()))

MODEL = """
import sys
import torch, rehead
torch.set_num_threads(1)
from torch import nn
from rehead import decoding
from rehead.attention import GroupedConfig, RopeConfig
from rehead.config import GPTConfig
from rehead.errors import UsageError
from rehead.generation import stream
from rehead.model import build
torch.manual_seed(0)
attention = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=10, v_head_dim=7, rope=RopeConfig())
model = build(GPTConfig(
    vocab_size=23, block_size=64, n_embd=24, attention=(attention, attention), learned_positions=False, norm="rmsnorm",
    norm_eps=1e-5, mlp="swiglu", n_hidden=17, mlp_bias=False,
)).eval()
ids = torch.tensor([1, 2])

def new_logits(decode, cache, ids=ids):
    with torch.no_grad():
        return decode(ids, cache)

def by_forward(ids, cache):
    return model(ids[:, None], cache=cache)[:, 0]
"""


@pytest.fixture
def attacked(tmp_path):
    """attacked(code): run code after MODEL in a process of its own, in an empty folder; its output."""

    def run(code):
        done = forked.python(MODEL + code, cwd=tmp_path, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:] or done.returncode
        return done.stdout

    return run


def test_weights_that_stay_in_their_files_are_decoded_by_pytorch(attacked):
    attacked("""
rehead.save(model, "model")
deferred = rehead.load("model", in_memory=False)
assert "not in memory" in decoding.native_refusal(deferred)
assert torch.equal(rehead.generate(deferred, ids, 20, 0), rehead.generate(model, ids, 20, 0))
for mode in (torch.no_grad, torch.inference_mode):
    with mode():
        for decode in (decoding.decoder(deferred), decoding.torch_decoder(deferred)):
            decode(ids, deferred.new_cache(2))
""")


def test_a_change_between_two_tokens_counts_from_the_next_token_on(attacked):
    """The same caches go on, whose bound program would know the old weights only."""
    attacked("""
from copy import deepcopy

def other_data(model):
    for p in model.parameters():
        p.data = torch.randn_like(p)

def in_place(model):
    [p.mul_(1.5) for p in model.parameters()]

def assigned(model):
    model.load_state_dict({n: 2 * w for n, w in model.state_dict().items()}, assign=True)

def a_weight(model):
    model.layers[1].mlp.up_proj.weight = nn.Parameter(torch.randn(17, 24))

def a_part(model):
    model.layers[1].mlp.up_proj = nn.Linear(24, 17, bias=False)

def a_layer(model):
    model.layers[1] = model.layers[0]

original = model
for change in (other_data, in_place, assigned, a_weight, a_part, a_layer):
    for make in (decoding.decoder, lambda m: decoding.change.Decoder(m, lambda: decoding.torch_decoder(m))):
        model = deepcopy(original)
        decode, caches = make(model), (model.new_cache(2), model.new_cache(2))
        for cache, way in zip(caches, (decode, by_forward)):
            for _ in range(3):
                before = new_logits(way, cache)
        with torch.no_grad():
            change(model)
        junk = [torch.full((n,), float("nan")) for n in (240, 408, 552) for _ in range(50)]
        left, right = new_logits(decode, caches[0]), new_logits(by_forward, caches[1])
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5, msg=lambda text: f"{change.__name__}: {text}")
        assert not torch.allclose(left, before)
""")


def test_a_model_converted_while_it_generates_is_refused_in_words(attacked):
    attacked("""
tokens = stream(model, [ids], 30, 0)
for _ in range(5):
    next(tokens)
model.to(torch.bfloat16)
try:
    next(tokens)
except UsageError as error:
    assert "torch.float32" in str(error) and "torch.bfloat16" in str(error)
else:
    raise AssertionError("no error")
""")


def test_a_native_decoder_refuses_weights_that_became_narrower(attacked):
    attacked("""
decode = decoding.native_decoder(model)
if decode is None:
    sys.exit()
model.half()
try:
    new_logits(decode, model.new_cache(2))
except UsageError as error:
    assert "Make a new decoder" in str(error)
else:
    raise AssertionError("no error")
""")


def test_every_replaced_forward_is_called(attacked):
    """Also those of parts that only pass their input on."""
    attacked("""
plain = new_logits(by_forward, model.new_cache(2))
changed = 0
for name, part in model.named_modules():
    if isinstance(part, nn.ModuleList):
        continue
    decode = decoding.decoder(model)
    new_logits(decode, model.new_cache(2))
    forward = part.forward
    def replaced(*given, **named):
        y = forward(*given, **named)
        return 2 * y if isinstance(y, torch.Tensor) else y
    part.forward = replaced
    wanted = new_logits(by_forward, model.new_cache(2))
    changed += not torch.equal(wanted, plain)
    for way in (decode, decoding.decoder(model)):
        assert torch.equal(new_logits(way, model.new_cache(2)), wanted), name
    del part.forward
    torch.testing.assert_close(new_logits(decode, model.new_cache(2)), plain, rtol=1e-5, atol=1e-5)
assert changed > 20
""")


def test_hooks_and_other_forwards_of_the_model_take_part_in_its_first_token(attacked):
    """The prompt is read without `model(...)`, unless that computes more."""
    attacked("""
def favoured(logits):
    return torch.nn.functional.one_hot(torch.full(logits.shape[:-1], 5), 23) + 0 * logits

def texts():
    return rehead.generate(model, ids[None], 3, 0)[0, 2:].tolist()

before = texts()
assert 5 not in before
hook = model.register_forward_hook(lambda module, given, logits: favoured(logits))
assert texts() == [5, 5, 5]
hook.remove()
hook = nn.modules.module.register_module_forward_hook(
    lambda module, given, result: favoured(result) if module is model else None
)
assert texts() == [5, 5, 5]
hook.remove()
assert texts() == before
model.forward = lambda *given, **more: favoured(type(model).forward(model, *given, **more))
assert texts() == [5, 5, 5]
""")


@built
def test_threads_that_share_a_model_each_generate_as_alone(attacked):
    attacked("""
from concurrent.futures import ThreadPoolExecutor
prompts = [torch.arange(1 + n % 7) for n in range(24)]
alone = [rehead.generate(model, prompt, 40, seed=n) for n, prompt in enumerate(prompts)]
with ThreadPoolExecutor(8) as pool:
    together = list(pool.map(lambda n: rehead.generate(model, prompts[n], 40, seed=n), range(24)))
    shared = decoding.native_decoder(model)
    def several(n):
        caches, tokens = model.new_cache(1, 60), torch.arange(60) * (n + 1) % 23
        with torch.inference_mode():
            return torch.cat([shared(tokens[at, None], caches) for at in range(60)])
    logits = list(pool.map(several, range(24)))
assert all(map(torch.equal, alone, together))
assert all(map(torch.equal, map(several, range(24)), logits))
""")


def test_a_process_forked_after_use_computes(attacked):
    """Its OpenMP threads are gone, and a parallel loop would wait for them forever."""
    attacked("""
import os, signal
torch.set_num_threads(2)
import dataclasses
wide = build(dataclasses.replace(model.config, vocab_size=512, n_embd=256, n_hidden=700)).eval()
prompt = torch.arange(30)
here = rehead.generate(wide, prompt, 20, 0)
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(0 if torch.equal(rehead.generate(wide, prompt, 20, 0), here) else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.get_num_threads() == 2
""")


def test_ids_on_another_device_are_refused_before_a_cache_counts_them(attacked):
    attacked("""
for decode in (decoding.decoder(model), decoding.torch_decoder(model)):
    cache = model.new_cache(2)
    try:
        new_logits(decode, cache, ids.to("meta"))
    except UsageError as error:
        assert str(error) == "ids are on meta and the model is on the CPU. Use ids.cpu().", error
    else:
        raise AssertionError("no error")
    assert cache[0].length == 0
""")


@built
def test_a_decoder_goes_on_in_a_forked_process(attacked):
    attacked("""
import os, signal
torch.set_num_threads(2)
decode, alone = decoding.decoder(model), decoding.decoder(model)
cache, other = model.new_cache(2), model.new_cache(2)
new_logits(decode, cache), new_logits(alone, other)
second = new_logits(alone, other)
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(0 if torch.equal(new_logits(decode, cache), second) else 1)
assert os.waitpid(child, 0)[1] == 0
""")


@built
def test_a_window_far_into_a_text_takes_the_memory_of_its_window(attacked):
    """The cosines and sines of the positions that are reached, not of all that may follow."""
    attacked("""
import dataclasses, resource
from rehead.generation import stream
near = dataclasses.replace(attention, window=8)
windowed = build(dataclasses.replace(model.config, attention=(near, near))).eval()
assert decoding.native_refusal(windowed) is None
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
list(stream(windowed, [ids], 100, 0))
before = peak()
few = stream(windowed, [ids], 3_000_000, 0)
for _ in range(5):
    next(few)
assert peak() - before < 150_000, peak() - before  # KiB; ids and noise are 48 MB, all tables 240 MB
""")
