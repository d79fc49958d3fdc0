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
