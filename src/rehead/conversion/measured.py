"""The attentions of a conversion whose ranks, or whose rotary width, are found by measuring."""

from collections.abc import Sequence
from dataclasses import replace

from rehead.attention import AttentionConfig, LatentConfig
from rehead.conversion.converter import Converter
from rehead.conversion.frequencies import require_rotation
from rehead.conversion.ranks import PROBE_TOKENS, Allocation, require_loss
from rehead.conversion.split import best_split
from rehead.conversion.target import Target
from rehead.errors import UsageError


def require_measurable(target: Target, max_loss: float | None) -> None:
    """Refuse a target that leaves nothing to measure, or sets it twice."""
    if target.target == "canonical" or (target.target == "uneven" and max_loss is not None):
        given = "--measured-ranks" if max_loss is None else "--max-loss"
        raise UsageError(
            f"{given} is for latents with rebuilt keys. Leave out --target {target.target}, or give --kv-fraction "
            "alone."
        )
    if max_loss is not None:
        require_loss(max_loss)
    if target.target == "uneven" and target.kv_fraction is None:
        raise UsageError("with --target uneven, --measured-ranks needs --kv-fraction. Give it alone.")
    if target.to != "mla" or target.kv_rank is not None or (target.kv_fraction is None) == (max_loss is None):
        raise UsageError(
            "ranks are measured for --to mla with either --kv-fraction or --max-loss. Give one of them."
        )
    if target.n_kv_head is not None:
        raise UsageError(
            f"--n-kv-head {target.n_kv_head}: ranks are measured for the KV heads there are. Leave it out, or convert "
            "with --to gqa first."
        )
    if target.target == "uneven" and target.rope_dim is not None:
        raise UsageError(
            f"--measured-ranks finds how many numbers rotate. Leave it out, or --rope-dim {target.rope_dim}."
        )


def require_rebuilt(layers: Sequence[AttentionConfig]) -> None:
    """Refuse ranks of their own for layers with a rotary part: stock classes have one rank for all."""
    if any(isinstance(layer, LatentConfig) and layer.qk_rope_head_dim for layer in layers):
        raise UsageError(
            "ranks are measured for latents with rebuilt keys, and this MLA has a rotary part. Give --kv-fraction or "
            "--kv-rank alone."
        )


def require_measured_on(some: object) -> None:
    """Refuse to measure ranks without a text."""
    if not some:
        raise UsageError("ranks are measured on a text: give --calibration TEXT.")


def measured_layers(
    converter: Converter, target: Target, measured: bool, max_loss: float | None
) -> tuple[Sequence[AttentionConfig], int]:
    """Return the attention of each layer, and the number of tokens that it was chosen on.

    It is what the target says or, if `measured`, what loses least. Latents with rebuilt keys get a rank of their own
    in each layer, within the budget or a loss of `max_loss`; an uneven target gets the best rotary width for all.
    Raises UsageError without a text to measure on.
    """
    if not measured and max_loss is None:
        return converter.attentions(target), 0
    require_rotation(target, converter.config.attention)
    require_rebuilt(converter.config.attention)
    require_measured_on(converter.calibration)
    if target.target == "uneven":
        return best_split(converter, target)
    allocation = Allocation(converter, replace(target, kv_fraction=None))
    if max_loss is not None:
        return allocation.at_loss(max_loss), PROBE_TOKENS
    assert target.kv_fraction is not None
    return allocation.within(target.kv_fraction), PROBE_TOKENS
