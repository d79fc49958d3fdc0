"""Where a GGUF file says that its model comes from, as the head of a Hugging Face model card."""

from collections.abc import Iterable, Iterator
from typing import Any

from rehead.checkpoint.hub import CARD, HUB
from rehead.config.strict_yaml import dump

KEYS = {
    "license": "general.license",
    "license_name": "general.license.name",
    "license_link": "general.license.link",
}
"""Keys of a card, and of a GGUF file."""
OWN = ("general.source.repo_url", "general.repo_url")
"""Keys that name the repository of the model itself."""
MOST_BASES = 8


def card_of(facts: dict[str, Any]) -> dict[str, str]:
    """Return the card of an imported model, as a file by name; none of a file that names no licence and no origin."""
    table: dict[str, Any] = {
        key: facts[name] for key, name in KEYS.items() if isinstance(facts.get(name), str)
    }
    own = list(_repositories(facts, OWN))[:1]
    bases = (f"general.base_model.{index}.repo_url" for index in range(MOST_BASES))
    if found := own or list(_repositories(facts, bases)):
        table["base_model"] = found[0] if len(found) == 1 else found
    if not table:
        return {}
    return {
        CARD: f"---\n{dump(table)}---\n\nImported from a GGUF file, which names this licence or origin.\n"
    }


def _repositories(facts: dict[str, Any], keys: Iterable[str]) -> Iterator[str]:
    """Yield org/name of the models of the Hugging Face Hub that some keys name."""
    for key in keys:
        url = facts.get(key)
        if isinstance(url, str) and url.startswith(HUB):
            yield url.removeprefix(HUB).strip("/")
