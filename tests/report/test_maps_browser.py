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
PIXELS = """(async (figure) => {
    const image = new Image(), canvas = document.createElement('canvas'), context = canvas.getContext('2d');
    image.src = document.querySelectorAll('.map')[figure].querySelector('image').getAttribute('href');
    await image.decode();
    [canvas.width, canvas.height] = [image.width, image.height];
    context.drawImage(image, 0, 0);
    return [image.width, [...context.getImageData(0, 0, image.width, image.height).data]];
})"""
LIGHT, DARK = ("#eaf1f8", "#4e95c9", "#08284f"), ("#1c2733", "#3a83b8", "#eaf6ff")


@pytest.fixture
def file(tmp_path):
    """A page of two figures, and the weights of the first: 3 layers of 4 heads, the second windowed."""
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
    path.write_text(page.page("<maps>", "".join(figures), maps.script()), encoding="utf-8")
    return path, weights


def drawn(shown):
    """The figures' charts are on the page."""
    shown.wait_for_selector(".overview button >> nth=10", state="attached")


def ramp(scheme):
    """The colour of each byte from 0 to 255, between the three of a scheme."""
    ends = [torch.tensor([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) for colour in scheme]
    share = torch.arange(256)[:, None] / 255
    low, high = (ends[i] + (ends[i + 1] - ends[i]) * (2 * share - i) for i in (0, 1))
    return torch.where(share < 0.5, low, high).round()


def chosen(shown, figure=0, scheme=LIGHT):
    """The map on the screen, its colours read back as weights; what is transparent is 0."""
    n, pixels = shown.evaluate(f"{PIXELS}({figure})")
    pixels = torch.tensor(pixels).reshape(n, n, 4).float()
    away, cells = (pixels[..., None, :3] - ramp(scheme)).abs().amax(-1).min(-1)
    seen = pixels[..., 3] > 0
    assert (away[seen] <= 1).all()  # of the scheme's colours
    return torch.where(seen, (cells / 255) ** 2, 0.0)


def close(shown, weights):
    return torch.allclose(chosen(shown), weights, atol=0.5 / 255 * 2 + 1e-6)


def test_layers_and_heads_are_chosen(file, opened, until):
    path, weights = file
    shown = opened(path)
    drawn(shown)
    assert close(shown, weights[1][0])
    window = shown.locator(".of-window").first
    assert window.text_content() == "In this layer a token sees only the last 3 tokens."
    shown.select_option("figure:first-of-type [name=head]", "3")
    assert close(shown, weights[1][3])
    shown.select_option("figure:first-of-type [name=layer]", "2")  # which has two heads
    assert close(shown, weights[2][1])
    assert window.text_content() == ""
    assert not close(shown, weights[1][3])
    assert shown.eval_on_selector("[name=head]", "(box) => [...box.options].map((one) => one.text)") == [
        "0",
        "1",
    ]
    shown.get_by_role("button", name="layer 0, head 2:").click()
    until(shown, "document.querySelector('[name=layer]').value == '0'")
    assert close(shown, weights[0][2])
    assert (
        shown.locator(".overview [aria-pressed=true]").first.get_attribute("aria-label")[:15]
        == "layer 0, head 2"
    )
    assert chosen(shown, 1).tolist() == [[1]]


def test_all_heads_by_entropy_or_distance(file, opened):
    path, weights = file
    shown = opened(path)
    drawn(shown)
    for kind in ("distance", "entropy"):
        shown.select_option("figure:first-of-type [name=kind]", kind)
        names = shown.locator(".overview").first.locator("tr >> nth=2").locator("button")
        said = [float(one.get_attribute("title").split()[-2]) for one in names.all()]
        assert said == pytest.approx(getattr(maps.head_spread(weights[2]), kind), abs=0.0051)


def test_hover_names_query_key_and_weight_and_hostile_tokens_are_text(file, opened, until):
    path, weights = file
    shown = opened(path)
    drawn(shown)
    plot = shown.locator(".map image").first.bounding_box()
    cell = plot["width"] / len(TOKENS)
    for i, j in ((2, 1), (4, 3)):
        shown.mouse.move(plot["x"] + (j + 0.5) * cell, plot["y"] + (i + 0.5) * cell)
        until(shown, f"document.querySelector('output').textContent.includes('of {i} ')")
        text = shown.locator("output").first.text_content()
        assert f"{float(weights[1][0, i, j]):.2f}"[:3] in text
        assert f"goes to {j} " in text
    assert "<script>alert(1)</scrip…" in text
    numbers = shown.locator(".map").first.locator("text[style]").all_text_contents()
    assert len(numbers) == int((weights[1][0] > 0).sum())
    labels = shown.locator(".map").first.locator("text.row").all_text_contents()
    assert labels == [
        "To",
        "·be",
        "<b>bold</b>",
        "<script>alert(1)</scrip…"[:14] + "…",
        '"><img·src=x·onerror=al…'[:14] + "…",
        "&lt;",
        "↵",
    ]
    assert shown.locator("img, b, i").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_on_a_phone(file, opened, until, scheme):
    shown = opened(file[0], width=375, scheme=scheme)
    drawn(shown)
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
    colours = {"light": LIGHT, "dark": DARK}
    before = chosen(shown, scheme=colours[scheme])
    image = shown.locator(".map image").first.get_attribute("href")
    other = "dark" if scheme == "light" else "light"
    shown.emulate_media(color_scheme=other)
    until(shown, f"document.querySelector('.map image').getAttribute('href') != '{image}'")
    assert torch.allclose(chosen(shown, scheme=colours[other]), before, atol=1e-6)


def test_a_figure_is_drawn_when_it_is_first_seen(tmp_path, opened, until):
    torch.set_default_dtype(torch.float32)
    figure = maps.fragment("b", list("abcde"), [torch.eye(5)[None]], [8])
    path = tmp_path / "maps.html"
    hidden = f"<details><summary>open</summary>{figure}</details>"
    path.write_text(page.page("maps", hidden, maps.script()), encoding="utf-8")
    shown = opened(path)
    shown.click("summary")
    shown.wait_for_selector(".map image")
    assert shown.locator(".map text.row").count() == 5
    assert (
        shown.locator(".of-window")
        .text_content()
        .endswith("last 8 tokens; with 5 tokens that hides nothing.")
    )
    wide = shown.locator(".map image").first.bounding_box()["width"]
    shown.set_viewport_size({"width": 400, "height": 900})
    until(shown, f"document.querySelector('.map image').getBoundingClientRect().width < {min(wide, 400)}")
