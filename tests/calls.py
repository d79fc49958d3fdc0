"""Kernels as functions of tensors."""

from rehead.attention.kernels import Call


def by(kernel):
    """`attend` by this kernel, whether it would take the call or not."""

    def attend(query, key, value, mask, *, scale=None, score=None, pdrop=0.0):
        scale = key.shape[-1] ** -0.5 if scale is None else scale
        return kernel.run(Call(query, key, value, mask, scale, score, pdrop))

    return attend
