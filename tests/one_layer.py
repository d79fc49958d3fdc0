"""One attention layer decoding by its program alone: x of the new tokens in, what they gather out."""

from dataclasses import dataclass

import torch

from rehead.attention.program import Op, Program
from rehead.decoding.lowering import stored_layers
from rehead.decoding.token import next_token
from rehead.decoding.torch_engine import TorchProgram, bind


@dataclass(eq=False)
class Given(Op):
    """The layer's input, which `decode` puts beside the ids."""

    width: int

    @property
    def shape(self):
        return 1, self.width


@bind.register
def _(op: Given, read):
    return lambda values, token: token.x


def one_layer(module):
    """(x (B, D), cache) to the module's output for one new token, by its program."""
    program = Program()
    program.call(module, program.add(Given(module.d_model)), module.d_model, 0)
    run, layers = TorchProgram(program), stored_layers(program)

    def decode(x, cache):
        with next_token(torch.zeros(len(x), dtype=torch.long), [cache], layers) as token:
            token.x = x
            return run(token)

    return decode
