"""Initialisation of a model's weights: one rule per kind of weight.

| weight                                        | drawn from                       |
|-----------------------------------------------|----------------------------------|
| embeddings, linear layers                     | N(0, 0.02)                       |
| o_proj, down_proj (write to the stream)       | N(0, 0.02 / sqrt(2 n_layer))     |
| biases, norms                                 | 0; 1 (zero-centered norms: 0)    |
| learned scores                                | defined by their module          |

The rules are GPT-2's, as in minGPT.
"""

import math

from torch import nn


def initialise(model: nn.Module, n_layer: int) -> None:
    """Initialise the linear layers and embeddings of a decoder in place; its other weights are left as they are."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            writes = name.endswith(("o_proj", "down_proj"))
            nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * n_layer) if writes else 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
