"""A study's page and pictures: nothing hostile gets through, whatever is missing leaves a report."""

import json
import re
from html.parser import HTMLParser

import pytest

from rehead.report import interactive, page, study
from rehead.report.chart import COLOURS, DARK_COLOURS, Look
from rehead.report.figures import Figures, frontier
from rehead.report.interactive import finite, table
from rehead.report.plot import keys
from rehead.report.text import LONGEST, sanitise

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


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_payloads_are_text_and_nothing_else(payload, made_up, attention, tmp_path):
    names = [f"{mark}{payload}" for mark in "ABCD"]
    text = study.html(made_up(payload, names), attention(names[:2], [payload, "b"]))
    hostile = Seen(text)
    harmless_page = Seen(study.html(made_up(), attention(tokens=["a", "b"])))
    assert hostile.tags == harmless_page.tags
    assert [one[:2] for one in hostile.attributes] == [one[:2] for one in harmless_page.attributes]
    assert not [one for one in hostile.attributes if one[1] in LOADING or one[1].startswith("on")]
    assert sanitise(payload) in hostile.text
    assert "\u202e" not in text
    assert len(text) < 200_000
    for number, answer in enumerate(study.answers(made_up(payload, names))):
        for panel in answer.panels:
            study.draw(panel, tmp_path / f"{number}-{panel.name}.png")


def test_labels_of_charts_are_no_tags(made_up):
    names = [f"{mark}<a href='http://x'>y</a>" for mark in "ABCD"]
    found = Figures(made_up(names=names))
    for kind in ("loss", "frontier", "memory", "speed"):
        for chart in found.panel(kind, names).charts:
            text = interactive.fragment(chart)
            assert "<a" not in text
            assert "&lt;a href=" in text


def test_long_text_is_cut_with_a_count():
    assert sanitise("x" * 1000) == "x" * LONGEST + " … and 800 more characters"
    assert sanitise("a\u202eb\x00c\ud800\n") == "a\\u202eb\\u0000c\\ud800\n"


def test_what_is_not_finite_is_a_gap(made_up):
    document = made_up(curve=[(0, 3.0, float("nan")), (2, 2.5, float("inf")), (4, 2.0, 2.1)])
    loss = Figures(document).panel("loss", ["A"])
    assert "NaN" not in json.dumps([table(chart) for chart in loss.charts], allow_nan=False)
    assert finite([1.0, float("nan"), None, "x"]) == [1.0, None, None, "x"]


def test_claims_are_worded_by_what_the_seeds_allow(made_up):
    first, second = study.answers(made_up())[0].findings
    assert first == "B ends 0.4000 nats per token above A, over 2 seeds (p = 0.03)."
    assert second == "Not told apart from A over 2 seeds, in nats per token: C by +0.0750 (p = 0.47)."
    document = made_up()
    document["questions"][0]["claims"][0]["p"] = 2e-5
    assert study.findings(document)[0].endswith("over 2 seeds (p < 0.001).")
    document["questions"][0]["claims"][0]["seeds"] = 1
    assert study.findings(document) == ["One seed each: no difference between losses is claimed."]


def one_seed(document):
    """The same study, had it been made with its first seed only."""
    for one in document["variants"]:
        one["runs"] = one["runs"][:1]
        one["val_loss"] = [one["runs"][0]["val_loss"]] * 3
    for question in document["questions"]:
        for claim in question["claims"]:
            claim |= {"seeds": 1, "told_apart": False}
    return document


def test_cards_claim_what_the_seeds_bear(made_up):
    facts = {name: (value, whose) for name, value, whose in study.facts(made_up())}
    assert facts["Validation loss"] == (
        "2.050–2.450",
        "nats per token; lowest A, not told apart from B, C, D",
    )
    assert facts["Smallest KV cache"] == ("64 B", "per token: C, D, 25 % of the largest")
    assert facts["On the frontier"] == ("3", "no variant beats C, D, A")
    document = made_up()
    document["variants"] = document["variants"][:2]
    assert study.facts(document)[1] == ("Lowest validation loss", "2.0500", "nats per token: A")


def test_one_seed_ranks_nothing(made_up):
    document = one_seed(made_up())
    facts = {name: (value, whose) for name, value, whose in study.facts(document)}
    assert facts["Validation loss"] == ("2.000–2.400", "nats per token; one seed each, so none is ranked")
    assert "On the frontier" not in facts
    text = Seen(study.html(document, {})).text
    assert "without a claim which of them is better" in text
    for word in ("Lowest", "Beaten", "lowest A"):
        assert word not in text
    assert study.findings(document) == ["One seed each: no difference between losses is claimed."]


def test_unlike_models_rank_nothing(made_up):
    document = made_up()
    document["variants"][0]["steps"] = 5
    assert study.facts(document)[1][2] == "nats per token; the models are not comparable, so none is ranked"
    assert "On the frontier" not in [name for name, _, _ in study.facts(document)]
    document["questions"][0]["claims"] = [
        {"variant": "B", "against": "A", "unlike": ["4 steps, not 5"]},
        {"variant": "C", "against": "A", "unlike": ["4 steps, not 5", "another text or tokenizer"]},
    ]
    assert study.findings(document) == [
        "Not comparable with A: B (4 steps, not 5); C (4 steps, not 5, another text or tokenizer)."
    ]


