"""Youtu-LLM: DeepSeek-V3's attention in a dense model whose embeddings are tied."""

from rehead.attention import LatentConfig
from rehead.attention.rope import Layout
from rehead.checkpoint.huggingface.base import Fields, Table, families
from rehead.checkpoint.huggingface.mla import LatentLike, has_layout, interleaved_or_not
from rehead.config import GPTConfig


class Youtu(LatentLike):
    """MLA without any keys of experts."""

    architecture = "YoutuForCausalLM"
    tied = True

    def layout(self, fields: Fields) -> Layout:
        """Return the layout that config.json names."""
        return interleaved_or_not(fields)

    def unsupported(self, config: GPTConfig, first: LatentConfig) -> dict[str, bool]:
        """Name what this class cannot represent: scales too."""
        return super().unsupported(config, first) | {"scales": config.scaled}

    def extra_json(self, config: GPTConfig, first: LatentConfig) -> Table:
        """Return the layout."""
        return super().extra_json(config, first) | {"rope_interleave": has_layout(first, "interleaved")}


families.add("youtu")(Youtu())
