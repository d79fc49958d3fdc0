"""A model folder as one that other software loads: stock classes, their names, a card."""

from pathlib import Path

from rehead.checkpoint import families, load, read_at, stock
from rehead.config import ModelConfig
from rehead.conversion.certificate import CERTIFICATE, Certificate
from rehead.conversion.folder import require_apart, tokenizer_of
from rehead.conversion.page import PAGE, page
from rehead.conversion.serve import to_deepseek
from rehead.errors import ConfigError
from rehead.model import LanguageModel

DEEPSEEK = "deepseek_v3"
CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A `{architecture}`, written by rehead. It needs no code of its own:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
```
{certificate}"""


def export_folder(source: Path, destination: Path, kind: str = "auto") -> tuple[str, Certificate | None]:
    """Write the model in `source` as a stock folder of family `kind`; return its class.

    `auto` takes the first family that can say all of the model and, where none can, DeepSeek's, into
    which MQA and models without rope convert exactly. Raises ConfigError naming what the class cannot say.
    """
    require_apart(source, destination)
    model, tokenizer = read_at(source, lambda place: (load(place), tokenizer_of(place)))
    name = _choose(model.config) if kind == "auto" else kind
    certificate = None
    if name == DEEPSEEK and not _says(name, model):
        model, certificate = to_deepseek(model)
    family = families[name]
    proof = (
        "" if certificate is None else "\n" + page(certificate).replace("# Conversion", "## Conversion", 1)
    )
    card = CARD.format(name=destination.name, architecture=family.architecture, certificate=proof)
    files = {"README.md": card}
    if certificate is not None:
        files |= {CERTIFICATE: certificate.to_json(), PAGE: page(certificate)}
    if tokenizer is not None:
        files["tokenizer.json"] = tokenizer.to_json()
    stock.export(model, destination, family, files)
    return family.architecture, certificate


def _choose(config: ModelConfig) -> str:
    try:
        return families.name_of(stock.fitting(config))
    except ConfigError:
        return DEEPSEEK


def _says(name: str, model: LanguageModel) -> bool:
    try:
        families[name].write(model.config)  # type: ignore[arg-type]
    except ConfigError:
        return False
    return True