def test_losses_at_different_lengths_rank_nothing(made_up):
    """They are compared at a common one, which is not what the cards show."""
    document = made_up()
    document["variants"] = document["variants"][:2]
    document["variants"][1] |= {"length": 32}
    facts = study.facts(document)
    assert facts[1][::2] == (
        "Validation loss", "nats per token; at different block lengths, so none is ranked",
    )  # fmt: skip
    assert "On the frontier" not in [name for name, _, _ in facts]


def exported(*seeds):
    """An export of these seeds."""
    one = {
        "command": "c",
        "architecture": "Llama",
        "reader": "r",
        "tokens": 9,
        "max_error": 1e-7,
        "same_choice": 1.0,
    }
    return [{"variant": "Stock", "seed": seed, **one} for seed in seeds]


def test_without_scripts_the_page_says_where_the_numbers_are(made_up):
    """Those of loss curves are in no table."""
    said = re.findall("<noscript>(This chart.*)</noscript>", study.html(made_up(), {}))
    assert set(said) == {
        "This chart needs JavaScript, which is off; the tables, or curves.csv and the images beside this page, have "
        "the numbers."
    }


def test_exports_of_several_seeds_are_told_apart(made_up, capsys, tmp_path):
    for seeds, names in (((7,), ["Stock"]), ((7, 8), ["Stock, seed 7", "Stock, seed 8"])):
        document = made_up() | {"exports": exported(*seeds)}
        assert re.findall("<b>(Stock.*)</b>: ", study.html(document, {})) == names
        study.present(document, tmp_path)
        assert re.findall("^(Stock.*): Llama", capsys.readouterr().out, re.MULTILINE) == names


@pytest.mark.parametrize(
    ("prompt", "note", "said"),
    [
        ("O", None, "All continue the same prompt, at"),
        (None, None, "Each continues the beginning of its validation text, at"),
        ("ä", "no ä", "Each continues the prompt or, as noted below, its validation text, at"),
    ],
)
def test_samples_say_what_they_continue(made_up, prompt, note, said):
    text = Seen(study.html(made_up() | {"prompt": prompt, "prompt_note": note}, {})).text
    assert said in text
    assert "A 2.0500 (2.0000 to 2.1000)\n" in text


def test_a_model_that_no_step_made_has_no_training_loss(made_up):
    document = made_up()
    for run in document["variants"][2]["runs"]:
        run["steps"] = 0
    text = Seen(study.html(document, {})).text
    assert text.count("training loss 2.0500") == 0
    assert "Seed 0: loss 2.0500 on the end of the study's text, 2.0500 on the rest,\nnot exact" in text
    assert "Seed 0: validation loss 2.0000, training loss 2.0000" in text


def test_images_of_an_earlier_report_are_replaced(made_up, tmp_path):
    document = made_up()
    study.write(document, {}, tmp_path)
    drawn = {file.name for file in tmp_path.glob("*.png")}
    assert drawn == {"1-loss.png", "1-frontier.png", "2-memory.png", "2-speed.png", "3-kv_dtype.png"}
    own = {"mine.png", "12-mine.png"}
    for name in (*own, "9-speed.png", "shrink.png"):
        (tmp_path / name).write_bytes(b"")
    document["questions"] = document["questions"][1:]
    study.write(document, {}, tmp_path)
    assert {file.name for file in tmp_path.glob("*.png")} == own | {
        "1-memory.png",
        "1-speed.png",
        "2-kv_dtype.png",
    }


def test_longer_texts_are_before_and_after(made_up):
    document = made_up()
    document["variants"][0] |= {"length": 32, "steps_before": 0, "steps": 4}
    document["variants"][0]["runs"][1]["curve"] = [[0, 3.0, 3.3], [4, 2.0, 2.1]]
    assert study.findings(document)[0] == (
        "A grows from 16 to 32 tokens after 0 steps: at 32 its loss is 3.2000 (3.1000 to 3.3000) at that point and "
        "2.0500 (2.0000 to 2.1000) after 4 more."
    )
    text = Seen(study.html(document, {})).text
    assert "2.0500 (2.0000 to 2.1000) at 32" in text
    assert "the variant's own block length in tokens: A (32), B (16), C (16)." in text
    document["variants"][0]["runs"][1]["curve"] = []
    assert "grows from" not in study.findings(document)[0]


