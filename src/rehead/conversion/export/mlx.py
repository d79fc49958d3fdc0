"""What mlx-lm computes of each stock class: one table, from which `docs/engines.md` is written, too."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from rehead.attention import GroupedConfig, RopeConfig
from rehead.attention.score import SoftCapped
from rehead.checkpoint.huggingface.base import Family, families, refuse
from rehead.checkpoint.huggingface.gpt2 import GPT2
from rehead.config import GPTConfig
from rehead.conversion.export.engines import kind

Checks = dict[str, Callable[[GPTConfig], bool]]
"""By the name of what mlx-lm does not compute: whether a model has it."""
ALL = ("default", "linear", "llama3", "yarn", "longrope")
PLAIN = ("default",)
EVERY = 6
"""mlx-lm's Gemma 3 has no window in every sixth layer, whatever config.json says."""
LAST = 61
"""mlx-lm's DeepSeek-V3 leaves out a layer of this number: that of V3 predicts a second token."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What mlx-lm computes of a class: kinds of rope as in `engines.kind`, and what it does not."""

    ropes: tuple[str, ...] = ALL
    refused: Checks
    """What it has no parameter for, or takes otherwise without an error, by name."""


def _windows(config: GPTConfig) -> bool:
    return any(layer.window is not None for layer in config.attention)


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


def _rounded_root(config: GPTConfig) -> bool:
    return float(torch.tensor(config.embed_scale).bfloat16()) != config.embed_scale


WINDOWS: Checks = {"windows": _windows}
BIASES: Checks = {"biases": _biases}
HEADS: Checks = {"head_dim other than n_embd / n_query_head": _head_dim}
HIDDEN: Checks = {"n_hidden other than 4 n_embd": lambda config: config.n_hidden != 4 * config.n_embd}
UNTIED: Checks = {"head apart from the embeddings": lambda config: not config.tie_embeddings}
EXACT: Checks = {"exact gelu": lambda config: config.mlp == "gelu_erf"}
TIED: Checks = {"head tied to the embeddings": lambda config: config.tie_embeddings}
COMPUTED: Mapping[str, Computed] = MappingProxyType(
    {
        "llama": Computed(refused={}),
        "mistral": Computed(refused=WINDOWS),
        "qwen2": Computed(refused=WINDOWS),
        "qwen3": Computed(refused=WINDOWS | BIASES),
        "smollm3": Computed(refused={"window in every layer": _every_window}),
        "granite": Computed(refused=HEADS),
        "olmo2": Computed(refused={}),
        "phi3": Computed(ropes=PLAIN, refused=WINDOWS | HEADS),
        "glm": Computed(ropes=PLAIN, refused={"partial_rotary_factor": _partial}),
        "glm4": Computed(ropes=PLAIN, refused=TIED),
        "gemma2": Computed(
            ropes=PLAIN, refused=WINDOWS | BIASES | UNTIED | {"scores or logits without a cap": _uncapped}
        ),
        "gemma3_text": Computed(
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
        "deepseek_v3": Computed(refused={f"layer {LAST}": lambda config: config.n_layer > LAST}),
    }
)
"""By the name of the family. For MLA, `engines.ENGINES` has the rest, and refuses the classes that are missing here."""


def require_computed(config: GPTConfig, family: Family) -> None:
    """Refuse by name what mlx-lm does not compute of a class, or computes otherwise than transformers."""
    computed = COMPUTED.get(families.name_of(family))
    if computed is None:
        return
    found = {name: bad(config) for name, bad in computed.refused.items()}
    for name in sorted({kind(rope) for rope in _ropes(config)} - set(computed.ropes)):
        found[f"scaled rope, {name}"] = True
    refuse(found, f"mlx-lm's {family.architecture}", "does not compute")


def written_for_mlx(family: Family) -> Family:
    """Return the family with the names of weights that mlx-lm reads: GPT-2's without their prefix."""
    return GPT2(prefix="") if isinstance(family, GPT2) else family


def _heads(config: GPTConfig) -> list[GroupedConfig]:
    return [layer for layer in config.attention if isinstance(layer, GroupedConfig)]


def _ropes(config: GPTConfig) -> list[RopeConfig]:
    return [layer.rope for layer in _heads(config) if layer.rope is not None]
