"""Validation loss against KV bytes per token of one trained model, converted every way, then healed.

    python benchmarks/conversions.py out/run out/frontier --ranks 96 38 19 --kv-heads 3 2 1 --heal 300

Every point is a model folder under the second argument and every healing a run beside it, so that an
interrupted benchmark goes on where it was. Writes results.json, table.md and frontier.png there.
`separate` is what other converters do: keys and values factored apart, each whitened, half the rank each.
`control` is the source itself, trained on with the same schedule and the same number of tokens.
"""

import argparse
import json
import shlex
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import torch

import rehead
from rehead.attention import GroupedConfig, LatentConfig
from rehead.checkpoint import read_at
from rehead.config import GPTConfig, flags
from rehead.conversion import Target, factor
from rehead.conversion.blocks import TEST_TOKENS, blocks_of
from rehead.conversion.certificate import Certificate
from rehead.conversion.fit.layerwise import gather
from rehead.conversion.fit.moments import attentions
from rehead.conversion.folder import convert_folder
from rehead.conversion.layers import with_layers
from rehead.conversion.page import markdown
from rehead.data import source_of, split, tokenize
from rehead.measure import evaluate, kv_bytes_per_token
from rehead.measure.environment import environment
from rehead.measure.fidelity import compare
from rehead.report.chart import COLOURS
from rehead.tokenizer import load_tokenizer
from rehead.training import train
from rehead.training.heal import DEFAULTS, heal_options

HEALED = (100, 300)
SVDS = ("svd", "whitened", "weighted")


def points(ranks, kv_heads):
    """Name, method and target of every conversion."""
    for rank in ranks:
        for method in SVDS:
            yield f"mla-{rank}-{method}", method, Target(to="mla", kv_rank=rank)
    for n_kv_head in kv_heads:
        to = {"to": "mqa"} if n_kv_head == 1 else {"to": "gqa", "n_kv_head": n_kv_head}
        for method in ("mean", "procrustes"):
            yield f"kv{n_kv_head}-{method}", method, Target(**to)


def converted(source, folder, method, target):
    """The certificate of one point, made now unless it is there."""
    if not folder.exists():
        convert_folder(source, folder, target, method=method, allow_loss=True)
    return read_at(folder, Certificate.read)


