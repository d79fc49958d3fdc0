"""What engines compute of DeepSeek's MLA: one table, from which `docs/engines.md` is written, too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from rehead.attention import LatentConfig, RopeConfig
from rehead.attention.rope import Layout
from rehead.attention.rope_scaling import LongRopeScaling, YarnScaling, scalings
from rehead.errors import ConfigError

Engine = Literal["transformers", "vllm", "sglang", "mlx", "llama.cpp"]
BOTH: tuple[Layout, ...] = ("interleaved", "half-split")
V3, V2 = "DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"
LONGROPE = "longrope with attention_factor"
"""longrope whose attention_factor is not 1."""
YARN = "yarn with attention_factor"
"""yarn whose magnitude is not that of its factor, or of mscale and mscale_all_dim together."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """How an engine reads a folder with MLA; what is not listed here it refuses or computes otherwise.

    `angles` maps a kind of rope to the layouts of the rotary part for which it computes transformers' angles.
    """

    name: str
    version: str
    known: str
    """From where these facts are known."""
    classes: tuple[str, ...]
    latent_eps: str
    """What the norm of the latent takes for its eps."""
    angles: Mapping[str, tuple[Layout, ...]]
    otherwise: str
    """What it does with other angles and layouts."""
    rows: tuple[int, ...] = ()
    """Sizes of latent and rotary part together; empty for any."""
    heads: tuple[tuple[int, int, int], ...] = field(default=())
    """Widths of a head that it takes: unrotated, rotated, value; empty for any."""
    biases: bool = False
    """Whether it adds the biases of `attention_bias`."""
    padded: bool = False
    """Whether exact exports are padded to DeepSeek's own sizes."""
    note: str = ""


ENGINES: Mapping[Engine, Facts] = MappingProxyType(
    {
        "transformers": Facts(
            name="transformers",
            version="5.23.0",
            known="run in `make test`",
            classes=(V3, V2, "YoutuForCausalLM", "MiniCPM3ForCausalLM"),
            latent_eps="1e-6",
            angles=dict.fromkeys(("default", *scalings, YARN, LONGROPE), BOTH),
            otherwise="nothing",
            biases=True,
        ),
        "vllm": Facts(
            name="vLLM",
            version="0.32.0",
            known="run in `make test-serving`",
            classes=(V3, V2),
            latent_eps="`rms_norm_eps`",
            angles={"default": ("interleaved",), "yarn": ("interleaved",)},
            otherwise="takes all scaled rope as yarn, and pairs as interleaved",
            rows=(320, 512, 576),
            heads=((128, 64, 128), (64, 64, 128), (192, 64, 256)),
            padded=True,
            note="needs `lm_head.weight`; on a CPU only rows of 576, and another rope kernel than its own "
            "([serving.md](serving.md#vllm))",
        ),
        "sglang": Facts(
            name="SGLang",
            version="0.5.23",
            known="read in its source",
            classes=(V3, V2),
            latent_eps="`rms_norm_eps`",
            angles={"default": BOTH, "yarn": BOTH},
            otherwise="takes all scaled rope as yarn",
            padded=True,
            note="other sizes than 512 + 64 with the triton backend only",
        ),
        "mlx": Facts(
            name="mlx-lm",
            version="0.32.2",
            known="run in `make test-serving`",
            classes=(V3,),
            latent_eps="1e-6",
            angles={
                "default": ("interleaved",),
                "linear": ("interleaved",),
                "llama3": ("interleaved",),
                "yarn": ("interleaved",),
                "longrope": ("half-split",),
            },
            otherwise="takes longrope's pairs as half-split and all others as interleaved, and leaves attention_factor "
            "out",
            biases=True,
            note="biases read in its source; V2, Youtu and MiniCPM3 are refused: see below",
        ),
        "llama.cpp": Facts(
            name="llama.cpp",
            version="b11549",
            known="run in `make test-serving`",
            classes=(V3, V2),
            latent_eps="`rms_norm_eps`",
            angles={"default": ("interleaved",)},
            otherwise="takes pairs as interleaved, and leaves the factors of longrope out; other scaled rope was not "
            "compared",
            note="`--format gguf` writes its file; its own converter leaves out the key "
            "`deepseek2.attention.q_lora_rank` of a model without one, which llama.cpp needs as 0",
        ),
    }
)


def kind(rope: RopeConfig) -> str:
    """Return the kind of angles of a rope, as in `Facts.angles`."""
    scaling = rope.scaling
    if scaling is None:
        return "default"
    if isinstance(scaling, LongRopeScaling) and scaling.magnitude != 1:
        return LONGROPE
    if isinstance(scaling, YarnScaling):
        own = scaling.attention_factor is not None and replace(scaling, attention_factor=None).magnitude
        lone = bool(scaling.mscale) != bool(scaling.mscale_all_dim)
        unscaled = (
            scaling.attention_factor == 1 and scaling.score_scale != 1
        )  # vLLM leaves the scores' factor out
        if own not in (False, scaling.magnitude) or lone or unscaled:
            return YARN
    return next(name for name in scalings if scalings[name] is type(scaling))


def require_served(layer: LatentConfig, architecture: str, engine: Engine) -> None:
    """Refuse by name what an engine has no field or kernel for, or would compute otherwise than transformers."""
    facts, rope = ENGINES[engine], layer.rope
    assert rope is not None
    row = layer.kv_lora_rank + layer.qk_rope_head_dim
    heads = (layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim)
    angles, layouts = kind(rope), facts.angles.get(kind(rope))
    wrong = {
        f"{architecture} (its MLA is for {_or(facts.classes)})": architecture not in facts.classes,
        f"kv_lora_rank + qk_rope_head_dim = {row} (it takes {_or(facts.rows)})": facts.rows
        and row not in facts.rows,
        f"heads of {heads} (it takes {_or(facts.heads)})": facts.heads and heads not in facts.heads,
        "biases (it leaves them out)": layer.down_bias and not facts.biases,
        f"scaled rope, {angles} (it {facts.otherwise})": layouts is None,
        f"rope_layout={rope.layout} with {angles} rope (it takes {_or(layouts or BOTH)} for granted)": layouts
        and rope.layout not in layouts,
    }
    found = [what for what, bad in wrong.items() if bad]
    if found:
        raise ConfigError(f"{facts.name} cannot serve this model's {'; '.join(found)}.")


def _or(those: Sequence[object]) -> str:
    return " or ".join(filter(None, (", ".join(map(str, those[:-1])), str(those[-1])))) if those else "any"
