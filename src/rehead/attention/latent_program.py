"""One decoded token of latent attention as operations: what `LatentAttention.lower` appends."""

from typing import TYPE_CHECKING

from torch import nn

from rehead.attention.program import Attend, AttendRebuilt, InverseRMS, Norm, PerHead, Program, Rotate, Store
from rehead.attention.slot import Slot

if TYPE_CHECKING:
    from rehead.attention.latent import LatentAttention


def lower(module: "LatentAttention", program: Program, x: Slot, layer: int) -> Slot:
    """Append the operations of one token, absorbed as far as the keys allow; returns the output."""
    config = module.config
    H, N, P = config.n_query_head, config.qk_nope_head_dim, config.qk_rope_head_dim
    R, aside = config.kv_lora_rank, config.qk_norm_head_dim
    width = H * (aside or N + P)
    down: list[tuple[nn.Module, int]] = [(module.kv_a_proj_with_mqa, R + P)]
    if module.k_scale_proj is not None:
        down.append((module.k_scale_proj, config.n_kv_head * (aside or 0)))
    if config.q_lora_rank is None:
        query, latent, *scaling = program.linear(x, (module.q_proj, width), *down)
    else:
        query, latent, *scaling = program.linear(x, (module.q_a_proj, config.q_lora_rank), *down)
        query = program.add(Norm(query, module.q_a_layernorm))
        (query,) = program.linear(query, (module.q_b_proj, width))
    query = query.split(H)
    if module.q_norm is not None:
        query = program.add(Norm(query, module.q_norm))
    if module.q_up_proj is not None:
        query = program.add(PerHead(query, module._query_up(), transposed=True))
    rope, latent = latent.columns(R, P), latent.columns(0, R)
    if not isinstance(module.kv_a_layernorm, nn.Identity):
        latent = program.add(Norm(latent, module.kv_a_layernorm))
    key_up, value_up = module._ups()
    if config.rebuilds_keys:
        assert module.rotary is not None
        program.add(Store(layer, {"latent": (latent,)}))
        query = program.add(Rotate((query,), module.rotary))
        key_bias = None if module.kv_b_proj.bias is None else module._per_head(module.kv_b_proj.bias)[0]
        rebuilt = AttendRebuilt(layer, query, key_up, key_bias, module.k_norm, module.rotary, module.scale)
        context = program.add(rebuilt)
    else:
        row: tuple[Slot, ...] = (latent,)
        if module.k_norm is not None:
            assert module.k_norm.eps is not None
            key = program.add(PerHead(latent.repeated(config.n_kv_head), key_up, transposed=True))
            row = (latent, program.add(InverseRMS(key, module.k_norm.eps)).flat())
            key_up = (key_up * module.k_norm.weight[:, None]).detach()
        parts: tuple[Slot, ...] = (program.add(PerHead(query.columns(0, N), key_up)),)
        if module.rotary is not None:
            rotated = program.add(Rotate((query.columns(N, P), rope), module.rotary))
            row, parts = (*row, rotated.head(H, 1)), (*parts, rotated.head(0, H))
        for key in scaling:
            assert config.qk_norm_eps is not None
            row = *row, program.add(InverseRMS(key.split(config.n_kv_head), config.qk_norm_eps)).flat()
        program.add(Store(layer, {"latent": row}))
        n_scale = config.n_key_scale
        context = program.add(Attend(layer, parts, "latent", "latent", 1, R, module.scale, n_scale=n_scale))
    bias = None if module.kv_b_proj.bias is None else module._per_head(module.kv_b_proj.bias)[1]
    values = program.add(PerHead(context, value_up, bias, transposed=True))
    (output,) = program.linear(values.flat(), (module.o_proj, module.d_model))
    return output
