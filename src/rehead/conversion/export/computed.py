"""What engines compute of each stock class: tables, from which `docs/engines.md` is written, too.

What is not listed they compute as transformers does. mlx-lm was run, vLLM and SGLang were read in their source.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from rehead.attention import GroupedConfig, RopeConfig
from rehead.attention.score import SoftCapped
from rehead.checkpoint.huggingface.base import Family, families, refuse
from rehead.config import GPTConfig
from rehead.conversion.export.engines import ENGINES, LONGROPE, YARN, Engine, kind

Checks = dict[str, Callable[[GPTConfig], bool]]
"""By the name of what an engine does not compute: whether a model has it."""
ALL = ("default", "linear", "llama3", "yarn", "longrope")
KINDS = (*ALL, YARN, LONGROPE)
"""All kinds of rope, as in `engines.kind`."""
PLAIN = ("default",)
FACTORLESS = (*ALL, LONGROPE)
"""Without yarn's attention_factor."""
EVERY = 6
"""mlx-lm's Gemma 3 has no window in every sixth layer, whatever config.json says."""
LAST = 61
"""mlx-lm's DeepSeek-V3 leaves out the layer with this index: in V3 itself, it predicts a second token."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What an engine computes of a class: kinds of rope, and what it does not."""

    ropes: tuple[str, ...] = KINDS
    refused: Checks = field(default_factory=dict)
    """What it has no parameter for, or takes otherwise without an error, by name."""


def _windows(config: GPTConfig) -> bool:
    return any(layer.window is not None for layer in config.attention)


def _some_windows(config: GPTConfig) -> bool:
    return _windows(config) and not _every_window(config)


def _every_window(config: GPTConfig) -> bool:
    return all(layer.window is not None for layer in config.attention)


def _biases(config: GPTConfig) -> bool:
    return any(layer.qkv_bias or layer.o_bias for layer in _heads(config))


def _head_dim(config: GPTConfig) -> bool:
    return any(layer.head_dim * layer.n_query_head != config.n_embd for layer in _heads(config))


def _partial(config: GPTConfig) -> bool:
    return any(rope.partial_rotary_factor != 1 for rope in _ropes(config))


def _uncapped(config: GPTConfig) -> bool:
    return config.logit_softcap is None or not all(
        isinstance(layer.score, SoftCapped) for layer in _heads(config)
    )


def _other_windows(config: GPTConfig) -> bool:
    slides = [layer.window is not None for layer in config.attention]
    return slides != [(index + 1) % EVERY != 0 for index in range(len(slides))] or len(slides) < EVERY


def _not_every_second(config: GPTConfig) -> bool:
    return any((layer.window is None) == (index % 2 == 0) for index, layer in enumerate(config.attention))


def _scaled_local(config: GPTConfig) -> bool:
    return any(
        layer.window is not None and layer.rope is not None and layer.rope.scaling is not None
        for layer in _heads(config)
    )


def _rounded_root(config: GPTConfig) -> bool:
    return float(torch.tensor(config.embed_scale).bfloat16()) != config.embed_scale


