"""The model card of an exported folder: README.md, whose head the Hugging Face Hub reads."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rehead.config import GPTConfig
from rehead.conversion.certificate import Certificate
from rehead.conversion.origin import Origin, front
from rehead.conversion.page import page
from rehead.measure.quality import scores
from rehead.measure.stored import LOST, Storage

TASK = "text-generation"
NAMES = {
    "loss": "loss, nats per token",
    "perplexity": "perplexity per token",
    "bits_per_byte": "bits per byte",
}
CARD = """
# {name}

A `{architecture}`, written by rehead. It needs no code of its own:

```python
{code}
```

## Origin and licence

{origin}
"""
CODE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({where})
tokenizer = AutoTokenizer.from_pretrained({where})
ids = model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=50)
print(tokenizer.decode(ids[0]))"""
ALONE = """\
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({where})  # it came without a tokenizer"""
ROUNDED = """
What follows was measured with weights in {before}; those of this folder are in {now}.
"""
COMPUTE = """
This model may be stored in smaller formats, but should compute in bfloat16 or float32: in float16, the latent before
its norm keeps a few bits only.
"""
FORMATS = """
## Other number formats

Keep these weights in bfloat16 or float32. Rounded to float16, or to 8 bits as in llama.cpp's q8_0, these shares of
their rows lose more than {lost:.0%} of their size. Where many do, the model predicts noise:

| rows of | float16 | q8_0 |
|---|---:|---:|
{rows}

`rehead check FOLDER` measures what such formats cost.
"""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a card says. `before` is the certificate of the exported model, `made` that of a conversion by the export.

    `identity_norm` is whether the norm of a latent divides by its eps alone, `lost` are the shares of rows that smaller
    number formats lose, by weight and format. `dtype` is that of the folder's weights.
    """

    name: str
    architecture: str
    config: GPTConfig
    origin: Origin
    before: Certificate | None
    made: Certificate | None
    identity_norm: bool
    has_tokenizer: bool
    lost: Mapping[str, Mapping[Storage, float]]
    dtype: str

    def text(self) -> str:
        """Return the text of README.md."""
        kinds = list(dict.fromkeys(layer.name for layer in self.config.attention))
        facts = {
            "library_name": "transformers",
            "pipeline_tag": TASK,
            **self.origin.keys(),
            "tags": ["rehead", *kinds],
        }
        measured = self.made if self.made is not None and self.made.loss is not None else self.before
        as_measured = measured is not None and measured.dtype == self.dtype
        if measured is not None and as_measured and (results := metrics(measured)):
            facts["model-index"] = [{"name": self.name, "results": results}]
        body = CARD.format(
            name=self.name,
            architecture=self.architecture,
            code=(CODE if self.has_tokenizer else ALONE).format(where=json.dumps(self.name)),
            origin=self.origin.sentences(),
        )
        parts = [front(facts), body]
        if self.before is not None:
            if self.before.dtype != self.dtype:
                parts.append(ROUNDED.format(before=self.before.dtype, now=self.dtype))
            parts.append(_section(self.before, "Conversion"))
        if self.identity_norm:
            parts.append(COMPUTE)
        if self.made is not None:
            parts.append(_section(self.made, "Conversion" if self.before is None else "Export"))
        if self.lost:
            rows = [
                f"| `{name}` | {_share(share['fp16'])} | {_share(share['q8_0'])} |"
                for name, share in self.lost.items()
            ]
            parts.append(FORMATS.format(lost=LOST, rows="\n".join(rows)))
        return "".join(parts)


def metrics(certificate: Certificate) -> list[dict[str, Any]]:
    """Return the results of a model-index: what the certificate measured, on which text, in windows of which length.

    Bits per byte are left out of texts without bytes, as those that Python gave as ids.
    """
    test, loss = certificate.test, certificate.loss
    if test is None or loss is None:
        return []
    found = scores(loss[1], test.tokens - 1, test.bytes or 1)
    text = {
        "sha256": test.text_sha256,
        "sha256_of_ids": test.sha256,
        "bytes": test.bytes,
        "tokens": test.tokens,
        "tokens_read": test.read,
        "window": certificate.length,
    }
    return [
        {
            "task": {"type": TASK, "name": "language modelling"},
            "dataset": {
                "type": "text",
                "name": " ".join(test.name.split()) or "text",
                "args": {name: value for name, value in text.items() if value},
            },
            "metrics": [
                {"type": name, "value": found[name], "name": words}
                for name, words in NAMES.items()
                if test.bytes or name != "bits_per_byte"
            ],
        }
    ]


def _share(share: float) -> str:
    """Return a share of rows in per cent, never as 0 % if there are some."""
    return f"{share:.0%}" if share == 0 or share >= 0.01 else "< 1%"


def _section(certificate: Certificate, title: str) -> str:
    """Return a certificate as a section of the card."""
    lines: Sequence[str] = page(certificate).splitlines()
    return "\n".join(
        ["", f"## {title}", *(f"#{line}" if line[:2] == "##" else line for line in lines[1:]), ""]
    )
