"""One training iteration of the homework's model, beside minGPT, nanoGPT and transformers' GPT-2."""

import contextlib
import importlib
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import Arm, Case, Cases, Setting
from torch import Tensor, nn

from rehead.config import GPTConfig, ModelOptions, TrainerOptions
from rehead.data import BatchSampler
from rehead.measure.size import forward_flops
from rehead.model import LanguageModel, build, evaluating
from rehead.training.loop import Trainer

VOCABULARY, BLOCK, BATCH, LAYERS, HEADS, WIDTH = 65, 128, 64, 6, 6, 192
RATE, BETAS, DECAY, CLIP = 5e-4, (0.9, 0.95), 0.1, 1.0
AT_LEAST = {"minGPT": 1.7, "nanoGPT": 1.35, "transformers GPT-2": 1.35}


def cases(setting: Setting) -> Cases:
    """With the homework's dropout, without; then what is not the default."""
    for dropout in (0.1, 0.0):
        model = ours(dropout, setting)
        yield Case(
            name=f"one iteration, {LAYERS} layers, {HEADS} heads, {WIDTH} wide, {BATCH} x {BLOCK}, dropout {dropout}",
            ours=Arm(iteration(model, setting), lambda model=model: logits(model, setting)),
            peers=dict(peers(model, dropout, setting)),
            at_least=AT_LEAST if dropout else {"nanoGPT": 1.1},
            flops=model_flops(model),
            of_ceiling=None if dropout else 0.65,
        )
    model = ours(0.1, setting)
    ways = {"bfloat16": {"dtype": "bfloat16"}, "torch.compile": {"compile": True}}
    yield Case(
        name=f"the default, float32 and eager, {BATCH} x {BLOCK}, dropout 0.1",
        ours=with_loss(iteration(model, setting)),
        peers={
            f"rehead with {name}": with_loss(iteration(model, setting, **options))
            for name, options in ways.items()
        },
        tolerance=1e-2,
    )


def ours(dropout: float, setting: Setting) -> LanguageModel:
    """The homework's model."""
    torch.manual_seed(0)
    pdrops = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), dropout)
    options = ModelOptions(n_layer=LAYERS, n_query_head=HEADS, n_embd=WIDTH, **pdrops)
    return build(options.resolve(VOCABULARY, BLOCK)).to(setting.device)


def model_flops(model: LanguageModel) -> float:
    """Of one iteration; of the scores only those that causality leaves."""
    config = model.config
    assert isinstance(config, GPTConfig)
    pairs = sum(layer.attention_flops(BLOCK) for layer in config.attention) / 2
    return 3 * BATCH * BLOCK * (forward_flops(config, BLOCK) - pairs)


def iteration(model: LanguageModel, setting: Setting, **options: Any) -> Callable[[], Any]:
    """What `rehead train` does for a step, its sampler included, on a copy of the model."""
    copy = build(model.config).to(setting.device)
    copy.load_state_dict(model.state_dict())
    rates = {"learning_rate": RATE, "beta1": BETAS[0], "beta2": BETAS[1], "weight_decay": DECAY}
    trainer = Trainer(copy, TrainerOptions(**rates, grad_norm_clip=CLIP, **options))
    ids = np.random.default_rng(0).integers(VOCABULARY, size=1_000_000).astype(np.uint16)
    sampler = BatchSampler(ids, BLOCK, BATCH, seed=0)
    return lambda: trainer.advance(sampler.next)


def with_loss(run: Callable[[], Any]) -> Arm:
    """Timed; what must be equal is the loss of its first step."""
    return Arm(run, lambda: torch.tensor(run()["loss"]))


def batch(setting: Setting) -> tuple[Tensor, Tensor]:
    """Inputs and targets for the peers, whose data cost nothing."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (BATCH, BLOCK + 1), generator=draw).to(setting.device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@torch.no_grad()
def logits(model: nn.Module, setting: Setting) -> Tensor:
    """Of one batch, without dropout."""
    inputs, targets = batch(setting)
    with evaluating(model):
        found = model(inputs) if isinstance(model, LanguageModel) else model(inputs, targets)
    return found if isinstance(found, Tensor) else found[0]


def peers(model: LanguageModel, dropout: float, setting: Setting) -> Iterator[tuple[str, Arm | str]]:
    """Each with our model's weights and its own optimizer."""
    weights = gpt2_names(model.state_dict())
    for name, make in (("minGPT", mingpt), ("nanoGPT", nanogpt), ("transformers GPT-2", transformers_gpt2)):
        try:
            found = make(dropout, setting)
        except ModuleNotFoundError as error:
            yield name, f"{error.name} is not there"
            continue
        peer, optimizer = found
        # theirs are the projections to fuse, and buffers of masks
        missing, unexpected = peer.load_state_dict(transposed(weights, peer), strict=False)
        assert not unexpected
        assert not [key for key in missing if not key.endswith("attn.bias")], missing
        peer = peer.to(setting.device).train()
        yield name, Arm(step(peer, optimizer, setting), lambda peer=peer: logits(peer, setting))


