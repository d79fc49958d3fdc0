"""Generation ends at the ids that a folder names, as transformers' does."""

import json
import shutil

import pytest
import tokenizers as hf
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

import rehead
from rehead.generation import stream, until
from rehead.tokenizer import open_model
from typed_lines import typed

LETTERS = [chr(n) for n in range(97, 123)]
N_NEW = 12


@pytest.fixture
def folder(tmp_path):
    """A Llama of 26 letters, and the letters it writes after "cab"."""
    torch.manual_seed(9)
    torch.set_default_dtype(torch.float32)
    config = transformers.LlamaConfig(
        vocab_size=26, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.9, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    inner = hf.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(tmp_path)
    return tmp_path, model


def say(folder, **tables):
    """Set keys of JSON files; ... removes one."""
    for name, more in tables.items():
        path = folder / f"{name}.json"
        table = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({key: value for key, value in (table | more).items() if value is not ...}))


def letters(ids):
    return "".join(LETTERS[int(i)] for i in ids)


@pytest.mark.process
def test_as_typed_it_ends_where_transformers_ends(folder):
    """One id, several, those of generation_config.json before those of config.json, or none."""
    path, model = folder
    ids = torch.tensor([[2, 0, 1]])
    greedy = {"max_new_tokens": N_NEW, "do_sample": False, "pad_token_id": 0}
    whole = letters(model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)[0, 3:])
    assert whole[3] not in whole[:3]
    end, other = LETTERS.index(whole[3]), LETTERS.index(whole[1])
    (path / "generation_config.json").unlink()
    say(path, config={"eos_token_id": end})
    several = path.with_name(f"{path.name}-several")
    shutil.copytree(path, several)
    say(several, generation_config={"eos_token_id": [other, end]})
    words = [
        f"generate {place} --prompt cab --temperature 0 --max-new-tokens {N_NEW}" for place in (path, several)
    ]
    results = typed(*(f"{line}{more}" for line in words for more in ("", " --json", " --json --ignore-eos")))
    assert not any(code for code, _, _ in results), results
    for place, printed in ((path, results[:3]), (several, results[3:])):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(place)
        ended = letters(theirs.generate(ids, attention_mask=torch.ones_like(ids), **greedy)[0, 3:])
        shown, stopped, ignored = (out for _, out, _ in printed)
        assert shown == f"cab{ended[:-1]}\n"
        (result,) = json.loads(stopped)["results"]
        assert result == {"prompt": "cab", "completion": ended[:-1], "finish_reason": "stop"}
        (result,) = json.loads(ignored)["results"]
        assert result == {"prompt": "cab", "completion": whole, "finish_reason": "length"}


@torch.no_grad()
@pytest.mark.parametrize("stop", [{4}, {0, 1, 2, 3}, {25}, set(), set(range(26))])
def test_rows_end_each_for_itself(folder, stop):
    """As each alone, filled up; with sampling too."""
    model = rehead.load(folder[0])
    prompts, seeds = [torch.tensor([n]) for n in range(6)], list(range(6))
    free = torch.stack(list(stream(model, prompts, N_NEW, seed=seeds)), dim=1)
    found = torch.stack(list(until(stream(model, prompts, N_NEW, seed=seeds), stop)), dim=1)
    lengths = []
    for row, ended in zip(free.tolist(), found.tolist(), strict=True):
        at = next((n for n, id in enumerate(row) if id in stop), N_NEW - 1)
        lengths.append(at + 1)
        assert ended == (row[: at + 1] + [row[at]] * N_NEW)[: len(ended)]
    assert found.shape[1] == max(lengths)


@pytest.mark.parametrize(
    ("said", "ends"), [(7, {7}), ([7, 8], {7, 8}), (None, set()), ("7", set()), ([True, 7], {7})]
)
def test_what_a_folder_says(folder, said, ends):
    say(folder[0], config={"eos_token_id": ...}, generation_config={"eos_token_id": said})
    assert open_model(folder[0]).ends == ends
