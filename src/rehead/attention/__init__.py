"""Attention layers, usable without the rest of rehead. Importing a module here registers its variants."""

from rehead.attention.base import Attention, AttentionConfig, variants
from rehead.attention.cache import LayerCache
from rehead.attention.grouped import GroupedAttention
from rehead.attention.grouped_config import GroupedConfig
from rehead.attention.latent import LatentAttention
from rehead.attention.latent_config import LatentConfig
from rehead.attention.mask import EMPTY, Mask, visible
from rehead.attention.rope import RopeConfig
from rehead.attention.rope_scaling import scalings
from rehead.attention.score import scores
from rehead.attention.summed import SummedAttention, SummedConfig

__all__ = [
    "EMPTY",
    "Attention",
    "AttentionConfig",
    "GroupedAttention",
    "GroupedConfig",
    "LatentAttention",
    "LatentConfig",
    "LayerCache",
    "Mask",
    "RopeConfig",
    "SummedAttention",
    "SummedConfig",
    "scalings",
    "scores",
    "variants",
    "visible",
]
