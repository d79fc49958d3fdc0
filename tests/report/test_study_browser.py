"""A study's page in a real browser: drawn, quiet, and to be played with."""

from itertools import pairwise

import pytest

from rehead.report import study

HOSTILE = ["A<img src=x onerror=alert(1)>", "B<a href='http://example.org'>b</a>", "C</script>", "D"]
CHARTS = """[...document.querySelectorAll('.chart')].map(
    (chart) => chart.querySelectorAll('.series path, .track b').length > 0)"""
MAP = "document.querySelector('.shown .map image')?.getAttribute('href')"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_drawn_on_a_phone_without_errors_or_requests(made_up, attention, tmp_path, opened, until, scheme):
    """Every string of unknown origin is hostile; `opened` fails for an error, a dialog, a request."""
    file = tmp_path / "report.html"
    file.write_text(study.html(made_up("<img src=x onerror=alert(1)>", HOSTILE), attention(HOSTILE[:2])))
    page = opened(file, width=390, scheme=scheme)
    until(page, f"{CHARTS}.every(Boolean)")
    assert len(page.evaluate(CHARTS)) == 11
    assert page.locator("img, a").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert "A<img src=x" in page.locator(".chart .legend button").first.text_content()

    swatch = "getComputedStyle(document.querySelector('#summary .swatch')).backgroundColor"
    line = "getComputedStyle(document.querySelector('.chart .c0 .line')).stroke"
    before = page.evaluate(swatch)
    assert page.evaluate(line) == before
    page.emulate_media(color_scheme="dark" if scheme == "light" else "light")
    until(page, f"{swatch} !== '{before}'")
    assert page.evaluate(line) == page.evaluate(swatch)


def test_a_legend_entry_hides_its_series_and_the_pointer_reads_values(made_up, tmp_path, opened, until):
    file = tmp_path / "report.html"
    curve = [(step, 3 - step / 10, 3.1 - step / 10) for step in range(0, 12, 2)]
    file.write_text(study.html(made_up(curve=curve), {}))
    page = opened(file)
    until(page, f"{CHARTS}.every(Boolean)")
    chart = page.locator(".chart.lines").first
    svg = chart.locator("svg.plot")
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 16, box["y"] + 100)
    rows = [row.locator("td").all_text_contents() for row in chart.locator(".tip tr").all()]
    assert chart.locator(".tip b").text_content() == "10 optimizer steps"
    assert rows == [["A", "2.1"], ["B", "2.1"], ["A (dotted)", "2"], ["B (dotted)", "2"]]
    page.mouse.move(0, 0)
    assert not chart.locator(".tip").is_visible()
    svg.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert chart.locator(".tip b").text_content() == "4 optimizer steps"
    assert chart.locator(".series").count() == 4
    chart.get_by_role("button", name="A").click()
    assert chart.locator(".series").count() == 2
    assert chart.get_by_role("button", name="A").get_attribute("aria-pressed") == "false"
    chart.get_by_role("button", name="B").click()
    assert "nothing selected" in svg.text_content()

    frontier = page.locator(".chart.points").first
    frontier.scroll_into_view_if_needed()
    mark = frontier.locator(".plot .mark").first.bounding_box()
    page.mouse.move(mark["x"] + mark["width"] / 2, mark["y"] + mark["height"] / 2)
    assert "2.05 (2 to 2.1)" in frontier.locator(".tip").text_content()


TOUCH = """([kind, x, y]) => document.querySelector('.chart.points .plot').dispatchEvent(
new PointerEvent(kind, { pointerType: 'touch', clientX: x, clientY: y, bubbles: true }))"""


def test_what_a_finger_touched_can_be_read_when_it_has_lifted(made_up, tmp_path, opened, until):
    file = tmp_path / "report.html"
    file.write_text(study.html(made_up(), {}))
    page = opened(file, width=390)
    until(page, f"{CHARTS}.every(Boolean)")
    chart = page.locator(".chart.points").first
    chart.scroll_into_view_if_needed()
    mark = chart.locator(".plot .mark").first.bounding_box()
    at = [mark["x"] + mark["width"] / 2, mark["y"] + mark["height"] / 2]
    for kind in ("pointerdown", "pointerup", "pointerleave"):
        page.evaluate(TOUCH, [kind, *at])
    assert chart.locator(".tip").is_visible()
    assert "2.05 (2 to 2.1)" in chart.locator(".tip").text_content()
    page.evaluate(TOUCH, ["pointerdown", 2, at[1] + 200])
    assert not chart.locator(".tip").is_visible()


