"""A whole model into another, in memory, with its certificate."""

import copy
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rehead.attention import Attention, AttentionConfig
from rehead.checkpoint.deferred import changed, made
from rehead.checkpoint.shards import Shards
from rehead.checkpoint.writing import write_weights
from rehead.config import GPTConfig, ModelConfig
from rehead.conversion.base import Converted, Evidence, Step, Weights, require_method
from rehead.conversion.certificate import Certificate, Outcome, Text, certify, require_different
from rehead.conversion.moments import attentions, gather
from rehead.conversion.path import path
from rehead.conversion.target import Wish
from rehead.data import Batch, Ids, evaluation_blocks, require_vocabulary
from rehead.errors import ConfigError, NumericError
from rehead.model import LanguageModel, skeleton
from rehead.registry import nearest

CALIBRATION_TOKENS = 32_768
TEST_TOKENS = 65_536
"""At most; blocks are spread evenly over the text."""
LONGEST_BLOCK = 2048
"""However far the model reads."""
BATCH_TOKENS, BATCH_LOGITS = 4096, 2**27
RANDOM_BLOCKS = 4
FEW = 2**22
"""Numbers looked at together."""

Layers = list[tuple[AttentionConfig, Weights]]


def convert(
    model: LanguageModel,
    to: str | AttentionConfig | Sequence[AttentionConfig] | GPTConfig,
    *,
    method: str | None = None,
    calibration: Ids | None = None,
    test: Ids | None = None,
    seed: int = 0,
    scratch: Path | None = None,
    **wish: Any,
) -> tuple[LanguageModel, Certificate]:
    """Turn every layer of a GPT into the attention asked for; the source is left as it is.

    `to` is a config for all layers, one per layer, a model config, or a name: mha, gqa, mqa, mla or
    reduced, with the fields of `Wish` (`n_kv_head`, `kv_rank`, `kv_fraction`, `head_map`,
    `rope_layout`) beside it. `calibration` and `test` are token ids (N,); approximations fit themselves to
    the first, the certificate measures on the second (without it, logits on random tokens). `method` is
    one of `rehead.conversion.methods()`; without it the best that has what it needs. In a folder
    `scratch` the new weights are kept, deferred, instead of in memory: see `rehead.load`.

    Raises ConfigError where no conversion leads there, NumericError for weights that are not finite.
    """
    calibration, test = (None if ids is None else np.asarray(ids) for ids in (calibration, test))
    limits = ((calibration, CALIBRATION_TOKENS), (test, TEST_TOKENS))
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed={seed}. Use 0 up to {2**63 - 1}.")
    texts = [None if ids is None else Text.of(ids, limit) for ids, limit in limits]
    require_different(*texts)
    converter = Converter(model, method, calibration, scratch)
    shared, outcomes = converter.follow(_targets(converter.config, to, wish))
    measured = random_blocks(converter.config, seed) if test is None else blocks_of(model, test, TEST_TOKENS)
    result = copy.deepcopy(shared)
    fitted = texts[0] if any(method for outcome in outcomes for method in outcome.methods) else None
    certificate = certify(model, result, outcomes, measured, calibration=fitted, test=texts[1], seed=seed)
    return result, certificate


def require_heads(model: LanguageModel) -> GPTConfig:
    """The config of a model with attention and finite weights."""
    if not isinstance(model.config, GPTConfig):
        raise ConfigError(
            f"a model of type {model.config.model_type} has no heads to convert: only a gpt does."
        )
    for name, weight in model.named_parameters():
        if not _finite(made(weight)):
            raise NumericError(
                f"{name} holds NaN or infinity: this model is damaged. Go back to one that is not."
            )
    return model.config


