"""Youtu-LLM: DeepSeek-V3's attention in a dense model whose embeddings are tied."""

from rehead.checkpoint.huggingface.base import families
from rehead.checkpoint.huggingface.mla import LatentLike


class Youtu(LatentLike):
    """MLA without any keys of experts."""

    architecture = "YoutuForCausalLM"
    tied = True
    zeroes_padding = True


families.add("youtu")(Youtu())
