"""A rank for each layer: small where little is lost, found by measuring every layer at every rank."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rehead.attention import AttentionConfig, LatentConfig
from rehead.conversion.blocks import measured_blocks
from rehead.conversion.converter import Converter
from rehead.conversion.target import Target
from rehead.data import Batch
from rehead.errors import ConfigError
from rehead.measure.fidelity import Comparison, compare
from rehead.stages import staged

STEPS = 12
"""Ranks tried per layer: this many even steps up to the exact rank, and powers of two below the first."""
PROBE_TOKENS = 8_192


def require_loss(max_loss: float) -> None:
    """Refuse an allowed loss that is negative or not finite."""
    if not 0 <= max_loss < math.inf:
        raise ConfigError(f"max_loss={max_loss}: nats per token above the source's loss. Use 0 or more.")


class Allocation:
    """The damage of every layer of a model at every rank, measured once.

    A layer's damage is the KL to the source where that layer alone is converted, on the calibration texts.
    """

    def __init__(self, converter: Converter, target: Target) -> None:
        """`target` is an MLA without a rank."""
        self.converter, self.config = converter, converter.config
        share = PROBE_TOKENS // max(1, len(converter.calibration))
        self.probe: list[Batch] = [
            block
            for text in converter.calibration
            for block in measured_blocks(converter.model, text, converter.length, share)
        ]
        self.grids = [_grid(target.attention(layer, self.config.n_embd)) for layer in self.config.attention]
        tries = [(index, latent) for index, grid in enumerate(self.grids) for latent in grid]
        self.damages: list[list[float]] = [[] for _ in self.grids]
        for index, latent in staged(tries, "measuring each layer at each rank", len(tries), "conversions"):
            self.damages[index].append(self._measure(self._alone(index, latent)).kl)

    def within(self, kv_fraction: float) -> list[LatentConfig]:
        """Return the ranks of least summed damage whose cache is at most this share of the source's."""
        budget = kv_fraction * sum(layer.kv_numbers() for layer in self.config.attention)
        found = self._cheapest(budget)
        if found is None:
            least = sum(grid[0].kv_numbers() for grid in self.grids)
            raise ConfigError(
                f"kv_fraction={kv_fraction} leaves {budget:.0f} numbers, {least} are the least."
            )
        return found

    def at_loss(self, max_loss: float) -> list[LatentConfig]:
        """Return the ranks of the smallest cache whose measured loss is at most `max_loss` nats above the source's.

        Bisects the budget, measuring all layers converted together. Gives the exact ranks if nothing smaller will do.
        """
        require_loss(max_loss)
        most = [grid[-1] for grid in self.grids]
        whole = sum(latent.kv_numbers() for latent in most)
        steps = [whole * step / (8 * STEPS) for step in range(1, 8 * STEPS)]
        low, high = 0, len(steps)
        most_halvings = len(steps).bit_length()
        for _ in staged(range(most_halvings), "searching for the smallest cache", most_halvings, "sizes"):
            if low == high:
                break
            middle = (low + high) // 2
            found = self._cheapest(steps[middle])
            before, after = (0.0, float("inf")) if found is None else self._measure(found).losses
            low, high = (low, middle) if after - before <= max_loss else (middle + 1, high)
        return (self._cheapest(steps[low]) if low < len(steps) else None) or most

    def _alone(self, index: int, latent: LatentConfig) -> list[AttentionConfig]:
        return [*self.config.attention[:index], latent, *self.config.attention[index + 1 :]]

    def _measure(self, targets: Sequence[AttentionConfig]) -> Comparison:
        return compare(self.converter.model, self.converter.follow(targets)[0], self.probe)

    def _cheapest(self, budget: float) -> list[LatentConfig] | None:
        """Dynamic programming over the layers: for every cost so far, the choice of least damage."""
        best = np.full(math.floor(budget) + 1, np.inf)  # least damage for each cost, of the layers so far
        best[0] = 0.0
        choices = []
        for grid, damages in zip(self.grids, self.damages, strict=True):
            longer, choice = np.full_like(best, np.inf), np.zeros(len(best), dtype=np.int16)
            for at, (latent, more) in enumerate(zip(grid, damages, strict=True)):
                size = latent.kv_numbers()
                damage = best[: max(0, len(best) - size)] + more
                better = damage < longer[size:]
                longer[size:][better], choice[size:][better] = damage[better], at
            best = longer
            choices.append(choice)
        cost = int(best.argmin())
        if not np.isfinite(best[cost]):
            return None
        chosen = list[LatentConfig]()
        for grid, choice in zip(reversed(self.grids), reversed(choices), strict=True):
            chosen.append(grid[choice[cost]])
            cost -= chosen[-1].kv_numbers()
        return chosen[::-1]


def _grid(exact: AttentionConfig) -> list[LatentConfig]:
    assert isinstance(exact, LatentConfig)
    full = exact.kv_lora_rank
    ranks = {max(1, full * step // STEPS) for step in range(1, STEPS + 1)}
    ranks |= {2**power for power in range(full.bit_length()) if 2**power * STEPS < full}
    return [replace(exact, kv_lora_rank=rank) for rank in sorted(ranks)]