def test_variant_layer_and_head_are_chosen(made_up, attention, tmp_path, opened, until):
    file = tmp_path / "report.html"
    file.write_text(study.html(made_up(), attention()))
    page = opened(file)
    page.locator("#maps").scroll_into_view_if_needed()
    until(page, f"{MAP} !== undefined")
    maps = [page.evaluate(MAP)]
    for name in ("layer", "head"):
        page.select_option(f".shown [name={name}]", "1")
        maps.append(page.evaluate(MAP))
    page.select_option("#maps [name=variant]", "1")
    assert page.locator(".shown figcaption").text_content() == "B"
    until(page, f"{MAP} !== undefined")
    assert len(set(maps)) == 3
    assert page.evaluate(MAP) == maps[0]


def test_a_page_can_be_read_without_seeing_it(made_up, attention, tmp_path, opened, until):
    """Landmarks, headings in order, names of charts and controls, scopes of headers."""
    file = tmp_path / "report.html"
    file.write_text(study.html(made_up(), attention()))
    page = opened(file)
    until(page, f"{CHARTS}.every(Boolean) && {MAP} !== undefined")
    assert page.get_attribute("html", "lang") == "en"
    assert page.title() == "Study: plain"
    assert page.locator("main").count() == page.locator("main h1").count() == 1
    levels = page.evaluate(
        "[...document.querySelectorAll('h1, h2, h3, h4')].map((one) => Number(one.tagName[1]))"
    )
    assert levels[0] == 1
    assert all(deeper <= level + 1 for level, deeper in pairwise(levels))
    assert page.locator("th:not([scope])").count() == 0
    charts = page.get_by_role("img").all()
    names = [chart.get_attribute("aria-label") for chart in charts]
    assert len(charts) == 3 + 1  # lines, points twice, the map that is shown; bars are text
    assert names[0] == "loss (nats per token) over optimizer steps; ends of lines: A 2.1; B 2.1"
    assert names[1].endswith("points: A 2.05 at 256; B 2.45 at 128; C 2.075 at 64")
    assert "points: C, bf16 2.075 at 32; D, bf16 2.225 at 32; B, bf16 2.45 at 64; A, bf16" in names[2]
    assert names[3] == "Attention weights of layer 0, head 0 over 4 tokens"
    unnamed = (
        "[...document.querySelectorAll('button, select')].filter((one) => !one.textContent && !one.ariaLabel)"
    )
    assert page.evaluate(f"{unnamed}.length") == 0
    assert page.evaluate("[...document.querySelectorAll('select')].every((one) => one.labels.length === 1)")


def test_on_a_phone_every_row_is_a_card_with_what_matters_first(made_up, tmp_path, opened):
    file = tmp_path / "report.html"
    file.write_text(study.html(made_up(), {}))
    page = opened(file, width=390)
    card = page.locator("#summary tbody tr").first
    assert card.bounding_box()["width"] <= 390
    named = card.locator("td")
    assert named.evaluate_all("(cells) => cells.map((cell) => cell.dataset.of)")[:4] == [
        "Validation loss", "KV cache per token", "Tokens/s, cached", "Tokens/s, uncached",
    ]  # fmt: skip
    for cell in named.all():
        box = cell.bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= 390
    assert page.evaluate("getComputedStyle(document.querySelector('#summary td'), '::before').content") == (
        '"Validation loss"'
    )


@pytest.mark.parametrize("width", [360, 1200])
def test_a_line_per_format_with_a_mark_and_one_name_per_model(made_up, tmp_path, opened, until, width):
    file = tmp_path / "report.html"
    file.write_text(study.html(made_up(names=("MHA", "GQA, two heads", "to MLA", "MLA, healed")), {}))
    page = opened(file, width=width)
    until(page, f"{CHARTS}.every(Boolean)")
    chart = page.locator(".chart.points").last
    assert chart.locator(".legend button").all_text_contents() == ["bf16", "int8"]
    assert chart.locator(".plot .line.joined").count() == 2
    shapes = [
        series.locator(".mark").evaluate_all("(marks) => marks.map((mark) => mark.getAttribute('d'))")
        for series in chart.locator(".plot .series").all()
    ]
    assert shapes[0] == shapes[1]
    assert len(set(shapes[0])) == 4
    names = chart.locator(".plot .name")
    assert len(set(names.all_text_contents())) == names.count() >= 3
    for box in (name.bounding_box() for name in names.all()):
        assert 0 <= box["x"] < box["x"] + box["width"] <= width
    chart.scroll_into_view_if_needed()
    mark = chart.locator(".plot .series").last.locator(".mark").last.bounding_box()
    page.mouse.move(mark["x"] + mark["width"] / 2, mark["y"] + mark["height"] / 2)
    assert chart.locator(".tip b").text_content() == "MHA, int8"
    assert "2.15 (2.1 to 2.2)" in chart.locator(".tip").text_content()
