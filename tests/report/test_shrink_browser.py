"""The page of one model and what became of it, in a real browser, with every string of unknown origin hostile."""

import copy
import re

import pytest

from rehead.report import shrink, study

EVIL = "</script><img src=x onerror=alert(1)>"
CHARTS = (
    "[...document.querySelectorAll('.chart')].every((one) => one.querySelector('.series path, .track b'))"
)
MAP = "document.querySelector('{} .map image')?.getAttribute('href')"


@pytest.fixture
def shrunk(made_up):
    """`shrunk(text)`: a document of one model in which every string of unknown origin ends with `text`."""

    def make(text):
        names = [f"{letter}{text}" for letter in "ABCD"]
        document = made_up(text, names)
        measured = {"name": text, "tokens": 90, "read": 64, "sha256": "0123456789abcdef"}
        layer = {
            "source": text, "result": text, "kv_numbers": [8, 4], "steps": ["latent"], "methods": ["svd"],
            "lost_energy": 1e-3, "output_error": 2e-3,
        }  # fmt: skip
        document["variants"][1] |= {
            "kind": "converted",
            "convert": {"to": "mla", "kv_fraction": 0.5},
            "from": names[0],
        }
        document["variants"][2] |= {"convert": {"to": "mqa"}}
        document["variants"][2]["costs"]["rebuilds_keys"] = True
        for one in document["variants"][1:]:
            for run in one["runs"]:
                run["certificate"] = {
                    "exact": False, "kl": 0.1, "loss": [1.0, 1.25], "kv_bytes_per_token": [256, 128], "file": text,
                    "length": 16, "parameters": [1000, 900], "test": measured, "calibration": [measured],
                    "layers": [layer],
                    "logits": {
                        "argmax_flips": 0.1, "kl": 0.1, "max_error": 0.5, "relative_error": 0.2, "tokens": 64
                    },
                    "healing": [{"steps": 4, "batch_tokens": 48}] if one["kind"] == "healed" else [],
                }  # fmt: skip
        row = {
            "variant": text, "kv_bytes_per_token": 128, "parameters": 900, "verdict": "exact", "command": "--to mla",
        }  # fmt: skip
        export = {
            "variant": names[3], "command": text, "architecture": text, "reader": text, "tokens": 9,
            "max_error": 1e-7, "same_choice": 1.0,
        }  # fmt: skip
        document["conversion"] = {
            "source": names[0], "architecture": text, "plan": {"rows": [row], "advice": text},
        }  # fmt: skip
        document["exports"] = [export]
        return document

    return make


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_quiet_on_a_phone_whatever_the_strings_are(shrunk, attention, tmp_path, opened, until, scheme):
    """`opened` fails for an error, a dialog, a request."""
    file, document = tmp_path / "report.html", shrunk(EVIL)
    file.write_text(study.html(document, attention([one["variant"] for one in document["variants"][:2]])))
    page = opened(file, width=390, scheme=scheme)
    until(page, CHARTS)
    assert page.locator("img, a").count() == 0
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator("#summary th[scope=row]").first.text_content() == f"A{EVIL}"
    assert EVIL in page.locator(".samples pre").first.text_content()
    assert page.locator("th:not([scope])").count() == 0


def test_layer_and_head_are_chosen_on_both_sides(shrunk, attention, tmp_path, opened, until):
    file, document = tmp_path / "report.html", shrunk("")
    file.write_text(study.html(document, attention([one["variant"] for one in document["variants"][:3]])))
    page = opened(file)
    page.locator("#maps").scroll_into_view_if_needed()
    sides = [MAP.format(".before"), MAP.format(".shown")]
    seen = []
    for name in ("layer", "head"):
        for side in sides:
            until(page, f"{side} !== undefined")
        seen.append([page.evaluate(side) for side in sides])
        page.select_option(f".shown [name={name}]", "1")
        for side, old in zip(sides, seen[-1], strict=True):
            until(page, f"{side} !== '{old}'")
    page.select_option("#maps > p select[name=variant]", "1")
    assert page.locator(".maps .shown figcaption").text_content() == "C"


CHOSEN = (
    "[...document.querySelectorAll('.before, .shown')].map((side) => side.querySelector('[name={}]').value)"
)


def test_a_cell_of_the_overview_chooses_for_both_sides(shrunk, attention, tmp_path, opened, until):
    file, document = tmp_path / "report.html", shrunk("")
    file.write_text(study.html(document, attention([one["variant"] for one in document["variants"][:2]])))
    page = opened(file)
    page.locator("#maps").scroll_into_view_if_needed()
    for side in (".before", ".shown"):
        until(page, f"{MAP.format(side)} !== undefined")
    for side, layer, head in ((".before", 1, 2), (".shown", 0, 1)):
        page.locator(side).get_by_role("button", name=f"layer {layer}, head {head}:").click()
        for name, value in (("layer", layer), ("head", head)):
            until(page, f"{CHOSEN.format(name)}.every((one) => one === '{value}')")
        pressed = page.locator(f"{side} .overview [aria-pressed=true]")
        assert pressed.evaluate("(one) => one === document.activeElement")
        assert page.locator(f".pair .map[aria-label*='layer {layer}, head {head}']").count() == 2


