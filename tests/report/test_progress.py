"""Lines of a run where stderr is no terminal."""

from rehead.report import progress


def test_a_line_per_evaluation_says_how_long_the_rest_will_take(monkeypatch, capfd):
    now = iter([100.0, 110.0, 160.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with progress.Board() as board:
        for step in (20, 30, 80):  # resumed at 20; the first ten steps took a second each
            board.show({"step": step, "train_loss": 2.0, "val_loss": 2.5}, 80, "train")
    assert capfd.readouterr().err.splitlines() == [
        "train  step 20/80  train loss 2.0000  val loss 2.5000",
        "train  step 30/80  train loss 2.0000  val loss 2.5000  0:00:50 left",
        "train  step 80/80  train loss 2.0000  val loss 2.5000",
    ]
