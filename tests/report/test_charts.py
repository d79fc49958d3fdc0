"""Charts as images and as data for a page: names of bars, numbers on axes, gaps."""

from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from rehead.report import interactive, page, plot
from rehead.report.chart import Chart, Look, Panel, Series


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """`drawn(charts)`: matplotlib's axes of one image."""
    images = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: images.append(self))

    def draw(*charts):
        plot.draw(Panel(name="a", title="A", charts=charts, notes=[]), tmp_path / "a.png")
        return images.pop().axes

    return draw


def bars(*names):
    series = [Series(name="", x=[1.0], y=[name], look=Look.of(at)) for at, name in enumerate(names)]
    return Chart(kind="bars", title="bars", x="ms", y="", series=series)


def points(*sizes):
    series = [Series(name=f"{at}", x=[x], y=[at], look=Look.of(at)) for at, x in enumerate(sizes)]
    return Chart(kind="points", title="points", x="bytes", y="loss", series=series, log_x=True)


def test_bars_have_names_where_they_differ_from_those_to_their_left(drawn):
    """Decoding has bars of converted models, which no training step has."""
    several = drawn(bars("A", "B"), bars("A", "B"), bars("A", "C", "B"), bars("A", "B"))
    named = [[label.get_text() for label in axes.get_yticklabels()] for axes in several]
    assert named == [["A", "B"], ["", ""], ["A", "C", "B"], ["A", "B"]]


def grid(kind):
    """Thirty-two variants as a grid names them: long, and different at their ends."""
    names = [f"n_kv_head={at}, n_layer=12, learning_rate=0.001, {'x' * 30} dropout={at}" for at in range(32)]
    if kind == "bars":
        return bars(*names)
    series = [Series(name=name, x=[1, 2], y=[at, 0.0], look=Look.of(at)) for at, name in enumerate(names)]
    return Chart(kind=kind, title="grid", x="x", y="loss", series=series)


@pytest.mark.parametrize("kind", ["lines", "points", "bars"])
def test_long_names_of_many_variants_leave_room_for_the_chart(drawn, kind):
    """They end as they differ, lie within the image, and cover no part of the chart."""
    (axes,) = drawn(grid(kind))
    axes.figure.draw_without_rendering()
    legend = axes.get_legend()
    texts = axes.get_yticklabels() if kind == "bars" else legend.get_texts()
    names = [text.get_text() for text in texts]
    assert [name.split("dropout=")[1].split()[0] for name in names] == [str(at) for at in range(32)]
    assert all(name.startswith(f"n_kv_head={at}, ") for at, name in enumerate(names))
    chart, whole = axes.get_window_extent(), axes.figure.bbox
    for box in [text.get_window_extent() for text in texts]:
        assert not box.overlaps(chart)
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1
        assert whole.y0 <= box.y0 < box.y1 <= whole.y1
    assert chart.width > whole.width / 3
    assert chart.height > whole.height / 2


@pytest.mark.parametrize(
    ("sizes", "ticks"),
    [
        ((2304, 3072), [2304, 3072]),  # no power of two between
        ((3072, 4608), [3072, 4608]),  # one
        ((512, 1024, 4096), [512, 1024, 2048, 4096]),
    ],
)
def test_an_axis_of_bytes_has_two_numbers_at_least(drawn, sizes, ticks):
    (axes,) = drawn(points(*sizes))
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == ticks


@pytest.mark.browser
@pytest.mark.parametrize(
    ("sizes", "ticks"),
    [
        ((3072, 2304), ["2,304", "3,072"]),
        ((4608, 4609, 3072), ["3,072", "4,608"]),  # two that would overlap
        ((512, 1024, 4096), ["512", "1,024", "2,048", "4,096"]),
    ],
)
def test_so_has_that_of_a_page(tmp_path, opened, sizes, ticks):
    path = tmp_path / "chart.html"
    path.write_text(page.page("a", interactive.fragment(points(*sizes)), interactive.script()))
    shown = opened(path, width=900)
    shown.wait_for_selector(".plot .mark")
    texts = shown.locator(".plot > text[text-anchor=middle]").all_text_contents()
    assert texts == [*ticks, "bytes"]