def test_a_variant_shown_later_has_the_layer_and_head_that_were_chosen(
    shrunk, attention, tmp_path, opened, until
):
    file, document = tmp_path / "report.html", shrunk("")
    file.write_text(study.html(document, attention([one["variant"] for one in document["variants"][:3]])))
    page = opened(file)
    page.locator("#maps").scroll_into_view_if_needed()
    until(page, f"{MAP.format('.before')} !== undefined")
    page.select_option(".before [name=layer]", "1")
    page.select_option(".before [name=head]", "2")
    page.select_option("#maps > p select[name=variant]", "1")
    until(page, f"{MAP.format('.shown')} !== undefined")
    assert [page.evaluate(CHOSEN.format(name)) for name in ("layer", "head")] == [["1"] * 2, ["2"] * 2]
    assert (
        page.locator(".shown .map")
        .get_attribute("aria-label")
        .startswith("Attention weights of layer 1, head 2")
    )


def test_on_paper_maps_name_their_head_and_details_are_open(shrunk, attention, tmp_path, opened, until):
    file, document = tmp_path / "report.html", shrunk("")
    file.write_text(study.html(document, attention([one["variant"] for one in document["variants"][:2]])))
    page = opened(file)
    page.locator("#maps").scroll_into_view_if_needed()
    until(page, f"{MAP.format('.shown')} !== undefined")
    page.emulate_media(media="print")
    for side in (".before", ".shown"):
        for name in ("layer", "head"):
            chosen = page.locator(f"{side} [name={name}]")
            assert chosen.is_visible()
            assert chosen.evaluate("(one) => getComputedStyle(one).appearance") == "none"
        for gone in ("[name=kind]", ".overview", ".of-heads"):
            assert not page.locator(f"{side} {gone}").is_visible()
    closed = "document.querySelectorAll('details:not([open])').length"
    before = page.evaluate(closed)
    assert before > 3
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(closed) == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(closed) == before


def test_no_browser_keeps_a_choice_over_a_reload(shrunk, attention):
    """It would say another variant than is shown."""
    document = shrunk("")
    names = [one["variant"] for one in document["variants"][:2]]
    for text in (
        study.html(document, attention(names)),
        study.html(document | {"conversion": None}, attention(names)),
    ):
        choices = re.findall("<select [^>]*>", text)
        assert len(choices) == 7
        assert all('autocomplete="off"' in choice for choice in choices)


def test_what_no_text_was_read_for_is_fitted_to_none(shrunk):
    document = shrunk("")
    for run in document["variants"][1]["runs"]:
        run["certificate"]["calibration"] = []
    fitted = re.findall("<dt>Fitted to</dt><dd>(.*)</dd>", study.html(document, {}))
    assert [text[:7] for text in fitted] == ["no text", " (64 of", " (64 of"]


def test_losses_of_samples_are_those_of_the_certificates(shrunk):
    """Those of the study's own text would stand beside them without a word."""
    page = study.html(shrunk(""), {})
    assert len(re.findall("<figcaption><i class=[^>]*></i>[A-D]</figcaption>", page)) == 4


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.125, "12.5 %"), (0.0123, "1.23 %"), (9.9, "990 %"), (9.996, "1,000 %"), (16, "1,600 %")],
)
def test_a_share_is_a_plain_number(share, text):
    assert shrink.percent(share) == text


