"""Youtu-LLM: DeepSeek-V3's attention in a dense model whose embeddings are tied."""

from rehead.attention import LatentConfig
from rehead.attention.rope import Layout
from rehead.checkpoint.huggingface.base import Fields, Table, families, refuse
from rehead.checkpoint.huggingface.mla import LatentLike, interleaved_or_not
from rehead.config import GPTConfig


class Youtu(LatentLike):
    """No fields of experts at all."""

    architecture = "YoutuForCausalLM"
    tied = True

    def layout(self, fields: Fields) -> Layout:
        """Either."""
        return interleaved_or_not(fields)

    def said(self, config: GPTConfig, first: LatentConfig) -> Table:
        """The layout."""
        refuse({"scales": config.scaled}, self.architecture)
        assert first.rope is not None
        return {"rope_interleave": first.rope.layout == "interleaved"}


families.add("youtu")(Youtu())
