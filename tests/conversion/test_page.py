"""CONVERSION.md says what the certificate says."""

from dataclasses import replace

import pytest

import rehead
from rehead.attention import GroupedConfig
from rehead.conversion import Certificate
from rehead.conversion.certificate import CERTIFICATE
from rehead.conversion.events import Earlier, Healing
from rehead.conversion.history import history
from rehead.conversion.page import markdown, page
from rehead.report.conversion import present_certificate

GQA = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=4, v_head_dim=5)


@pytest.fixture
def certificate(gpt, words):
    model = gpt(GQA, replace(GQA, n_kv_head=3))
    return rehead.convert(
        model, to="mla", kv_rank=7, calibration=words(200), test=words(90, seed=1), seed=11
    )[1]


def test_layers_that_differ_are_told_of_everywhere(certificate, tmp_path, capsys):
    """In the terminal and in the history of the next conversion, as on the page."""
    first = certificate.layers[0]
    assert first.result == certificate.layers[1].result  # only the sources differ
    assert certificate.ends == (f"{first.source}, and others", first.result)
    present_certificate(certificate, tmp_path)
    assert capsys.readouterr().out.startswith(f"{first.source}, and others -> {first.result}: approximate\n")
    assert history(certificate)[0].source == f"{first.source}, and others"


@pytest.mark.parametrize(
    ("error", "said"),
    [(0.01234, ", standard error 0.0123)\n"), (0.00001, ")\n"), (None, ")\n")],
    ids=["told", "below the digits", "an older certificate's"],
)
def test_how_sure_a_change_is(error, said, certificate, tmp_path, capsys):
    """An older certificate has none."""
    logits = {name: figure for name, figure in certificate.logits.items() if name != "change_error"}
    if error is not None:
        logits["change_error"] = error
    certificate = replace(certificate, loss=[2.0, 2.125], logits=logits)
    (tmp_path / CERTIFICATE).write_text(certificate.to_json())
    present_certificate(Certificate.read(tmp_path), tmp_path)
    assert "2.0000 -> 2.1250 nats per token (+0.1250" + said in capsys.readouterr().out
    assert ("standard error" in page(certificate)) == (error is not None)


def test_parameters_are_told_where_they_change(certificate, tmp_path, capsys):
    for pair, said in (
        ([800, 1000], "\nparameters    800 -> 1,000 (+25.0 %)\n"),
        ([800, 800], "bytes per token, float64 (31.11 %)\nloss"),
    ):
        present_certificate(replace(certificate, parameters=pair), tmp_path)
        assert said in capsys.readouterr().out


def test_all_the_figures_are_there(certificate):
    text, logits = page(certificate), certificate.logits
    first = certificate.layers[0]
    for figure in (
        f"From **{first.source}** to **{first.result}**, and others (below). **Approximate.**",
        f"| loss, nats per token | {certificate.loss[0]:.4f} | {certificate.loss[1]:.4f} |",
        f"| KV cache, bytes per token | {8 * (18 + 27)} | {8 * 14} |",
        "| KV cache, share of the source's | 100 % | 31.11 % |",  # 14 of 45
        f"| parameters | {certificate.parameters[0]:,} | {certificate.parameters[1]:,} |",
        "Compared on 89 tokens of ids "
        f"(sha256 of its ids {certificate.test.sha256[:12]}...), in windows of 16. "
        "Whether it overlaps with what the model was trained on is not checked.\n",
        f"| largest error of a logit, less the token's mean | {logits['max_error']:.3g} |",
        f"| KL divergence from the source, nats per token | {logits['kl']:.3g} |",
        f"| likeliest token is another | {100 * logits['argmax_flips']:.3g} % |",
        f"| standard error of the loss's change, as if tokens were independent | {logits['change_error']:.2g} |",
        f"| 0 | 18 to 7 | factor (weighted) | {first.lost_energy:.2e} | {first.output_error:.2e} |",
        "| 1 | 27 to 7 | factor (weighted) |",
        "rank 7 of the 18 that hold everything; rank 7 of the 23 that hold everything.",
        "Fitted to 200 of the 200 tokens of ids "
        f"(sha256 of its ids {certificate.calibration[0].sha256[:12]}...), in windows of 16;",
        "seed 11; weights and activations in float64; ",
        f"torch {certificate.environment['torch']}",
    ):
        assert figure in text, figure


