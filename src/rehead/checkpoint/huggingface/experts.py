"""The words for experts in config.json, and the names of their weights; those of Qwen3-MoE, DeepSeek-V2 and V3."""

from collections.abc import Iterator
from typing import Any

from rehead.checkpoint.huggingface.base import Fields, Table
from rehead.config import ExpertsConfig
from rehead.errors import InvalidInput

MLP = ("gate_proj", "up_proj", "down_proj")


def take_number(fields: Fields, default: int, *names: str) -> int:
    """Return the number of experts of a layer, which has several names; those that are given must agree."""
    given = {name: fields.take(name, int, None, null=None) for name in names}
    numbers = {number for number in given.values() if number is not None}
    if len(numbers) > 1:
        raise InvalidInput(
            f"{fields.where}: {' and '.join(f'{name}={value}' for name, value in given.items())} contradict each "
            "other: remove one."
        )
    return numbers.pop() if numbers else default


def read_deepseek(fields: Fields, n_layer: int, defaults: Table, **router: Any) -> Table:
    """Return the experts of DeepSeek's classes, in all layers after the first dense ones; none if all are dense.

    `defaults` has the class's defaults for missing keys, and as `alias` its other name for `n_routed_experts`; a key
    without a default must be present. `router` are the fields that say how experts are chosen.
    """

    def take(name: str) -> int:
        size: int = fields.take(name, int, defaults.get(name, ...))
        return size

    dense = take("first_k_dense_replace")
    if dense < 0:
        raise InvalidInput(f"{fields.where}: first_k_dense_replace={dense}. Use 0 to {n_layer}.")
    if dense >= n_layer:
        return {}
    n_shared = take("n_shared_experts")
    if n_shared < 1:
        raise InvalidInput(
            f"{fields.where}: n_shared_experts={n_shared}: this class needs one. Use 1 or more."
        )
    fields.expect("moe_layer_freq", 1)
    experts = ExpertsConfig(
        layers=tuple(range(dense, n_layer)),
        n_routed_experts=take_number(
            fields, defaults["n_routed_experts"], "n_routed_experts", defaults["alias"]
        ),
        num_experts_per_tok=take("num_experts_per_tok"),
        moe_intermediate_size=take("moe_intermediate_size"),
        n_shared_experts=n_shared,
        routed_scaling_factor=fields.take("routed_scaling_factor", float, defaults["routed_scaling_factor"]),
        **router,
    )
    return {"experts": experts}


def write_deepseek(experts: ExpertsConfig | None, n_layer: int) -> Table:
    """Return the keys of experts; without any, such that no layer has some."""
    if experts is None:
        return {
            "first_k_dense_replace": n_layer,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
        }
    return {
        "first_k_dense_replace": experts.layers[0],
        "n_routed_experts": experts.n_routed_experts,
        "n_shared_experts": experts.n_shared_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "moe_intermediate_size": experts.moe_intermediate_size,
        "norm_topk_prob": experts.norm_topk_prob,
        "routed_scaling_factor": experts.routed_scaling_factor,
        "scoring_func": experts.scoring_func,
    }


def unsayable(experts: ExpertsConfig | None, n_layer: int, scoring: str) -> dict[str, bool]:
    """Name, for `refuse`, what DeepSeek's classes cannot represent."""
    if experts is None:
        return {}
    return {
        "experts, chosen in another way,": experts.scoring_func != scoring,
        "experts without shared ones": not experts.n_shared_experts,
        "experts, which are not in all later layers,": experts.layers
        != tuple(range(experts.layers[0], n_layer)),
    }


def expert_names(experts: ExpertsConfig) -> Iterator[str]:
    """Yield the names of a layer's weights, those of its router first."""
    yield "mlp.gate.weight"
    if experts.has_correction:
        yield "mlp.gate.e_score_correction_bias"
    parts = [f"experts.{index}" for index in range(experts.n_routed_experts)]
    parts += ["shared_experts"] if experts.n_shared_experts else []
    for part in parts:
        yield from (f"mlp.{part}.{name}.weight" for name in MLP)
