"""The figure of attention maps in a real browser: drawn, chosen from, harmless, in both schemes and on a phone."""

import pytest
import torch

from rehead.report import maps, page

TOKENS = [
    "To",
    " be",
    "<b>bold</b>",
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "&lt;",
    "\n",
]
SHOWN = "document.querySelectorAll('.map')[{}].data[0]"


@pytest.fixture
def file(tmp_path):
    """A page of two figures, and the weights of the first: 3 layers of 4 heads, the second windowed."""
    pytest.importorskip("plotly")
    torch.set_default_dtype(torch.float32)
    n = len(TOKENS)
    hidden = torch.ones(n, n).triu(1) > 0
    windowed = hidden | (torch.ones(n, n).tril(-3) > 0)
    weights = [
        torch.randn(heads, n, n).mul(2).masked_fill(mask, -torch.inf).softmax(-1)
        for heads, mask in ((4, hidden), (4, windowed), (2, hidden))
    ]
    figures = [
        maps.fragment("<i>", TOKENS, weights, [None, 3, None], layer=1),
        maps.fragment("b", ["x"], [torch.ones(1, 1, 1)], [None]),
    ]
    path = tmp_path / "maps.html"
    path.write_text(page.page("<maps>", page.plotly() + maps.script() + "".join(figures)), encoding="utf-8")
    return path, weights


def drawn(shown):
    """The figures' charts are on the page."""
    shown.wait_for_selector(".heatmaplayer image >> nth=3", state="attached")


def chosen(shown, figure=0):
    """The map on the screen, as weights; hidden cells are 0."""
    cells = shown.evaluate(f"{SHOWN.format(figure)}.z.map((row) => row.map((cell) => cell ?? 0))")
    return (torch.tensor(cells) / 255) ** 2


def close(shown, weights):
    return torch.allclose(chosen(shown), weights, atol=0.5 / 255 * 2 + 1e-6)


def test_layers_and_heads_are_chosen(file, opened, until):
    path, weights = file
    shown = opened(path)
    drawn(shown)
    assert close(shown, weights[1][0])
    shown.select_option("figure:first-of-type [name=head]", "3")
    assert close(shown, weights[1][3])
    shown.select_option("figure:first-of-type [name=layer]", "2")  # which has two heads
    assert close(shown, weights[2][1])
    assert not close(shown, weights[1][3])
    assert shown.eval_on_selector("[name=head]", "(box) => [...box.options].map((one) => one.text)") == [
        "0",
        "1",
    ]
    overview = shown.locator(".overview").first.locator(".heatmaplayer image")
    overview.scroll_into_view_if_needed()
    box = overview.bounding_box()
    shown.mouse.click(box["x"] + 0.625 * box["width"], box["y"] + box["height"] / 6)  # head 2 of layer 0
    until(shown, "document.querySelector('[name=layer]').value == '0'")
    assert close(shown, weights[0][2])
    assert chosen(shown, 1).tolist() == [[1]]


def test_all_heads_by_entropy_or_distance(file, opened):
    path, weights = file
    shown = opened(path)
    drawn(shown)
    by = "document.querySelector('.overview').data[0].z"
    expected = maps.spread(weights[2]).distance
    assert shown.evaluate(by)[2] == pytest.approx(expected)
    shown.select_option("figure:first-of-type [name=kind]", "entropy")
    assert shown.evaluate(by)[2] == pytest.approx(maps.spread(weights[2]).entropy)


def test_hover_names_query_key_and_weight_and_hostile_tokens_are_text(file, opened, until):
    path, weights = file
    shown = opened(path)
    drawn(shown)
    plot = shown.locator(".map").first.locator(".heatmaplayer image").bounding_box()
    cell = plot["width"] / len(TOKENS)
    for i, j in ((2, 1), (4, 3)):
        shown.mouse.move(plot["x"] + (j + 0.5) * cell, plot["y"] + (i + 0.5) * cell)
        until(shown, f"document.querySelector('.hoverlayer')?.textContent.includes('of {i} ')")
        text = shown.locator(".hoverlayer").first.text_content()
        assert f"{float(weights[1][0, i, j]):.2f}"[:3] in text
        assert f"goes to {j} " in text
    assert "<script>alert(1)</scrip…" in text
    labels = shown.locator(".map").first.locator(".ytick").all_text_contents()
    assert labels == [
        "To",
        "·be",
        "<b>bold</b>",
        "<script>alert(1)</scrip…",
        '"><img·src=x·onerror=al…',
        "&lt;",
        "↵",
    ]
    assert shown.locator("img, b, i").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_on_a_phone(file, opened, until, scheme):
    shown = opened(file[0], width=375, scheme=scheme)
    drawn(shown)
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
    colours = [shown.evaluate(f"{SHOWN.format(0)}.colorscale[{end}][1]") for end in (0, 2)]
    assert colours == (["#eef3f9", "#08284f"] if scheme == "light" else ["#1c2733", "#eaf6ff"])
    other = "dark" if scheme == "light" else "light"
    shown.emulate_media(color_scheme=other)
    until(shown, f"{SHOWN.format(0)}.colorscale[0][1] != '{colours[0]}'")


def test_a_figure_is_drawn_when_it_is_first_seen(tmp_path, opened):
    pytest.importorskip("plotly")
    torch.set_default_dtype(torch.float32)
    figure = maps.fragment("b", list("abcde"), [torch.eye(5)[None]], [None])
    path = tmp_path / "maps.html"
    hidden = f"<details><summary>open</summary>{figure}</details>"
    path.write_text(page.page("maps", page.plotly() + maps.script() + hidden), encoding="utf-8")
    shown = opened(path)
    shown.click("summary")
    shown.wait_for_selector(".map .heatmaplayer image")
    assert shown.locator(".map .ytick").count() == 5
    wide = shown.locator(".map .main-svg").first.bounding_box()["width"]
    shown.set_viewport_size({"width": 400, "height": 900})
    shown.wait_for_timeout(300)
    assert shown.locator(".map .main-svg").first.bounding_box()["width"] < min(wide, 400)
