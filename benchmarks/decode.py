"""Decoding beside transformers: whole models through `generate`, layers and attentions alone."""

import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from harness import Arm, Case, Cases, Setting
from torch import Tensor

from rehead import generation
from rehead.attention import LatentConfig
from rehead.attention.kernels import Call
from rehead.attention.kernels.continued import Continued
from rehead.attention.kernels.folded import FEW_QUERIES, Folded
from rehead.attention.kernels.sdpa import SDPA
from rehead.attention.kernels.token import attend_token
from rehead.attention.mask import Mask
from rehead.checkpoint import load
from rehead.decoding import torch_decoder
from rehead.generation import generate
from rehead.model import LanguageModel

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
ALONE = {"cpu": "rehead decoding by PyTorch", "cuda": "rehead without CUDA graphs"}
GENERATION: Any = generation
"""Whose `decoder` is replaced."""
DYNAMIC, STATIC = "transformers generate, dynamic cache", "transformers generate, static cache"


def cases(setting: Setting) -> Cases:
    """Small to large: char GPT, GPT-2 small, Llama's shape, MLA."""
    theirs, ours = gpt2(setting, vocab_size=65, n_positions=256, n_embd=192, n_layer=6, n_head=6)
    ids = torch.randint(1, 65, (1, 10), device=setting.device)
    yield Case(
        name="6-layer 192-wide char GPT, 200 tokens",
        ours=Arm(lambda: generate(ours, ids, 200, 0)),
        peers={
            DYNAMIC: Arm(greedy(theirs, ids, 200)),
            ALONE[setting.device]: Arm(alone(lambda: generate(ours, ids, 200, 0))),
        },
        at_least={DYNAMIC: 6},
    )
    eight = ids.expand(8, -1)
    yield Case(
        name="the same, 8 samples of 200 tokens from one prompt",
        ours=Arm(
            lambda: generate(ours, eight, 200, 1.0, seed=range(8)), lambda: generate(ours, eight, 200, 0)
        ),
        peers={
            "8 runs of transformers generate": Arm(
                lambda: [greedy(theirs, ids, 200, sample=True)() for _ in range(8)],
                lambda: greedy(theirs, eight, 200)(),
            )
        },
        at_least={"8 runs of transformers generate": 10},
    )
    theirs, ours = gpt2(setting, n_positions=1024)
    ids = torch.randint(1, 50257, (1, 192), device=setting.device)
    yield Case(
        name="GPT-2 small, 128 tokens after 128, the prompt's included",
        ours=Arm(lambda: generate(ours, ids[:, :128], 128, 0)),
        peers={DYNAMIC: Arm(greedy(theirs, ids[:, :128], 128))},
        at_least={DYNAMIC: 2},
    )
    weights = [weight for name, weight in ours.named_parameters() if "embed" not in name]
    yield Case(
        name="GPT-2 small, one token at 192",
        ours=Arm(one_token(ours, ids)),
        peers={ALONE[setting.device]: Arm(alone(one_token(ours, ids)))},
        n_bytes=sum(weight.nbytes for weight in weights) + ours.head.weight.nbytes,
        of_ceiling=0.7,
    )
    yield from llama_shape(setting)
    for dtype in (torch.float32, torch.bfloat16):
        yield latent(setting, dtype)
    for n_query in (32, 128, 192, 512):
        yield crossover(setting, n_query)
    for dtype in (torch.float32, torch.bfloat16):
        for n_query in (4, 8, 16, 64):
            yield few(setting, n_query, dtype)


def gpt2(setting: Setting, **sizes: int) -> tuple[Any, LanguageModel]:
    """A random GPT-2 of transformers, and ours with its weights."""
    config = transformers.GPT2Config(
        **sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, bos_token_id=None, eos_token_id=None
    )
    return both(transformers.GPT2LMHeadModel(config), setting)


def both(theirs: Any, setting: Setting) -> tuple[Any, LanguageModel]:
    """A model of transformers, and ours read from its folder."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(Path(folder))
        return theirs.eval().to(setting.device), load(folder, device=setting.device).eval()


def greedy(model: Any, ids: Tensor, n_new: int, sample: bool = False, **given: Any) -> Callable[[], Tensor]:
    """`generate` of transformers, exactly `n_new` tokens. A 0 among `ids` is padding to it, which nothing sees."""

    @torch.no_grad()
    def run() -> Tensor:
        return model.generate(
            ids,
            max_new_tokens=n_new,
            min_new_tokens=n_new,
            do_sample=sample,
            pad_token_id=0,
            **given,
        )

    return run


def steps(model: LanguageModel) -> Any:
    """PyTorch's way, on any device."""
    return torch_decoder(model)


