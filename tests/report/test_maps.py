"""The figure of attention maps: all weights in it, and nothing of its tokens but text."""

import base64
import json
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from rehead.errors import UsageError
from rehead.report import maps, page
from rehead.report.text import LONGEST_LABEL, token_labels

PAYLOADS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg/onload=alert(1)>",
    "</style><b>",
    "</figure>",
    "javascript:alert(1)",
    "\u202egnp.exe",
    "&lt;i&gt;",
    "]]>-->",
    "\x00\x1b[31m",
    "x" * 1_000_000,
]


class Seen(HTMLParser):
    """Tags, attributes and visible text of a page."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attributes]

    def handle_data(self, data):
        self.text.append(data)


def drawn():
    n_token = len(PAYLOADS)
    torch.set_default_dtype(torch.float32)
    scores = torch.randn(3, n_token, n_token).masked_fill(
        torch.ones(n_token, n_token).triu(1) > 0, -torch.inf
    )
    return [scores.softmax(-1), scores[:2].softmax(-1)]


def test_payloads_are_text_and_nothing_else():
    plain = Seen(maps.fragment("a", list("abcdefghijk"), drawn(), [None, None]))
    hostile = Seen(maps.fragment(" ".join(PAYLOADS[:-1]), PAYLOADS, drawn(), [None, None]))
    assert hostile.tags == plain.tags
    assert [one[:2] for one in hostile.attributes] == [one[:2] for one in plain.attributes]
    about = json.loads(next(value for _, name, value in hostile.attributes if name == "data-about"))
    assert about["tokens"][:2] == ["<script>alert(1)</scrip…", '"><img·src=x·onerror=al…']
    assert about["tokens"][6] == "\\u202egnp.exe"
    assert max(map(len, about["tokens"])) == LONGEST_LABEL


def test_labels_show_what_does_not_print():
    assert token_labels([" is", "\n", "\t", "é", "\u200b", "", "\u2028", "\ud800"]) == [
        "·is",
        "↵",
        "⇥",
        "é",
        "\\u200b",
        "",
        "\\u2028",
        "\\ud800",
    ]


def test_the_weights_come_back_within_their_rounding():
    weights = drawn()
    weights[0][0, 5, :] = torch.tensor([1e-9, 0.249, 0.75] + [0.0] * 8)
    text = Seen(maps.fragment("a", PAYLOADS, weights, [None, 4]))
    packed = next(value for _, name, value in text.attributes if name == "data-weights")
    cells = np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype=np.uint8)
    given = torch.cat([one.flatten() for one in weights])
    back = torch.from_numpy(cells.copy()).double() / 255
    tiny = (given > 0) & (given.sqrt() < 0.5 / 255)
    assert tiny.any()
    assert (back[tiny] == 1 / 255).all()
    assert (back - given.double().sqrt())[~tiny].abs().max() < 0.5001 / 255
    assert ((back == 0) == (given == 0)).all()
    about = json.loads(next(value for _, name, value in text.attributes if name == "data-about"))
    assert [len(layer["entropy"]) for layer in about["layers"]] == [3, 2]
    assert about["layers"][1]["even"] < about["layers"][0]["even"]


def test_a_page_loads_nothing():
    seen = Seen(page.page("<title>", maps.fragment("a", PAYLOADS, drawn(), [None, None]), maps.script()))
    loading = ("src", "href", "action", "srcset", "data", "poster")
    assert not [one for one in seen.attributes if one[1] in loading or one[1].startswith("on")]
    assert seen.tags.count("script") == 1
    policy = next(value for tag, name, value in seen.attributes if (tag, name) == ("meta", "content"))
    assert policy.startswith("default-src 'none'")


def test_too_many_weights_for_a_page():
    weights = [torch.zeros(1, 1, 1).expand(40, 2000, 2000)]
    with pytest.raises(UsageError, match=r"160,000,000 weights.*1264 tokens or fewer"):
        maps.fragment("a", ["x"] * 2000, weights, [None])


def test_the_window_of_each_layer_is_in_the_figure():
    """maps.js says it of the layer that is shown."""
    figure = maps.fragment("a", list("abcd"), [torch.ones(1, 4, 4)] * 2, [2, None])
    about = json.loads(next(value for _, name, value in Seen(figure).attributes if name == "data-about"))
    assert [layer["window"] for layer in about["layers"]] == [2, None]
