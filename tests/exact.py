"""What a model in float64 writes and predicts, beside which engines are held."""

import torch
from gguf_models import LETTERS

VOCAB = len(LETTERS)
PROMPTS = [[3, 14, 15, 9, 26], [7 * i % VOCAB for i in range(17)], [i * i % VOCAB for i in range(40)]]
CONTEXTS = [[(11 * i * i + 3 * i + start) % VOCAB for i in range(12)] for start in range(40)]
TRAINED = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "initializer_range": 0.08}
"""Sizes and weights with predictions as sharp as those of trained models."""


@torch.no_grad()
def logits(model, ids):
    """The logits of one of transformers' models, or of rehead's."""
    found = model(torch.tensor(ids))
    return getattr(found, "logits", found).double()


class Exact:
    """What a model in float64 writes after the prompts, and its logits and log-probabilities.

    `logits` are those after every token but the last, `logprobs` those at each token that is written.
    """

    def __init__(self, model, prompts=PROMPTS, n_new=24):
        self.model, self.prompts = model.double(), prompts
        self.tokens, self.logits, self.logprobs = [], [], []
        for prompt in prompts:
            whole = list(prompt)
            for _ in range(n_new):
                after = logits(self.model, [whole])[0]
                whole.append(int(after[-1].argmax()))
            self.tokens.append(whole[len(prompt) :])
            self.logits.append(after)
            self.logprobs.append(after[len(prompt) - 1 :].log_softmax(-1))
        best = torch.cat(self.logprobs).topk(2).values
        self.lead = float((best[:, 0] - best[:, 1]).min())

    def same(self, answer):
        """How many tokens are the same, all in all."""
        return sum(
            here == there
            for ours, theirs in zip(self.tokens, answer["tokens"], strict=True)
            for here, there in zip(ours, theirs, strict=False)
        )

    def apart(self, answer):
        """By how much the log-probability of an engine's own token is off, at most, up to the first other token."""
        off = []
        for ours, exact, tokens, found in zip(
            self.tokens, self.logprobs, answer["tokens"], answer["logprobs"], strict=True
        ):
            for one, row, token, step in zip(ours, exact, tokens, found, strict=False):
                off.append(abs(step[str(token)] - float(row[token])))
                if token != one:
                    break
        return max(off)

    def error(self, answer):
        """The largest error of an engine's logits, relative to the largest logit, up to the first other token."""
        off = []
        for prompt, ours, exact, tokens, found in zip(
            self.prompts, self.tokens, self.logits, answer["tokens"], answer["logits"], strict=True
        ):
            same = next(
                (i for i, pair in enumerate(zip(ours, tokens, strict=True)) if pair[0] != pair[1]), None
            )
            n_row = len(exact) if same is None else len(prompt) + same
            difference = torch.tensor(found[:n_row]).double() - exact[:n_row]
            off.append(float(difference.abs().max() / exact[:n_row].abs().max()))
        return max(off)


def divergence(model, contexts, found):
    """Mean KL in nats of an engine's log-probabilities after contexts of one length from the exact ones."""
    exact = logits(model, contexts)[:, -1].log_softmax(-1)
    return float((exact.exp() * (exact - found.double())).sum(-1).mean())