def separate(model, texts, rank):
    """Keys and values in latents of their own, half the rank each: (loss, KL to the source)."""
    with tempfile.TemporaryDirectory() as folder:
        found = gather(model, blocks_of(model, texts.train), Path(folder), needs=())
        moments = [statistics.in_memory() for statistics in found]
    target = Target(to="mla", kv_rank=rank)
    latents = [target.attention(layer, model.config.n_embd) for layer in model.config.attention]
    layers = []
    for module, latent, statistics in zip(attentions(model), latents, moments, strict=True):
        assert isinstance(module.config, GroupedConfig)
        assert isinstance(latent, LatentConfig)
        assert statistics.inputs is not None
        weights = {name: weight.detach().double() for name, weight in module.named_parameters()}
        key, value = (
            factor(weights[f"{name}.weight"], share, statistics.inputs[:-1, :-1])
            for name, share in (("k_proj", rank // 2), ("v_proj", rank - rank // 2))
        )
        heads = latent.n_kv_head
        both = torch.block_diag(key.up, value.up).split([len(key.up), len(value.up)])
        up = torch.cat([part.unflatten(0, (heads, -1)) for part in both], dim=1).flatten(0, 1)
        made = {name: weight for name, weight in weights.items() if name[0] in "qo"}
        made |= {"kv_a_proj_with_mqa.weight": torch.cat([key.down, value.down]), "kv_b_proj.weight": up}
        if module.config.qkv_bias:
            pair = [weights[f"{name}.bias"].unflatten(0, (heads, -1)) for name in ("k_proj", "v_proj")]
            made["kv_b_proj.bias"] = torch.cat(pair, dim=1).flatten()
        layers.append((replace(latent, kv_lora_rank=up.shape[1]), made))
    compared = compare(model, with_layers(model, layers), blocks_of(model, texts.val, TEST_TOKENS))
    return compared.losses[1], compared.kl


def healed(options, blocks):
    """Losses by step of a healing run, finished now unless it is, on the tokens the others are measured on."""
    run = Path(options.system.work_dir)
    log = run / "metrics.jsonl"
    if not log.exists() or '"event": "end"' not in log.read_text():
        for _ in train(options):
            pass
    found = {}
    for step in HEALED:
        folder = run / "checkpoints" / f"step-{step:06d}"
        if folder.exists():
            found[step] = evaluate(rehead.load(folder), blocks)[0]
    return found


def main():
    """Make all points, heal them, write the table and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--ranks", type=int, nargs="*", default=[])
    parser.add_argument("--kv-heads", type=int, nargs="*", default=[])
    parser.add_argument("--heal", type=int, default=0, help="iterations")
    parser.add_argument("--heal-only", nargs="*", help="points to heal; all but mean by default")
    parser.add_argument("--flags", nargs="*", default=[], help="flags of rehead heal")
    arguments = parser.parse_args()
    source, results = arguments.source, arguments.results
    results.mkdir(parents=True, exist_ok=True)
    model = rehead.load(source)
    assert isinstance(model.config, GPTConfig)
    own = flags.read([], (source / "config.yaml",))
    tokenizer = load_tokenizer(source)
    ids = tokenize(source_of(own.data), tokenizer, results / "tokens.bin").ids
    texts = split(ids, model.config.block_size, own.data.val_fraction)
    full = sum(layer.kv_numbers() for layer in model.config.attention)
    rows = []
    for rank in arguments.ranks:
        loss, kl = separate(model, texts, rank)
        size = kv_bytes_per_token(model.config) * rank * model.config.n_layer // full
        rows.append({"name": f"mla-{rank}-separate", "kv_bytes": size, "loss": loss, "kl": kl})
        print(rows[-1], flush=True)
    for name, method, target in points(arguments.ranks, arguments.kv_heads):
        certificate = converted(source, results / name, method, target)
        row = {
            "name": name,
            "kv_bytes": certificate.kv_bytes_per_token[1],
            "loss": certificate.loss[1],
            "kl": certificate.logits["kl"],
        }
        rows.append(row)
        print(row, flush=True)
    if not rows:
        parser.error("no points: give --ranks or --kv-heads")
    before = certificate.loss[0]
    if arguments.heal:
        blocks = blocks_of(model, texts.val, TEST_TOKENS)
        changes = [f"trainer.max_iters={arguments.heal}", "trainer.eval_every=300", "trainer.eval_batches=1"]
        changes += ["trainer.save_every=100", "trainer.keep=9", "trainer.resume=True"]
        chosen = arguments.heal_only or [
            row["name"] for row in rows if row["name"].endswith((*SVDS, "procrustes"))
        ]
        for row in rows:
            if row["name"] in chosen:
                options = heal_options(results / row["name"], source, [*changes, *arguments.flags])
                row["healed"] = healed(options, blocks)
                print(row, flush=True)
        usual = {
            "system": {"work_dir": f"{results}/control"},
            "model": {"folder": str(source)},
            "trainer": DEFAULTS,
            "data": asdict(own.data),
        }
        control = flags.read([*changes, *arguments.flags], tables=(usual,))
        rows.append(
            {"name": "control", "kv_bytes": certificate.kv_bytes_per_token[0], "loss": before, "kl": 0.0}
        )
        rows[-1]["healed"] = healed(control, blocks)
    document = {
        "command": shlex.join(["python", *sys.argv]),
        "environment": environment(),
        "source_loss": before,
        "source_kv_bytes": kv_bytes_per_token(model.config),
        "test_tokens": certificate.test.read,
        "points": rows,
    }
    (results / "results.json").write_text(json.dumps(document, indent=1))
    (results / "table.md").write_text(table(document) + "\n")
    picture(document, results / "frontier.png")
    print(table(document))


def table(document):
    """All points, the source first."""
    base, size = document["source_loss"], document["source_kv_bytes"]
    steps = sorted({step for row in document["points"] for step in row.get("healed", {})})
    header = (
        "point",
        "KV B/token",
        "of source",
        "loss",
        "change",
        "KL",
        *(f"healed {step}" for step in steps),
    )
    rows = [("source", f"{size:,}", "100 %", f"{base:.4f}", "", "", *[""] * len(steps))]
    for row in document["points"]:
        losses = row.get("healed", {})
        cells = [f"{losses[step]:.4f}" if step in losses else "" for step in steps]
        share = f"{100 * row['kv_bytes'] / size:.1f} %"
        change = f"{row['loss'] - base:+.4f}"
        rows.append(
            (
                row["name"],
                f"{row['kv_bytes']:,}",
                share,
                f"{row['loss']:.4f}",
                change,
                f"{row['kl']:.5f}",
                *cells,
            )
        )
    return markdown(header, rows)


LEAST = 1e-5
"""Nats drawn where a point is no worse than the source."""


def picture(document, path):
    """Loss above the source's over KV bytes: a line per method, dashed to where it was healed."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    base = document["source_loss"]
    for colour, method in zip(
        COLOURS, ("svd", "separate", "whitened", "weighted", "mean", "procrustes"), strict=False
    ):
        found = [row for row in document["points"] if row["name"].endswith(method)]
        found.sort(key=lambda row: row["kv_bytes"])
        sizes = [row["kv_bytes"] for row in found]
        axes.plot(sizes, [max(row["loss"] - base, LEAST) for row in found], "o-", color=colour, label=method)
        healed = [row for row in found if row.get("healed")]
        last = [max(row["healed"][max(row["healed"], key=int)] - base, LEAST) for row in healed]
        label = f"{method}, healed" if healed else None
        axes.plot([row["kv_bytes"] for row in healed], last, "x--", color=colour, label=label, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("KV cache, bytes per token")
    axes.set_ylabel("validation loss above the source's (nats per token)")
    axes.set_title(f"Source: {document['source_kv_bytes']:,} bytes per token, loss {base:.4f}", loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=2, fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