MLP_BIASES: Checks = {"biases in the MLP": lambda config: config.mlp_bias}
WINDOWS: Checks = {"windows": _windows}
BIASES: Checks = {"biases": _biases}
SOME_WINDOWS: Checks = {"windows in some layers only": _some_windows}
HEADS: Checks = {"head_dim other than n_embd / n_query_head": _head_dim}
HIDDEN: Checks = {"n_hidden other than 4 n_embd": lambda config: config.n_hidden != 4 * config.n_embd}
UNTIED: Checks = {"untied output head": lambda config: not config.tie_embeddings}
EXACT: Checks = {"exact gelu": lambda config: config.mlp == "gelu_erf"}
TIED: Checks = {"tied output head": lambda config: config.tie_embeddings}
MLX: Mapping[str, Computed] = MappingProxyType(
    {
        "llama": Computed(ropes=ALL, refused={}),
        "mistral": Computed(ropes=ALL, refused=WINDOWS),
        "qwen2": Computed(ropes=ALL, refused=WINDOWS),
        "qwen3": Computed(ropes=ALL, refused=WINDOWS | BIASES),
        "smollm3": Computed(ropes=ALL, refused={"window in every layer": _every_window}),
        "granite": Computed(ropes=ALL, refused=HEADS),
        "olmo2": Computed(ropes=ALL, refused={}),
        "phi3": Computed(ropes=PLAIN, refused=WINDOWS | HEADS),
        "glm": Computed(ropes=PLAIN, refused={"partial_rotary_factor": _partial}),
        "glm4": Computed(ropes=PLAIN, refused=TIED),
        "gemma2": Computed(
            ropes=PLAIN, refused=WINDOWS | BIASES | UNTIED | {"scores or logits without a cap": _uncapped}
        ),
        "gemma3_text": Computed(
            ropes=ALL,
            refused=BIASES
            | {
                f"windows in other layers than all but every {EVERY}th": _other_windows,
                "cap of the logits": lambda config: config.logit_softcap is not None,
                "embed_scale that bfloat16 rounds": _rounded_root,
            },
        ),
        "gpt2": Computed(ropes=(), refused=HIDDEN | UNTIED | EXACT),
        "gpt_neox": Computed(
            ropes=PLAIN,
            refused=HIDDEN | TIED | EXACT | {"attention without biases": lambda config: not _biases(config)},
        ),
        "qwen3_moe": Computed(ropes=PLAIN, refused=WINDOWS | BIASES),
        "deepseek_v3": Computed(ropes=ALL, refused={f"layer {LAST}": lambda config: config.n_layer > LAST}),
    }
)
"""mlx-lm, by the name of the family."""
VLLM: Mapping[str, Computed] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "granite", "phi3", "gemma3_text", "gpt2"), Computed()),
        **dict.fromkeys(("smollm3", "olmo2", "glm", "gpt_neox"), Computed()),  # by transformers' own code
        "qwen2": Computed(refused=SOME_WINDOWS),
        "qwen3": Computed(refused=SOME_WINDOWS | BIASES),
        "qwen3_moe": Computed(refused=BIASES),
        "glm4": Computed(ropes=(*ALL[:-1], YARN)),
        "gemma2": Computed(refused=UNTIED),
    }
)
SGLANG: Mapping[str, Computed] = MappingProxyType(
    {
        **dict.fromkeys(("glm", "gpt_neox"), Computed()),  # by transformers' own code
        "smollm3": Computed(refused=WINDOWS),
        "llama": Computed(ropes=FACTORLESS, refused=MLP_BIASES),
        "mistral": Computed(ropes=FACTORLESS, refused=WINDOWS),
        "phi3": Computed(refused=WINDOWS),
        "qwen2": Computed(ropes=FACTORLESS, refused=WINDOWS),
        "qwen3": Computed(ropes=FACTORLESS, refused=WINDOWS),
        "qwen3_moe": Computed(ropes=FACTORLESS, refused=WINDOWS | TIED),
        "granite": Computed(ropes=FACTORLESS, refused=BIASES | MLP_BIASES),
        "olmo2": Computed(ropes=FACTORLESS),
        "glm4": Computed(ropes=ALL[:-1]),
        "gemma2": Computed(
            ropes=PLAIN, refused=UNTIED | {"windows in other layers than every second": _not_every_second}
        ),
        "gemma3_text": Computed(refused=UNTIED | {"scaled rope in layers with a window": _scaled_local}),
        "gpt2": Computed(refused=UNTIED),
    }
)
COMPUTED: Mapping[Engine, Mapping[str, Computed]] = MappingProxyType(
    {"mlx": MLX, "vllm": VLLM, "sglang": SGLANG}
)
"""By engine and the name of the family. For MLA, `engines.ENGINES` has the rest, and refuses what is missing here."""


def not_computed(config: GPTConfig, family: Family, engine: Engine) -> dict[str, bool]:
    """Return by name what an engine does not compute of a class, or computes otherwise than transformers."""
    computed = COMPUTED.get(engine, {}).get(families.name_of(family), Computed())
    found = {name: bad(config) for name, bad in computed.refused.items()}
    ropes = {kind(rope) for rope in _ropes(config)} - set(computed.ropes)
    return found | {f"scaled rope, {name}": True for name in sorted(ropes)}


def require_computed(config: GPTConfig, family: Family, engine: Engine) -> None:
    """Refuse by name what an engine does not compute of a class, or computes otherwise than transformers."""
    found = not_computed(config, family, engine)
    refuse(found, f"{ENGINES[engine].name}'s {family.architecture}", "does not compute")


def _heads(config: GPTConfig) -> list[GroupedConfig]:
    return [layer for layer in config.attention if isinstance(layer, GroupedConfig)]


def _ropes(config: GPTConfig) -> list[RopeConfig]:
    return [layer.rope for layer in _heads(config) if layer.rope is not None]