def test_exact_and_without_a_text(gpt):
    _, certificate = rehead.convert(gpt(GQA), to="mla")
    text = page(certificate)
    assert "From **gqa, 2 KV heads of 4** to **mla, rank 18**. **Exact**: the same function" in text
    assert "Compared on random tokens, since no text was given." in text
    assert "Fitted to no text" in text
    assert "nats per token |" not in text.split("## How far")[0]
    assert "## Healing" not in text
    assert "Why: rank 18 holds all keys and values." in text


def test_what_was_taught(gpt, words):
    """A column of errors, in the certificate of one that was taught only."""
    model, given = gpt(GQA), {"calibration": words(200), "length": 16}
    _, plain = rehead.convert(model, to="mla", kv_rank=7, **given)
    _, taught = rehead.convert(model, to="mla", kv_rank=7, **given, teach=2)
    before, after = taught.layers[0].taught
    text = page(taught)
    assert "| output error | taught |" in text
    assert f" | {before:.2e} to {after:.2e} |" in text
    assert "before and after the attention learned from the source's, in 2 passes, on windows" in text
    assert "taught" not in page(plain).lower()
    left = replace(taught, layers=[replace(taught.layers[0], taught=None), taught.layers[1]])
    assert f"| {taught.layers[0].output_error:.2e} | no |" in page(left)


def test_what_it_was_fitted_to_and_measured_on(certificate):
    """Several texts by name, the model's own said as what it is; a test of the same kind is no proof for others."""
    (text,) = certificate.calibration
    several = [replace(text, name="fit.txt"), replace(text, name="self")]
    made = page(replace(certificate, calibration=several))
    assert "Fitted to 200 of the 200 tokens of fit.txt (sha256" in made
    assert "and 200 of the 200 tokens of self (sampled from the source, at temperature 1" in made
    warning = "of its kind: on other kinds of text more may be lost."
    assert warning not in made
    assert warning in page(replace(certificate, held_out=True))


def test_nothing_done(gpt):
    _, certificate = rehead.convert(gpt(GQA), GQA)
    assert "Nothing had to change." in page(certificate)
    assert "| 0 | 18 to 18 | none | 0.00e+00 | 0.00e+00 |" in page(certificate)


def test_healing_is_a_table_of_its_own(certificate):
    healed = Healing(
        steps=300, teacher="source", distillation=1.0, train="all", learning_rate=1e-4, batch_tokens=4096,
        kl=[0.25, 0.125], loss=[None, 1.5],
    )  # fmt: skip
    text = page(replace(certificate, healing=[healed]))
    assert "| 300 | 4,096 | 0.25 to 0.125 | ? to 1.5 |" in text
    assert text.index("## What was done") < text.index("## Healing") < text.index("## Where")


def test_conversions_of_the_source_come_first(certificate):
    one = Earlier(
        source="mha", result="gqa, *2*", exact=False, kl=0.125, loss=[1.5, 1.75], kv_bytes_per_token=[96, 32],
        healed=300,
    )  # fmt: skip
    certificate = replace(certificate, earlier=[one, replace(one, exact=True, loss=None)])
    text = page(certificate)
    row = "| mha to gqa, &#42;2&#42; | approximate | 0.125 | 1.5000 to 1.7500 | 96 to 32 | 300 |"
    assert text.index("was itself made by conversions") < text.index(row) < text.index("| KV cache, bytes")
    assert row.replace("approximate", "exact").replace("1.5000 to 1.7500", "") in text
    test_every_table_is_rectangular(certificate)


def test_every_table_is_rectangular(certificate):
    for block in page(certificate).split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1, block


def test_a_table():
    assert markdown(("", "a"), [("b", "1")]).splitlines() == ["|  | a |", "| --- | ---: |", "| b | 1 |"]
