"""What attention itself takes of a training step (seeds B24, E21)."""

from types import SimpleNamespace

import pytest
import torch

from rehead.attention import kernels
from rehead.config import ModelOptions, TrainerOptions
from rehead.config.options import RunOptions
from rehead.errors import UsageError
from rehead.measure.attention_cost import attention_cost
from rehead.model import build
from rehead.study.costs import _Subject

B, L, H, N_LAYER = 3, 16, 4, 2


def model_of(**flags):
    return build(ModelOptions(n_layer=N_LAYER, n_embd=24, n_query_head=H, **flags).resolve(29, 4 * L))


def cost(n_token=L, *, scores_kept=False, **flags):
    return attention_cost(model_of(**flags), torch.randint(29, (B, n_token)), scores_kept=scores_kept)


def test_scores_written_out_are_quadratic_in_the_text():
    scores = N_LAYER * B * H * L * L * 8
    assert cost(scores_kept=True).kept_bytes >= scores
    grown = [cost(n * L, scores_kept=True).kept_bytes for n in (1, 2, 4)]
    assert grown[2] - grown[1] == pytest.approx(4 * (grown[1] - grown[0]), rel=0.25)  # a line would give 2
    used = [cost(n * L, attn_pdrop=0.0).kept_bytes for n in (1, 2, 4)]
    assert used[2] < grown[2]


@pytest.mark.parametrize("scores_kept", [False, True])
def test_fewer_kv_heads_change_nothing_but_the_keys_and_values(scores_kept):
    """E21: the curve over KV heads is flat. What may differ is a copy of keys and values."""
    kept = {n: cost(n_kv_head=n, scores_kept=scores_kept, attn_pdrop=0.0).kept_bytes for n in (4, 2, 1)}
    keys_and_values = N_LAYER * 2 * B * L * 24 * 8
    assert 0 <= kept[4] - kept[1] <= keys_and_values
    assert kept[4] >= kept[2] >= kept[1]


def test_the_model_is_as_it_was():
    model = model_of().eval()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    compute = kernels.attend
    assert attention_cost(model, torch.randint(29, (B, L))).seconds > 0
    with pytest.raises(UsageError, match="ids holds 29"):
        attention_cost(model, torch.full((B, L), 29))  # which the embedding has no row for
    assert kernels.attend is compute
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def test_without_attention_there_is_nothing_to_measure():
    model = build(ModelOptions(type="rnn", n_embd=12).resolve(29, 16))
    assert attention_cost(model, torch.randint(29, (B, 8))) is None


def test_latents_and_windows_are_measured_too():
    assert cost(attention="mla", kv_lora_rank=8, qk_rope_head_dim=4, rope=True).kept_bytes > 0
    assert cost(rope=True, window=3).kept_bytes > 0


@pytest.mark.parametrize("scores_kept", [False, True])
def test_a_step_without_dropout_keeps_no_draws(scores_kept):
    plain = cost(attn_pdrop=0.0, scores_kept=scores_kept).kept_bytes
    found = attention_cost(
        model_of(attn_pdrop=0.3), torch.randint(29, (B, L)), scores_kept=scores_kept, dropout=False
    )
    assert found.kept_bytes == plain < cost(attn_pdrop=0.3, scores_kept=scores_kept).kept_bytes


def test_a_step_that_recomputes_keeps_one_layer_and_runs_forward_twice(monkeypatch):
    calls, compute = [], kernels.attend
    monkeypatch.setattr(
        kernels, "attend", lambda *given, **rules: calls.append(1) or compute(*given, **rules)
    )
    ids, found = torch.randint(29, (B, L)), {}
    for recompute in (False, True):
        calls.clear()
        found[recompute] = attention_cost(model_of(), ids, recompute=recompute)
        assert len(calls) == N_LAYER * (3 if recompute else 2)  # one of them to see what is kept
    assert found[False].kept_bytes == N_LAYER * found[True].kept_bytes


def test_a_study_measures_the_step_that_its_trainer_takes():
    """Without dropout after a teacher, and one layer at a time if it recomputes."""
    subject, model = object.__new__(_Subject), model_of(attn_pdrop=0.3)
    options = RunOptions(trainer=TrainerOptions(batch_size=B, recompute=True))
    subject.model, subject.n_token, subject.job = model, L, SimpleNamespace(options=options)
    for teacher in (None, model):
        subject.trainer = SimpleNamespace(teacher=teacher)
        wanted = attention_cost(
            model, torch.randint(29, (B, L)), dropout=teacher is None, recompute=True
        ).kept_bytes
        assert subject._attention()["attention"].kept_bytes == wanted < cost(attn_pdrop=0.3).kept_bytes