def many(kind, n=17):
    """A chart of one series for each of the first `n` variants."""
    series = [Series(name=f"v{at}", x=[1.0 + at, 20.0 + at], y=[at, at], look=Look.of(at)) for at in range(n)]
    return Chart(
        kind=kind, x="bytes", y="loss", series=[*series, *(replace(one, faint=True) for one in series)]
    )


def test_thirty_two_variants_can_be_told_apart_in_an_image(drawn):
    (points, lines) = drawn(many("points", 32), many("lines", 32))
    shown = [line for line in points.get_lines() if not line.get_label().startswith("_")]
    assert len({(line.get_color(), line.get_marker(), line.get_fillstyle()) for line in shown}) == 32
    for axes in (points, lines):
        dotted = [line for line in axes.get_lines() if line.get_linewidth() < 1]
        assert len({(line.get_color(), str(line._unscaled_dash_pattern)) for line in dotted}) == 32


MARKED = """[...document.querySelectorAll('.plot .series')].map((one) => (
[one.getAttribute('class'), [...one.querySelectorAll('path')].map((path) => (
  [path.getAttribute('class'), path.getAttribute('stroke-dasharray'), path.getAttribute('transform')?.split(' ')[2]]
))])).map(JSON.stringify)"""


@pytest.mark.browser
@pytest.mark.parametrize("kind", ["points", "lines"])
def test_and_on_a_page(tmp_path, opened, kind):
    path = tmp_path / "chart.html"
    swatches = "".join(interactive.swatch(Look.of(at)) for at in range(32))
    path.write_text(page.page("a", interactive.fragment(many(kind, 32)) + swatches, interactive.script()))
    shown = opened(path, width=900)
    shown.wait_for_selector(".plot .series path", state="attached")
    marked = shown.evaluate(MARKED)
    assert len(marked) == 64
    faint = [one for one in marked if "faint" in one]
    assert len(set(faint)) == len(faint) == 32
    assert len(set(marked) - set(faint)) == 32
    looks = "[...document.querySelectorAll('.swatch')].map((one) => getComputedStyle(one)).map((one) => "
    looks += "one.backgroundColor + one.backgroundImage)"
    assert len(set(shown.evaluate(looks))) == 32


@pytest.mark.parametrize("kind", ["lines", "points"])
def test_names_of_other_scripts_and_with_an_underscore_are_in_an_image(drawn, kind):
    """Without a warning; matplotlib leaves what begins with an underscore out of legends."""
    named = [Series(name=name, x=[1, 2], y=[1.0, 2.0]) for name in ("_ref", "模型", "\U0001f680")]
    (axes,) = drawn(Chart(kind=kind, x="steps", y="loss", series=named))
    texts = [text.get_text().strip().split()[0] for text in axes.get_legend().get_texts()]
    assert texts == ["_ref", "模型", "\U0001f680"]


def test_what_no_font_has_is_a_box_without_a_warning(tmp_path):
    one = Series(name="模型 \U0001f680", x=[1, 2], y=[1.0, 2.0])
    panel = Panel(name="a", title="模", charts=[Chart(kind="lines", x="steps", y="loss", series=[one])])
    plot.draw(panel, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize("kind", ["lines", "points"])
def test_a_gap_is_left_out_of_what_a_chart_says(kind):
    ended, whole = (
        Series(name=name, x=[1, 2], y=y) for name, y in (("A", [1.0, float("nan")]), ("B", [1.0, 3.0]))
    )
    said = interactive.described(Chart(kind=kind, x="steps", y="loss", series=[ended, whole]))
    assert "nan" not in said
    assert "B 3" in said