def step(peer: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting) -> Callable[[], Any]:
    """The iteration of minGPT's and nanoGPT's loops: loss, gradients, clipping, optimizer."""
    inputs, targets = batch(setting)

    def run() -> float:
        loss = peer(inputs, targets)[1]
        loss.backward()
        nn.utils.clip_grad_norm_(peer.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return run


def mingpt(dropout: float, setting: Setting) -> tuple[nn.Module, torch.optim.Optimizer]:
    """karpathy/minGPT, from a checkout."""
    made = checkout("minGPT", "mingpt.model", setting)
    config = made.GPT.get_default_config()
    config.model_type, config.vocab_size, config.block_size = None, VOCABULARY, BLOCK
    config.n_layer, config.n_head, config.n_embd = LAYERS, HEADS, WIDTH
    config.embd_pdrop = config.resid_pdrop = config.attn_pdrop = dropout
    with contextlib.redirect_stdout(io.StringIO()):
        model = made.GPT(config)
    options = checkout("minGPT", "mingpt.utils", setting).CfgNode(
        learning_rate=RATE, betas=BETAS, weight_decay=DECAY
    )
    return model, model.configure_optimizers(options)


def nanogpt(dropout: float, setting: Setting) -> tuple[nn.Module, torch.optim.Optimizer]:
    """karpathy/nanoGPT, from a checkout; its head untied from the embedding, as in the others."""
    made = checkout("nanoGPT", "model", setting)
    config = made.GPTConfig(
        block_size=BLOCK,
        vocab_size=VOCABULARY,
        n_layer=LAYERS,
        n_head=HEADS,
        n_embd=WIDTH,
        dropout=dropout,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        model = made.GPT(config)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return model, model.configure_optimizers(DECAY, RATE, BETAS, setting.device)


def transformers_gpt2(dropout: float, setting: Setting) -> tuple[nn.Module, torch.optim.Optimizer]:
    """GPT2LMHeadModel with SDPA, and the fused AdamW its Trainer takes by default."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=BLOCK,
        n_layer=LAYERS,
        n_head=HEADS,
        n_embd=WIDTH,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        attn_pdrop=dropout,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = WithLoss(GPT2LMHeadModel(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY, fused=True)
    return model, optimizer


class WithLoss(nn.Module):
    """Logits and loss, as minGPT and nanoGPT return them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Targets are shifted already."""
        found = self.model(inputs, use_cache=False).logits
        return found, F.cross_entropy(found.flatten(0, 1), targets.flatten())


def checkout(name: str, module: str, setting: Setting) -> Any:
    """A module of a repository that is no package."""
    place = None if setting.peers is None else setting.peers / name
    if place is None or not place.is_dir():
        raise ModuleNotFoundError(name=f"a checkout of {name}")
    sys.path.insert(0, str(place))
    try:
        return importlib.import_module(module)
    finally:
        sys.path.pop(0)


def gpt2_names(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under GPT-2's names, as linear layers hold them."""
    names = {
        "embed_tokens": "wte",
        "embed_positions": "wpe",
        "norm": "ln_f",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn.o_proj": "attn.c_proj",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    }
    found = {"lm_head.weight": ours["head.weight"]}
    for kind in ("weight", "bias"):
        for name, theirs in names.items():
            places = [""] if f"{name}.{kind}" in ours else [f"layers.{layer}." for layer in range(LAYERS)]
            for place in places:
                if f"{place}{name}.{kind}" in ours:
                    there = place.replace("layers.", "h.")
                    found[f"transformer.{there}{theirs}.{kind}"] = ours[f"{place}{name}.{kind}"]
        for layer in range(LAYERS):
            parts = [ours[f"layers.{layer}.self_attn.{letter}_proj.{kind}"] for letter in "qkv"]
            found[f"transformer.h.{layer}.attn.c_attn.{kind}"] = torch.cat(parts)
    return found


def transposed(weights: dict[str, Tensor], peer: nn.Module) -> dict[str, Tensor]:
    """As the peer holds them: transformers' GPT-2 multiplies from the other side."""
    if not isinstance(peer, WithLoss):
        return weights
    turn = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return {f"model.{name}": weight.T if name.endswith(turn) else weight for name, weight in weights.items()}
