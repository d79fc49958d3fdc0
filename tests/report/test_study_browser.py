"""A study's page in a real browser: drawn, quiet, and to be played with."""

import pytest

from rehead.report import study

HOSTILE = ["A<img src=x onerror=alert(1)>", "B<a href='http://example.org'>b</a>", "C</script>", "D"]
CHARTS = """[...document.querySelectorAll('.chart')].map(
    (chart) => chart.querySelectorAll('.trace, .point').length > 0)"""
MAP = "JSON.stringify(document.querySelector('.shown .map').data[0].z)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_drawn_on_a_phone_without_errors_or_requests(made_up, attention, tmp_path, opened, until, scheme):
    """Every string of unknown origin is hostile; `opened` fails for an error, a dialog, a request."""
    file = tmp_path / "report.html"
    file.write_text(study.html(made_up("<img src=x onerror=alert(1)>", HOSTILE), attention(HOSTILE[:2])))
    page = opened(file, width=390, scheme=scheme)
    until(page, f"{CHARTS}.every(Boolean)")
    assert len(page.evaluate(CHARTS)) == 8
    assert page.locator("img, a").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert "A<img src=x" in page.locator(".chart .legendtext").first.text_content()

    colour = "document.querySelector('.chart').layout.font.color"
    before = page.evaluate(colour)
    page.emulate_media(color_scheme="dark" if scheme == "light" else "light")
    until(page, f"{colour} !== '{before}'")


def test_variant_layer_and_head_are_chosen(made_up, attention, tmp_path, opened, until):
    file = tmp_path / "report.html"
    file.write_text(study.html(made_up(), attention()))
    page = opened(file)
    page.locator("#maps").scroll_into_view_if_needed()
    until(page, "document.querySelector('.shown .map').data !== undefined")
    maps = [page.evaluate(MAP)]
    for name in ("layer", "head"):
        page.select_option(f".shown [name={name}]", "1")
        maps.append(page.evaluate(MAP))
    page.select_option("#maps [name=variant]", "1")
    assert page.locator(".shown figcaption").text_content() == "B"
    until(page, "document.querySelector('.shown .map').data !== undefined")
    assert len(set(maps)) == 3
    assert page.evaluate(MAP) == maps[0]