def test_attention_alone_is_shown_beside_the_whole_step(made_up):
    figures = Figures(made_up())
    assert keys(figures.panel("loss", ["A", "B"]).charts[0]) == ["dotted: training loss"]
    for kind, full in (("memory", 3000 / 2**20), ("speed", 4.0)):
        panel = figures.panel(kind, ["A", "B"])
        (alone,) = (chart for chart in panel.charts if chart.title == "Attention alone")
        assert [series.pale for series in alone.series] == [False, True] * 2
        assert [series.x[0] for series in alone.series] == pytest.approx([full, 2 * full] * 2)
        assert "expect a flat curve" in panel.notes[-1]
        assert keys(alone) == ["full: as computed; pale: scores written out"]
    document = made_up()
    for one in document["variants"]:  # made before it was measured
        for part in (one["costs"], one["costs"]["memory"] or {}):
            for key in [key for key in part if "attention" in key]:
                del part[key]
    assert "Attention alone" not in Seen(study.html(document, {})).text


def test_the_page_says_what_was_shortened_and_who_made_what(made_up):
    text = Seen(study.html(made_up(text="words"), {})).text
    assert "Made at 50 % of the preset's iterations" in text
    assert "rehead study words" in text
    assert text.count("rehead train words") == 8
    assert "1 incomplete line(s)" in text
    assert "expect a flat curve" in text
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
    assert frontier(document["variants"]) == ["C", "D", "A"]  # C and D are not told apart
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
    panel = Figures(document).panel("loss", ["A", "B"])
    lines = panel.charts[0].series
    assert "Step 0 is left out." in panel.notes
    assert "Step 0 is left out." not in Figures(document).panel("loss", ["A"]).notes
    line, whole = (series for series in lines if not series.faint)
    assert whole.x == [2, 4]  # step 0 goes where there is more
    assert (line.x, line.y) == ([0, 4], pytest.approx([3.2, 2.3]))
    assert (line.low, line.high) == ([3.1, 2.1], [3.3, 2.5])


def test_no_evaluation_at_all_leaves_a_page(made_up):
    document = made_up(curve=[])
    assert [panel.name for panel in study.answers(document)[0].panels] == ["frontier"]
    assert Seen(study.html(document, {})).tags


def test_missing_packages_are_named_before_anything_is_trained(monkeypatch):
    monkeypatch.setattr(study, "find_spec", lambda name: None if name == "matplotlib" else name)
    with pytest.raises(study.UsageError, match=r'matplotlib: pip install "rehead\[report\]"'):
        study.require_packages()


def luminance(colour):
    """WCAG's relative luminance of #rrggbb."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_stand_out_in_both_schemes():
    """Text 4.5 to 1, what is drawn 3 to 1, as WCAG 2 asks (1.4.3, 1.4.11)."""
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in page.STYLE.split("@media screen"))
    assert len(COLOURS) == len(DARK_COLOURS) == len(set(COLOURS)) == len(set(DARK_COLOURS))
    for scheme, colours in ((light, COLOURS), (dark, DARK_COLOURS)):
        for paper in (scheme["page"], scheme["card"]):
            for ink in ("ink", "soft"):
                assert contrast(scheme[ink], paper) >= 4.5, (ink, paper)
            for colour in (*colours, scheme["warn"]):
                assert contrast(colour, paper) >= 3, (colour, paper)


def test_the_table_of_formats_has_the_numbers_of_the_chart(made_up):
    panel = Figures(made_up()).panel("kv_dtype", "ABCD")
    assert panel.header == ("Variant", "bf16", "int8")
    assert panel.rows[1] == ["B", "64 B, 2.4500", "40 B, 2.5500"]
    (chart,) = panel.charts
    for column, series in enumerate(chart.series, 1):
        cells = {row[0]: row[column] for row in panel.rows}
        assert {
            name: f"{x:,.0f} B, {y:.4f}" for name, x, y in zip(series.labels, series.x, series.y, strict=True)
        } == cells
    assert "No q8_0 for A, B, C, D: plain" in panel.notes


def test_losses_in_a_format_are_over_the_one_source_without_rounding(made_up):
    document = made_up() | {"conversion": {}}
    document["variants"][0]["kv_dtype"]["losses"][""] = [1.9, 1.8]  # by seed
    (chart,) = Figures(document).panel("kv_dtype", "AC").charts
    int8 = chart.series[1]
    assert int8.labels == ["C", "A"]
    assert int8.y == pytest.approx([(0.25 + 0.4) / 2, (0.2 + 0.4) / 2])
    assert (int8.low, int8.high) == (pytest.approx([0.25, 0.2]), pytest.approx([0.4, 0.4]))
    assert int8.x == [20, 80]


def test_marks_of_more_models_than_there_are_repeat_and_it_is_said(made_up):
    document = made_up()
    figures, (one, *_) = Figures(document), document["variants"]
    for n, said in (
        (10, "Every model has its mark."),
        (11, "Marks repeat after 10 models; the table has their names."),
    ):
        panel = figures.kv_dtype([one | {"variant": f"v{at}"} for at in range(n)])
        assert len(set(panel.charts[0].series[0].markers)) == 10
        assert said in panel.notes[0]


def test_without_formats_there_is_no_picture_of_them(made_up):
    document = made_up()
    for one in document["variants"]:
        one["kv_dtype"] = None
    assert Figures(document).panel("kv_dtype", "ABCD") is None