def alone(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The same by PyTorch's steps."""

    @contextmanager
    def without() -> Any:
        fast = GENERATION.decoder
        GENERATION.decoder = steps
        try:
            yield
        finally:
            GENERATION.decoder = fast

    def slower() -> Tensor:
        with without():
            return run()

    return slower


def one_token(model: LanguageModel, ids: Tensor, cache: Any = None) -> Callable[[], Tensor]:
    """The logits after one token more, always at the same place; the prompt is read once, before."""
    n_token = ids.shape[1]
    if cache is None:
        cache = model.new_cache(len(ids), n_token + 8)
        with torch.inference_mode():
            model.hidden(ids, cache=cache)
    token = ids[:, -1].contiguous()
    decoders: dict[Any, Any] = {}

    @torch.inference_mode()
    def run() -> Tensor:
        way = GENERATION.decoder
        if way not in decoders:
            decoders[way] = way(model)
        for layer in cache:
            layer.length = n_token
        return decoders[way](token, cache)

    return run


def llama_shape(setting: Setting) -> Cases:
    """32 query and 8 KV heads of 64, bfloat16, batch 4, context 4096: the attention alone, then 4 layers."""
    batch, n_token, dtype, device = 4, 4096, torch.bfloat16, setting.device
    query = torch.randn(batch, 32, 1, 64, device=device, dtype=dtype)
    key, value = (torch.randn(batch, 8, n_token, 64, device=device, dtype=dtype) for _ in range(2))
    folded = query.view(batch * 8, 4, 64), key.flatten(0, 1), value.flatten(0, 1)
    yield Case(
        name="attention of 32/8 heads of 64, batch 4, context 4096",
        ours=Arm(lambda: attend_token(*folded, 64**-0.5).view(batch, 32, 1, 64)),
        peers={
            "SDPA enable_gqa": Arm(lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True))
        },
        at_least={"SDPA enable_gqa": 8},
        n_bytes=key.nbytes + value.nbytes,
        dtype=dtype,
    )
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=2048, intermediate_size=5632, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=8192, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    theirs, ours = both(transformers.LlamaForCausalLM(config).to(dtype), setting)
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config).to(device)  # its angles were cast as well
    ids = torch.randint(1, 4096, (batch, n_token + 1), device=device)
    remembered = [
        [torch.randn(batch, 8, n_token, 64, device=device, dtype=dtype) for _ in range(2)] for _ in range(4)
    ]
    cache = ours.new_cache(batch, n_token + 9)
    dynamic = transformers.DynamicCache(config=theirs.config)
    static = transformers.StaticCache(config=theirs.config, max_cache_len=n_token + 9)
    for index, (layer, (key, value)) in enumerate(zip(cache, remembered, strict=True)):
        layer.append(key=key.transpose(1, 2), value=value.transpose(1, 2))
        dynamic.update(key, value, index)
        static.update(key, value, index)

    @torch.inference_mode()
    def eight() -> Tensor:
        decode = GENERATION.decoder(ours)
        for layer in cache:
            layer.length = n_token
        token = ids[:, -1].contiguous()
        for _ in range(8):
            token = decode(token, cache).argmax(-1)
        return token

    def rewound(past: Any, run: Callable[[], Any]) -> Callable[[], Any]:
        def again() -> Any:
            if past is dynamic:
                forget(past, n_token)
            else:
                for layer in past.layers:
                    layer.cumulative_length.fill_(n_token)
            return run()

        return again

    @torch.no_grad()
    def logits(past: Any) -> Tensor:
        where = torch.arange(n_token, n_token + 1, device=device)[None].expand(batch, -1)
        return theirs(ids[:, -1:], position_ids=where, past_key_values=past).logits[:, -1]

    yield Case(
        name="4 layers of it, 2048 wide, 8 tokens after 4096",
        ours=Arm(eight, one_token(ours, ids[:, 1:], cache)),
        peers={
            name: Arm(
                rewound(past, greedy(theirs, ids, 8, past_key_values=past)),
                rewound(past, lambda past=past: logits(past)),
            )
            for name, past in ((DYNAMIC, dynamic), (STATIC, static))
        }
        | {ALONE[setting.device]: Arm(alone(eight), alone(one_token(ours, ids[:, 1:], cache)))},
        at_least={DYNAMIC: 2, STATIC: 2},
        dtype=dtype,
    )


