"""A study's page and pictures: nothing hostile gets through, whatever is missing leaves a report."""

import json
from html.parser import HTMLParser

import pytest

from rehead.report import study
from rehead.report.chart import COLOURS, Look
from rehead.report.figures import Figures, frontier
from rehead.report.interactive import figure, finite, plain
from rehead.report.text import LONGEST, harmless

PAYLOADS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style><b>",
    "<a href='javascript:alert(1)'>x</a>",
    "javascript:alert(1)",
    "\u202egnp.exe",
    "</script><script>alert(1)</script>",
    "{{ 7*7 }}{% raw %}",
    "$\\frac{$",
    "x" * 1_000_000,
]
LOADING = ("src", "href", "action", "srcset", "data", "poster", "xlink:href", "formaction")


class Seen(HTMLParser):
    """Tags, attributes and text of a page, without what is in scripts."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attributes]

    def handle_data(self, data):
        if self.tags and self.tags[-1] not in ("script", "style"):
            self.text += data


@pytest.fixture(autouse=True)
def _light(monkeypatch):
    """Without Plotly's own 5 MB, which html.parser would read for seconds."""
    monkeypatch.setattr("rehead.report.page.plotly", lambda: "<script></script>")


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_payloads_are_text_and_nothing_else(payload, made_up, attention, tmp_path):
    names = [f"{mark}{payload}" for mark in "ABCD"]
    page = study.html(made_up(payload, names), attention(names[:2], [payload, "b"]))
    hostile = Seen(page)
    harmless_page = Seen(study.html(made_up(), attention(tokens=["a", "b"])))
    assert hostile.tags == harmless_page.tags
    assert [one[:2] for one in hostile.attributes] == [one[:2] for one in harmless_page.attributes]
    assert not [one for one in hostile.attributes if one[1] in LOADING or one[1].startswith("on")]
    assert harmless(payload) in hostile.text
    assert "\u202e" not in page
    assert len(page) < 200_000
    for number, answer in enumerate(study.answers(made_up(payload, names))):
        for panel in answer.panels:
            study.draw(panel, tmp_path / f"{number}-{panel.name}.png")


def test_labels_of_charts_are_no_tags(made_up):
    """Plotly takes <b> and <a href> in a label for its own; escaped, they are shown."""
    names = [f"{mark}<a href='http://x'>y</a>" for mark in "ABCD"]
    found = Figures(made_up(names=names))
    for kind in ("loss", "frontier", "memory", "speed"):
        for chart in found.panel(kind, names).charts:
            text = json.dumps(figure(chart), allow_nan=False)
            assert "<a" not in text.replace("<extra>", "").replace("<br>", "")
            assert "&lt;a href='http://x'&gt;" in text


def test_long_text_is_cut_with_a_count():
    assert harmless("x" * 1000) == "x" * LONGEST + " … and 800 more characters"
    assert harmless("a\u202eb\x00c\ud800\n") == "a\\u202eb\\u0000c\\ud800\n"
    assert plain("<b>&") == "&lt;b&gt;&amp;"


def test_what_is_not_finite_is_a_gap(made_up):
    document = made_up(curve=[(0, 3.0, float("nan")), (2, 2.5, float("inf")), (4, 2.0, 2.1)])
    loss = Figures(document).panel("loss", ["A"])
    assert "NaN" not in json.dumps([figure(chart) for chart in loss.charts], allow_nan=False)
    assert finite([1.0, float("nan"), None, "x"]) == [1.0, None, None, "x"]


def test_claims_are_worded_by_what_the_seeds_allow(made_up):
    first, second = study.answers(made_up())[0].findings
    assert first == "B ends 0.4000 nats per token above A, over 2 seeds that do not overlap."
    assert second == "C and A are not told apart: +0.0750 nats per token, within the spread of 2 seeds."
    document = made_up()
    document["questions"][0]["claims"][0]["seeds"] = 1
    assert study.findings(document) == ["One seed each: no difference between losses is claimed."]


def test_the_page_says_what_was_shortened_and_who_made_what(made_up):
    text = Seen(study.html(made_up(text="words"), {})).text
    assert "Made at 50 % of the iterations" in text
    assert "rehead study words" in text
    assert text.count("rehead train words") == 8
    assert "1 torn line(s)" in text
    assert "flat curve is expected" in text
    assert "with a cache 1, 1, 1, ..., without 1, 2, 3, ..." in text
    assert "1,004 / 1,004 ✓" in text


def test_a_wrong_prediction_is_marked(made_up):
    document = made_up()
    document["variants"][0]["costs"]["cache_bytes_held"] += 4
    assert "4,096 / 4,100 B ✗" in Seen(study.html(document, {})).text


def test_a_variant_looks_the_same_everywhere(made_up):
    found = Figures(made_up())
    for kind in ("loss", "frontier", "memory", "speed"):
        for chart in found.panel(kind, ["D", "B"]).charts:
            for series in chart.series:
                name = series.y[0] if chart.kind == "bars" else series.name
                assert series.look == Look.of("ABCD".index(name))
    looks = [Look.of(index) for index in range(32)]
    assert len(set(looks)) == 32
    assert [look.colour for look in looks[:8]] == list(COLOURS)


def test_the_frontier_is_what_nothing_beats(made_up):
    document = made_up()
    assert frontier(document["variants"]) == ["C", "A"]
    points = [
        series
        for series in Figures(document).panel("frontier", list("ABCD")).charts[0].series
        if not series.faint
    ]
    assert [(series.x[0], series.marker) for series in points] == [
        (256, "circle"), (128, "circle"), (64, "diamond"), (64, "star"),
    ]  # fmt: skip


def test_seeds_are_a_mean_and_its_span(made_up):
    document = made_up()
    document["variants"][0]["runs"][1]["curve"] = [[0, 3.0, 3.3], [2, 1.0, 1.0], [4, 2.0, 2.5]]
    document["variants"][1]["runs"] = document["variants"][0]["runs"][1:]
    lines = Figures(document).panel("loss", ["A", "B"]).charts[0].series
    line, whole = (series for series in lines if not series.faint)
    assert whole.x == [2, 4]  # step 0 goes where there is more
    assert (line.x, line.y) == ([0, 4], pytest.approx([3.2, 2.3]))
    assert (line.low, line.high) == ([3.1, 2.1], [3.3, 2.5])


def test_no_evaluation_at_all_leaves_a_page(made_up):
    document = made_up(curve=[])
    assert [panel.name for panel in study.answers(document)[0].panels] == ["frontier"]
    assert Seen(study.html(document, {})).tags


def test_missing_packages_are_named_before_anything_is_trained(monkeypatch):
    monkeypatch.setattr(study, "find_spec", lambda name: None if name == "plotly" else name)
    with pytest.raises(study.UsageError, match=r'plotly: pip install "rehead\[report\]"'):
        study.require_packages()
