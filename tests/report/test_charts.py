"""Charts as images and as data for a page: names of bars, numbers on axes, gaps."""

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


@pytest.mark.parametrize("kind", ["lines", "points"])
def test_a_gap_is_left_out_of_what_a_chart_says(kind):
    ended, whole = (
        Series(name=name, x=[1, 2], y=y) for name, y in (("A", [1.0, float("nan")]), ("B", [1.0, 3.0]))
    )
    said = interactive.described(Chart(kind=kind, x="steps", y="loss", series=[ended, whole]))
    assert "nan" not in said
    assert "B 3" in said