def forget(cache: Any, n_token: int) -> None:
    """All but the first tokens."""
    more = cache.get_seq_length() - n_token
    if more:
        cache.crop(-more)


def latent(setting: Setting, dtype: torch.dtype) -> Case:
    """One layer of DeepSeek's attention: 32 heads, a latent of 512 and 64 rotated, context 4096.

    A model of that layer and hardly anything else on both sides, as only whole models are decoded natively.
    """
    n_token, width, device = 4096, 2048, setting.device
    config = transformers.DeepseekV3Config(
        hidden_size=width, num_attention_heads=32, num_key_value_heads=32, kv_lora_rank=512, q_lora_rank=None,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, rope_interleave=False,
        max_position_embeddings=8192, num_hidden_layers=1, first_k_dense_replace=1, intermediate_size=64,
        vocab_size=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    theirs, ours = both(transformers.DeepseekV3ForCausalLM(config).to(dtype), setting)
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config).to(device)  # its angles were cast as well
    ids = torch.randint(64, (1, n_token), device=device)
    rows = torch.randn(1, n_token, 576, device=device, dtype=dtype)
    cache = ours.new_cache(1, n_token + 1)
    cache[0].append(latent=rows)
    past = transformers.DynamicCache()
    past.update(rows[:, None, :, :512], rows[:, None, :, 512:], 0)
    where = torch.full((1, 1), n_token, device=device)

    @torch.no_grad()
    def peer() -> Tensor:
        forget(past, n_token)
        return theirs(ids[:, -1:], position_ids=where, past_key_values=past).logits[:, -1]

    run = one_token(ours, ids, cache)
    return Case(
        name="one MLA layer, 32 heads, latent 512 + 64, context 4096",
        ours=Arm(run),
        peers={"transformers DeepseekV3Attention, its cache": Arm(peer), ALONE[device]: Arm(alone(run))},
        at_least={"transformers DeepseekV3Attention, its cache": 25},
        dtype=dtype,
    )


def crossover(setting: Setting, n_query: int) -> Case:
    """Several new tokens after 4096 of a latent of 512: expanded beside absorbed, which fewer FLOPs choose between."""
    n_token, device = 4096, setting.device
    config = LatentConfig(
        n_query_head=8, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    module = config.build(512).to(device).eval()
    query = torch.randn(1, n_query, 8, 192, device=device)
    rows = torch.randn(1, n_token + n_query, 576, device=device)
    mask = Mask(n_query=n_query, n_key=n_token + n_query)

    def way(name: str) -> Arm:
        @torch.inference_mode()
        def run() -> Tensor:
            return getattr(module, name)(query, rows, mask)

        return Arm(run)

    taken, other = ("absorbed", "expanded") if n_query < config.absorbs_below else ("expanded", "absorbed")
    return Case(
        name=f"MLA, {n_query} new tokens after 4096, latent 512: {taken} (crossover {config.absorbs_below:.0f})",
        ours=way(taken),
        peers={other: way(other)},
    )


def few(setting: Setting, n_query: int, dtype: torch.dtype) -> Case:
    """Several new tokens after 4096 of 32 query and 8 KV heads: folded beside what longer chunks take."""
    n_key, device = 4096 + n_query, setting.device
    query = torch.randn(1, n_query, 32, 64, device=device, dtype=dtype)
    key, value = (torch.randn(1, 8, n_key, 64, device=device, dtype=dtype).transpose(1, 2) for _ in range(2))
    call = Call(query, key, value, Mask(n_query=n_query, n_key=n_key), 64**-0.5)
    ways = {
        "folded": lambda: Folded().run(call),
        "in two parts": lambda: Continued().run(call),
        "SDPA with a mask": lambda: SDPA().run(call),
    }
    taken = "folded" if n_query <= FEW_QUERIES[dtype] else "in two parts"
    ours = ways.pop(taken)
    return Case(
        name=f"{n_query} new tokens after 4096, 32/8 heads: {taken}",
        ours=Arm(ours),
        peers={name: Arm(run) for name, run in ways.items()},
        dtype=dtype,
    )
