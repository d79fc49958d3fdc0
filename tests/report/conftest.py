"""A study's document, made up: reports are tested without training anything."""

import pytest
import torch

from rehead.study import Maps

STEP = {
    "seconds_per_step": [0.02, 0.01, 0.03],
    "seconds_of_attention": [0.004, 0.003, 0.005],
    "seconds_of_attention_scores_kept": [0.008, 0.007, 0.009],
}


def costs(n, *, trained):
    memory = {
        "weights": 4000,
        "gradients": 4000,
        "optimizer": 8000,
        "activations": 9000 + n,
        "attention": 3000,
        "attention_scores_kept": 6000,
        "peak": 25005,
    }
    times = {
        "tokens_per_second_cached": [90.0 + n, 80.0, 99.0],
        "tokens_per_second_uncached": [30.0, 29.0, 31.0],
    }
    return {
        "context": 16, "parameters": 1000 + n, "parameters_counted": 1000 + n, "kv_bytes_per_token": 64 * n,
        "weight_bytes": 4000 + 4 * n,
        "cache_bytes": 1024 * n, "cache_bytes_held": 1024 * n, "training_flops_per_token": 6000,
        "input_lengths": {"cached": [1, 1, 1], "uncached": [1, 2, 3]},
        "memory": memory if trained else None, **times,
        **(STEP if trained else {}),
    }  # fmt: skip


def formats(n, losses, text):
    """What `rehead.study.kv_dtype` measures."""
    return {
        "context": 16,
        "kv_bytes_per_token": {"bf16": 32 * n, "int8": 20 * n},
        "cache_bytes": {"bf16": 512 * n, "int8": 320 * n},
        "unable": {"q8_0": text},
        "losses": {"": losses, "bf16": losses, "int8": [loss + 0.1 for loss in losses]},
    }


def variant(name, n, losses, curve, *, kind="trained", start=None, text="text"):
    runs = [
        {
            "seed": seed, "folder": f"runs/{n}/{seed}", "command": f"rehead train {text}", "steps": 4,
            "train_loss": loss, "val_loss": loss, "val_loss_at": {"16": loss},
            "curve": curve, "seconds_per_step": 0.1, "torn_lines": seed,
            "sample": text, "certificate": {"exact": False, "kl": 0.1, "loss": [1, 2]} if kind == "converted" else None,
        }
        for seed, loss in enumerate(losses)
    ]  # fmt: skip
    span = [sum(losses) / len(losses), min(losses), max(losses)]
    return {
        "variant": name, "kind": kind, "about": text, "convert": None, "from": start,
        "steps_before": 0 if start is None else 4, "batch_tokens": 48,
        "steps": 4, "length": 16, "length_before": 16, "on": {"text": {"path": text}, "blocks": 8},
        "val_loss": span, "train_loss": span, "costs": costs(n, trained=kind != "converted"), "runs": runs,
        "kv_dtype": formats(n, losses, text),
    }  # fmt: skip


@pytest.fixture
def made_up():
    """`made_up(text, names, curve)`: a document in which every string of unknown origin is `text`."""

    def make(text="plain", names=("A", "B", "C", "D"), curve=((0, 3.0, 3.1), (4, 2.0, 2.1))):
        curve = [list(point) for point in curve]
        a, b, c, d = names
        variants = [
            variant(a, 4, [2.0, 2.1], curve, text=text),
            variant(b, 2, [2.4, 2.5], curve, text=text),
            variant(c, 1, [2.05, 2.1], [], kind="converted", start=a, text=text),
            variant(d, 1, [2.15, 2.3], curve, kind="healed", start=c, text=text),
        ]
        claims = [
            {
                "variant": b,
                "against": a,
                "length": 16,
                "shorter": False,
                "difference": 0.4,
                "seeds": 2,
                "p": 0.0299,
                "told_apart": True,
            },
            {
                "variant": c,
                "against": a,
                "length": 16,
                "shorter": False,
                "difference": 0.075,
                "seeds": 2,
                "p": 0.473,
                "told_apart": False,
            },
        ]
        return {
            "study": text, "about": text, "command": f"rehead study {text}", "fraction": 0.5,
            "temperature": 0.8, "prompt": text, "prompt_note": None, "conversion": None, "exports": [],
            "environment": {"processor": text, "cores": 2}, "variants": variants,
            "questions": [
                {"ask": text, "of": [a, b, c], "show": ["loss", "frontier"], "claims": claims},
                {"ask": text, "of": list(names), "show": ["memory", "speed"], "claims": []},
                {"ask": text, "of": list(names), "show": ["kv_dtype"], "claims": []},
            ],
        }  # fmt: skip

    return make


@pytest.fixture
def attention():
    """`attention(names, tokens)`: maps of two layers with three heads."""

    def make(names=("A", "B"), tokens=("O", " God", ",", "\n")):
        torch.set_default_dtype(torch.float32)
        scores = torch.randn(3, len(tokens), len(tokens)).masked_fill(
            torch.ones(len(tokens), len(tokens)).triu(1) > 0, -torch.inf
        )
        weights = [scores.softmax(-1), (2 * scores).softmax(-1)]
        return {name: Maps(tokens=list(tokens), weights=weights, windows=[None, None]) for name in names}

    return make
