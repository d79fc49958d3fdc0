"""Small models that tests build, around the attentions that a test is about."""

from rehead.config import GPTConfig


def llama_shaped(*attention, **others):
    """A config of Llama's shape, with one attention per layer."""
    settings = {
        "block_size": 64, "attention": attention, "learned_positions": False, "norm": "rmsnorm", "norm_eps": 1e-5,
        "mlp": "swiglu", "mlp_bias": False,
    }  # fmt: skip
    return GPTConfig(**settings | others)
