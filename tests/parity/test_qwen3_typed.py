"""A Qwen3 folder as it is published, through the commands a user types."""

import pytest
import tokenizers as hf
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

import rehead
from typed_lines import documents

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
N_PROMPT, N_NEW = 5, 6
TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. " * 12
LETTERS = sorted(set(TEXT.replace(" ", "Ġ")))


@pytest.fixture
def folder(tmp_path):
    """Published values and number formats; heads of 16 where width / heads is 8, a rank less than the cache holds."""
    torch.manual_seed(5)
    config = transformers.Qwen3Config(
        vocab_size=len(LETTERS), hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=40960, rope_theta=1_000_000.0,
        tie_word_embeddings=True, max_window_layers=2, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    letters = {letter: i for i, letter in enumerate(LETTERS)}  # ids to text and back is what they were
    inner = hf.Tokenizer(models.BPE(vocab=letters, merges=[]))
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(tmp_path / "theirs")
    (tmp_path / "fit.txt").write_text(TEXT[:700], encoding="utf-8")
    (tmp_path / "held.txt").write_text(TEXT[700:], encoding="utf-8")
    return tmp_path


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(600)  # six commands, on a machine that may be busy
@pytest.mark.parametrize("to", ["--to mla", "--to mla --target uneven"])
@torch.no_grad()
def test_every_command_takes_a_latent_with_norms(to, folder):
    """Half the cache, and each figure twice: from the command that promises it and from the one that measures it."""
    wanted = f"{to} --kv-fraction 0.5 --calibration fit.txt --test held.txt --length 64 --allow-loss"
    plan, certificate, measured, bench, inspected, result = documents(
        "plan theirs --dtype bf16",
        f"convert theirs ours {wanted}",
        "eval ours --data held.txt --length 64",
        f"bench ours --prompt-lengths {N_PROMPT} --new-tokens {N_NEW} --rounds 1",
        "inspect ours --text To,be",
        f"generate ours --prompt To,be --max-new-tokens {N_NEW} --temperature 0",
        cwd=folder,
    )
    rows = {row["command"]: row for row in plan["rows"]}
    present, half = rows[""], rows[f"{to} --kv-fraction 0.5"]
    assert half["verdict"] == "approximate"
    assert 2 * half["kv_bytes_per_token"] == present["kv_bytes_per_token"]
    assert [layer["kv_numbers"] for layer in certificate["layers"]] == [[64, 32]] * 2
    assert {name for layer in certificate["layers"] for name in layer["methods"]} == {"weighted"}
    assert measured["loss"] == pytest.approx(certificate["loss"][1], abs=1e-6)
    case, *_ = bench["cases"]
    assert case["cache_bytes_held"] == case["cache_bytes_predicted"]
    assert case["cache_bytes_held"] == half["kv_bytes_per_token"] * (N_PROMPT + N_NEW)
    weights = torch.tensor(inspected["map"]["weights"])
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(N_PROMPT))

    text = "To,be" + result["results"][0]["completion"]
    ids = torch.as_tensor(rehead.load_tokenizer(folder / "ours").encode(text))[None]
    logits = rehead.load(folder / "ours")(ids)[:, N_PROMPT - 1 : -1].double()
    chosen = logits.gather(2, ids[:, N_PROMPT:, None])[..., 0]
    assert chosen.shape == (1, N_NEW)
    assert (logits.amax(dim=-1) - chosen).max() < logits.std() / 10  # bfloat16 rounds differently in a cache
