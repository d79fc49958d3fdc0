"""A folder of every family, written by transformers, through the commands a user types."""

import pytest
import tokenizers as hf
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from parity.test_stock import CASES, made
from typed_lines import documents

TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. " * 12
LETTERS = sorted(set(TEXT.replace(" ", "Ġ")))
FIRST = {}
for label, (family, _) in CASES.items():
    FIRST.setdefault(family, label)
MORE = ["qwen3 moe", "deepseek v2, experts", "deepseek, experts in groups"]


@pytest.fixture(params=sorted({*FIRST.values(), *MORE}))
def folder(request, tmp_path):
    """Their folder, with a tokenizer of fewer ids than the model has, and two texts."""
    torch.manual_seed(0)
    made(*CASES[request.param], tmp_path / "theirs")
    inner = hf.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(tmp_path / "theirs")
    (tmp_path / "fit.txt").write_text(TEXT[:700], encoding="utf-8")
    (tmp_path / "held.txt").write_text(TEXT[700:], encoding="utf-8")
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_the_plan_offers_is_made_measured_and_read_from(folder):
    """The plan's last exact row and its last approximate one; or the advice to keep the model as it is."""
    text = "--data held.txt --length 60"
    plan, measured = documents("plan theirs", f"eval theirs {text}", cwd=folder)
    rows, before = {row["verdict"]: row for row in plan["rows"]}, measured["loss"]
    offered = {verdict: rows[verdict]["command"] for verdict in ("exact", "approximate") if verdict in rows}
    if not offered:
        assert "keep it as it is" in plan["advice"]
    for verdict, command in {"present": "", **offered}.items():
        made_of = {"present": "theirs"}.get(verdict, verdict)
        fit = "--calibration fit.txt --test held.txt --length 60 --allow-loss"
        making = [f"convert theirs {verdict} {command} {fit}", f"eval {verdict} {text}"] if command else []
        *made_as, generated, bench = documents(
            *making,
            f"generate {made_of} --prompt 'To be' --max-new-tokens 5 --temperature 0",
            f"bench {made_of} --prompt-lengths 5 --new-tokens 6 --rounds 1",
            cwd=folder,
        )
        if command:
            certificate, after = made_as[0], made_as[1]["loss"]
            assert certificate["loss"][0] == pytest.approx(before, abs=1e-6)
            assert after == pytest.approx(certificate["loss"][1], abs=1e-6)
            assert verdict != "exact" or after == pytest.approx(before, abs=1e-5)
        assert generated["results"][0]["prompt"] == "To be"
        case, *_ = bench["cases"]
        assert case["cache_bytes_held"] == case["cache_bytes_predicted"]