def test_names_are_whole_on_the_terminal(shrunk, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    document = shrunk("")
    names = ["A", "MLA of half, fitted to my help", "MLA of half, fitted to my text", "D"]
    for one, name in zip(document["variants"], names, strict=True):
        one["variant"] = name
        one["runs"][0]["sample"] = "word " * 40
    for one in document["variants"][1:]:
        one["from"] = "A"
    document["variants"][3]["kind"] = "converted"
    document["variants"][3]["convert"] = {"to": "mqa"}
    shrink.present(document)
    printed = capsys.readouterr().out
    assert "more characters" not in printed
    for name in names[1:3]:
        assert re.search(f"^{name}  word word", printed, re.MULTILINE)
        assert " ".join(printed.split()).count(name) >= 2
    assert all(len(line) <= 80 for line in printed.splitlines() if "word word" in line)


def test_one_model_is_not_ranked_and_what_is_slow_is_named(shrunk):
    document = shrunk("")
    document["questions"][0]["show"] = ["loss", "frontier"]
    text = study.html(document, {})
    assert "is claimed" not in text
    assert "not claimed" not in text
    assert (
        text.count("C: for every new token, rotary keys are rebuilt from the latents of the whole context.")
        == 2
    )


def test_a_model_healed_in_another_dtype_has_the_share_of_its_numbers(shrunk):
    """The source and its conversions are in bfloat16, the healed one in float32: its cache is no larger a part."""
    document = shrunk("")
    for run in document["variants"][3]["runs"]:
        run["certificate"]["kv_bytes_per_token"] = [512, 256]
    assert [(row.kv_bytes, row.share) for row in shrink.rows(document)] == [(256, 1), *[(128, 0.5)] * 3]


def test_losses_are_over_the_source_whatever_a_variant_was_made_from(shrunk, capsys):
    """B is 0.5 over A, C is B exactly, D is 0.1 over B, E is C healed by B, F is A exactly and G is F exactly."""
    document = shrunk("")
    (a, b, c, d), losses = document["variants"], {"B": (2.0, 2.5), "C": (2.5, 2.5), "D": (2.5, 2.6)}
    d |= {"kind": "converted", "convert": {"to": "mqa"}, "from": "B"}
    c["from"] = "B"
    e, f = copy.deepcopy(d), copy.deepcopy(c)
    e |= {"variant": "E", "kind": "healed", "from": "C"}
    f |= {"variant": "F", "from": "A"}
    g = copy.deepcopy(f) | {"variant": "G", "from": "F"}
    document["variants"] = [a, b, c, d, e, f, g]
    losses |= {"E": (2.5, 2.2), "F": (2.0, 2.0), "G": (2.0, 2.0)}
    for one in document["variants"][1:]:
        for seed, run in enumerate(one["runs"]):
            run["certificate"]["loss"] = [loss + seed for loss in losses[one["variant"]]]
            run["certificate"]["exact"] = one["variant"] in "CFG"
    rows = {row.name: row for row in shrink.rows(document)}
    over = {name: row.over and pytest.approx(row.over) for name, row in rows.items()}
    assert over == {"A": None} | {
        name: [loss] * 3 for name, loss in {"B": 0.5, "C": 0.5, "D": 0.6, "E": 0.2, "F": 0, "G": 0}.items()
    }
    assert [name for name, row in rows.items() if row.exact] == ["A", "F", "G"]
    assert [row.measured_against for row in rows.values()] == [None, "A", "B", "B", "B", "A", "F"]
    shrink.present(document)
    printed = capsys.readouterr().out
    assert re.findall(r"^ (\w) .* %  +(\S+)  ", printed, re.MULTILINE) == [
        ("A", "2.0000"), ("B", "+0.5000"), ("C", "+0.5000"), ("D", "+0.6000"), ("E", "+0.2000"), ("F", "exact"),
        ("G", "exact"),
    ]  # fmt: skip
    assert re.findall(r"(\w) keeps every logit", printed) == ["F", "G"]
    page = study.html(document, {})
    cells = re.findall(r'"Exact">(\w+)</td>\n<td data-of="Same likeliest token">(.*)</td>', page)
    assert cells == [("no", "90.00 %"), *[("no", "")] * 3, *[("yes", "90.00 %")] * 2]
    assert re.findall(r"<dt>Compared with</dt><dd>(\w)</dd>", page) == list("ABBBAF")


def test_windows_of_another_length_are_another_text(shrunk):
    document = shrunk("")
    for run in document["variants"][2]["runs"]:
        run["certificate"]["length"] = 8
    assert [row.over is None for row in shrink.rows(document)] == [True, False, True, False]


BOXES = """[...document.querySelectorAll('.chart .plot')].map((plot) => (
[...plot.querySelectorAll('text')].map((text) => {
  const box = text.getBoundingClientRect();
  return [text.classList.contains('name'), box.left, box.right, box.top, box.bottom, text.textContent];
}))).find((texts) => texts.some((text) => text[0]))"""


@pytest.mark.parametrize("width", [360, 390, 1200])
def test_no_name_in_the_chart_lies_on_another_text(shrunk, attention, tmp_path, opened, until, width):
    """Four models of nearly one loss, side by side; on a phone the names have little room."""
    file, document = tmp_path / "report.html", shrunk(" and a long name")
    for place, one in enumerate(document["variants"][1:], 1):
        for run in one["runs"]:
            run["certificate"]["loss"] = [1.0, 1.0 + place * 1e-3]
            run["certificate"]["layers"][0]["kv_numbers"] = [256, 256 // place]
    file.write_text(study.html(document, attention([one["variant"] for one in document["variants"][:2]])))
    page = opened(file, width=width)
    until(page, CHARTS)
    texts = page.evaluate(BOXES)
    names = [text for text in texts if text[0]]
    assert len(names) >= (2 if width < 400 else 4)
    for name in names:
        assert 0 <= name[1] < name[2] <= width
        for other in texts:
            apart = (
                name[2] <= other[1]
                or other[2] <= name[1]
                or name[4] <= other[3] + 3
                or other[4] <= name[3] + 3
            )
            assert other is name or apart, (name, other)