def blocks_of(model: LanguageModel, ids: Ids, limit: int = CALIBRATION_TOKENS) -> list[Batch]:
    """Blocks as long as the model reads, at most `limit` tokens spread over a text."""
    require_vocabulary(ids, model.config.vocab_size)
    length = block_length(model.config)
    most = min(BATCH_TOKENS, BATCH_LOGITS // model.config.vocab_size)
    return list(evaluation_blocks(ids, length, max(1, most // length), max(1, limit // length)))


def block_length(config: ModelConfig) -> int:
    """Tokens read at once."""
    return min(config.block_size, LONGEST_BLOCK)


def random_blocks(config: GPTConfig, seed: int) -> list[Batch]:
    """Tokens without meaning, for a model without a text."""
    length = block_length(config)
    ids = np.random.default_rng(seed).integers(config.vocab_size, size=RANDOM_BLOCKS * length + 1)
    return list(evaluation_blocks(ids, length, 1 if length == LONGEST_BLOCK else RANDOM_BLOCKS))


def _finite(weight: Tensor) -> bool:
    """Whether all numbers are; looked at in parts, for what a comparison makes on its way."""
    return all(bool(part.isfinite().all()) for part in weight.flatten().split(FEW))


def _require_holds(weights: Weights, dtype: torch.dtype, where: str) -> None:
    """Refuse new weights that the model's dtype cannot hold."""
    for name, weight in weights.items():
        if not _finite(made(weight).to(dtype)):
            kind = str(dtype).removeprefix("torch.")
            raise NumericError(
                f"{where}.{name} leaves the range of {kind}: convert the model in bfloat16 or float32."
            )


def _targets(
    config: GPTConfig, to: str | AttentionConfig | Sequence[AttentionConfig] | GPTConfig, wish: dict[str, Any]
) -> Sequence[AttentionConfig]:
    known = [field.name for field in fields(Wish)]
    for name in wish:
        if name not in known:
            raise ConfigError(f"unknown field {name!r} of a wish.{nearest(name, known)}")
    if isinstance(to, str):
        asked = Wish(to=to, **wish)
        return [asked.target(layer, config.n_embd) for layer in config.attention]
    if wish:
        raise ConfigError(f"{', '.join(wish)} beside a config: the config says it all. Give one of them.")
    if isinstance(to, GPTConfig):
        if replace(to, attention=config.attention) != config:
            raise ConfigError(
                "the two models differ beyond their attention: conversions change nothing else."
            )
        return to.attention
    layers = [to] * config.n_layer if isinstance(to, AttentionConfig) else list(to)
    if len(layers) != config.n_layer:
        raise ConfigError(
            f"{len(layers)} attentions for {config.n_layer} layers: give one per layer, or one."
        )
    return layers


class Converter:
    """A model on its way to others. What the text shows of it is gathered once."""

    def __init__(
        self,
        model: LanguageModel,
        method: str | None = None,
        calibration: Ids | None = None,
        scratch: Path | None = None,
    ) -> None:
        self.model, self.method, self.scratch = model, method, scratch
        self.config = require_heads(model)
        self.blocks = None if calibration is None else blocks_of(model, calibration)
        self._evidence: dict[bool, list[Evidence]] = {}

    def follow(self, targets: Sequence[AttentionConfig]) -> tuple[LanguageModel, list[Outcome]]:
        """The model with `targets` for attentions, sharing all other weights with the source.

        All layers take their first step together, then their second, so that an approximation further
        on looks at the model as it then is.
        """
        pairs = zip(self.config.attention, targets, strict=True)
        paths = [path(old, new, self.config.n_embd) for old, new in pairs]
        require_method(self.method, [step for steps in paths for step in steps])
        layers: Layers = [
            (
                one.config,
                {
                    name: changed(Tensor.double, weight.detach().cpu())
                    for name, weight in one.named_parameters()
                },
            )
            for one in attentions(self.model)
        ]
        outcomes = [Outcome(steps=steps, methods=[], converted=[]) for steps in paths]
        for turn in range(max(map(len, paths))):
            at = {index: steps[turn] for index, steps in enumerate(paths) if turn < len(steps)}
            chosen = {
                i: step.method(self.method, calibrated=self.blocks is not None) for i, step in at.items()
            }
            needs = {
                need for i, step in at.items() if chosen[i] for need in step.conversion.methods[chosen[i]]
            }
            seen = [Evidence()] * len(layers)
            if any(chosen.values()):
                seen = self._gather(layers, turn, gradients="outputs" in needs)
            for index, step in at.items():
                done = self._take(step, layers[index][1], seen[index], chosen[index])
                if step is paths[index][-1]:
                    _require_holds(done.weights, self.model.head.weight.dtype, f"layers.{index}.self_attn")
                layers[index] = step.result, done.weights
                outcomes[index] = outcomes[index].after(chosen[index], done)
        return with_layers(self.model, layers), outcomes

    def _take(self, step: Step, weights: Weights, seen: Evidence, method: str) -> Converted:
        """One step of one layer; its weights in memory, or in a file that goes away with the last of them."""
        weights = {name: made(weight) for name, weight in weights.items()}
        done = step.conversion.convert(weights, step.source, step.result, seen, method)
        if self.scratch is None:
            return done
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            write_weights(Path(folder), done.weights)
            shards = Shards(Path(folder))
        return replace(done, weights={name: shards.deferred(name) for name in shards.entries})

    def _gather(self, layers: Layers, turn: int, *, gradients: bool) -> list[Evidence]:
        if self.blocks is None:
            return [Evidence()] * len(layers)
        if turn > 0:
            return gather(with_layers(self.model, layers), self.blocks, gradients=gradients)
        if gradients not in self._evidence:
            self._evidence[gradients] = gather(self.model, self.blocks, gradients=gradients)
        return self._evidence[gradients]


def with_layers(model: LanguageModel, layers: Iterable[tuple[AttentionConfig, Weights]]) -> LanguageModel:
    """`model` with other attentions, in its dtype, on its device, in eval mode; the rest is shared."""
    layers = list(layers)
    assert isinstance(model.config, GPTConfig)
    other = skeleton(replace(model.config, attention=tuple(config for config, _ in layers)))
    dtype, device = model.head.weight.dtype, model.device
    names = {module: name for name, module in model.named_modules() if isinstance(module, Attention)}
    state = {
        name: weight.detach()
        for name, weight in model.state_dict().items()
        if not name.startswith(tuple(f"{prefix}." for prefix in names.values()))
    }
    for prefix, (_, weights) in zip(names.values(), layers, strict=True):
        state |= {
            f"{prefix}.{name}": changed(lambda exact: exact.to(dtype), weight).to(device)
            for name, weight in weights.items()
        }
    other.load_state_dict(state, assign=True)
    other.tie()
    return other.eval()
