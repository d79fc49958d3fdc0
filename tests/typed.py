"""What a type checker sees of the public names; `mypy` reads this file, nothing runs it."""

from typing import assert_type

import torch
from torch import Tensor

import rehead
from rehead.attention import GroupedConfig, LatentConfig
from rehead.conversion.certificate import Certificate
from rehead.model import LanguageModel
from rehead.tokenizer import Tokenizer


def attentions(x: Tensor) -> None:
    """`attention(x)` is a tensor, not Any."""
    grouped = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=32).build(192)
    latent = LatentConfig(n_query_head=6, kv_lora_rank=48, qk_nope_head_dim=32, v_head_dim=32).build(192)
    assert_type(grouped(x), Tensor)
    assert_type(latent(x, cache=latent.config.cache(1)), Tensor)


def models() -> None:
    """From a folder to ids and back."""
    model, tokenizer = rehead.load("out/gqa"), rehead.load_tokenizer("out/gqa")
    assert_type(model, LanguageModel)
    assert_type(tokenizer, Tokenizer)
    assert_type(model(torch.zeros(1, 3, dtype=torch.long)), Tensor)
    assert_type(rehead.generate(model, tokenizer.encode("to be"), max_new_tokens=3), Tensor)
    assert_type(tokenizer.decode([1, 2]), str)
    assert_type(rehead.convert(model, "mqa"), tuple[LanguageModel, Certificate])
