"""The attentions of a conversion whose ranks, or whose rotary width, are found by measuring."""

from collections.abc import Sequence
from dataclasses import replace

from rehead.attention import AttentionConfig
from rehead.conversion.converter import Converter
from rehead.conversion.ranks import Allocation, require_loss
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
    if target.target == "uneven" and target.rope_dim is not None:
        raise UsageError(
            f"--measured-ranks finds how many numbers rotate. Leave it out, or --rope-dim {target.rope_dim}."
        )


def require_measured_on(some: object) -> None:
    """Refuse to measure ranks without a text."""
    if not some:
        raise UsageError("ranks are measured on a text: give --calibration TEXT.")


def measured_layers(
    converter: Converter, target: Target, measured: bool, max_loss: float | None
) -> Sequence[AttentionConfig]:
    """Return the attention of each layer: as the target says or, if `measured`, as it loses least.

    Latents with rebuilt keys get a rank of their own in each layer, within the budget or a loss of `max_loss`; an
    uneven target gets the best rotary width for all layers. Raises UsageError without a text to measure on.
    """
    if not measured and max_loss is None:
        return converter.attentions(target)
    require_measured_on(converter.calibration)
    if target.target == "uneven":
        return best_split(converter, target)
    allocation = Allocation(converter, replace(target, kv_fraction=None))
    if max_loss is not None:
        return allocation.at_loss(max_loss)
    assert target.kv_fraction is not None
    return allocation.within(target.kv_fraction)
