"""`rehead plan`, `rehead convert` and `rehead export`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rehead.cli.app import Json, app, say


@app.command
def plan(
    model: Annotated[Path, Parameter(help="a model or run folder, a config.json, or a YAML of options")],
    *,
    context: Annotated[int | None, Parameter(help="tokens in the cache; the model's block_size")] = None,
    batch: int = 1,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    parts: Annotated[
        bool,
        Parameter(negative="", help="what a layer's attention is made of and computes, in a second table"),
    ] = False,
    json: Json = False,
) -> None:
    """Show what each variant of a model would cost, and what converting to it would be.

    FLOPs and bytes are those of one decoded token per sequence. A conversion is exact, approximate,
    impossible, or pointless where it would not shrink the cache.
    """
    import torch

    from rehead.conversion.folder import read_plannable
    from rehead.conversion.plan import plan as make
    from rehead.report.conversion import present_parts, present_plan

    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    config = read_plannable(model)
    found = make(config, config.block_size if context is None else context, batch, types[dtype])
    if json:
        say(asdict(found), "", json)
    else:
        present_plan(found)
        if parts:
            present_parts(found)


@app.command
def convert(
    source: Path,
    destination: Path,
    *,
    to: Annotated[
        Literal["mha", "gqa", "mqa", "mla", "reduced"] | None, Parameter(help="left out, the kind stays")
    ] = None,
    n_kv_head: Annotated[int | None, Parameter(help="KV heads, for gqa and mla")] = None,
    kv_rank: Annotated[int | None, Parameter(help="numbers of the latent; all it needs to be exact")] = None,
    kv_fraction: Annotated[float | None, Parameter(help="the same as a share of the present cache")] = None,
    max_loss: Annotated[
        float | None, Parameter(help="smallest latents that cost no more nats per token")
    ] = None,
    measured_ranks: Annotated[
        bool, Parameter(negative="", help="with --kv-fraction: a rank for each layer, by measuring")
    ] = False,
    method: Annotated[
        Literal["weighted", "whitened", "svd", "procrustes", "mean", "first"] | None,
        Parameter(help="how to approximate; the best there is evidence for"),
    ] = None,
    head_map: Literal["contiguous", "modular"] | None = None,
    rope_layout: Literal["half-split", "interleaved"] | None = None,
    calibration: Annotated[
        Path | None, Parameter(help="text to fit to; its last tenth is held out unless --test is given")
    ] = None,
    test: Annotated[Path | None, Parameter(help="text to measure on")] = None,
    allow_loss: Annotated[
        bool, Parameter(negative="", help="write the result though it is not exact")
    ] = False,
    seed: int = 0,
    json: Json = False,
) -> None:
    """Turn a model's attention into another kind, with a certificate of what was kept and lost.

    The result is a model folder with conversion.json and CONVERSION.md in it. A run folder brings its
    own text. For example:

    rehead convert out/run out/mla --to mla --kv-fraction 0.5 --allow-loss
    """
    from rehead.conversion import Wish
    from rehead.conversion.folder import convert_folder
    from rehead.report.conversion import present_certificate

    certificate = convert_folder(
        source,
        destination,
        Wish(
            to=to,
            n_kv_head=n_kv_head,
            kv_rank=kv_rank,
            kv_fraction=kv_fraction,
            head_map=head_map,
            rope_layout=rope_layout,
        ),
        method=method,
        calibration=calibration,
        test=test,
        measured_ranks=measured_ranks,
        max_loss=max_loss,
        allow_loss=allow_loss,
        seed=seed,
    )
    if json:
        say(asdict(certificate), "", json)
    else:
        present_certificate(certificate, destination)


@app.command
def export(
    source: Path,
    destination: Path,
    *,
    format: Annotated[
        Literal[
            "auto",
            "gpt2",
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "deepseek_v3",
            "deepseek_v2",
            "minicpm3",
            "youtu",
        ],
        Parameter(help="the family to write; auto takes the first that can say all of the model"),
    ] = "auto",
    engine: Annotated[
        Literal["transformers", "vllm"] | None,
        Parameter(name="--for", help="vllm: only what it serves as it is; transformers: all that it can say"),
    ] = None,
    json: Json = False,
) -> None:
    """Write a model as a stock Hugging Face folder that other software loads without rehead.

    MQA with rope, and models without rope, go out exactly as DeepSeek-V3's MLA,
    which vLLM and SGLang serve with their own kernels; with --for transformers, GQA
    and MHA with rope do too. What a class or the engine cannot say is refused by name.
    """
    from rehead.conversion.export import export_folder

    architecture, certificate = export_folder(source, destination, format, engine)
    error = None if certificate is None else certificate.logits["relative_error"]
    facts = {"architecture": architecture, "folder": str(destination), "relative_error": error}
    say(facts, f"{architecture} in {destination}", json)
