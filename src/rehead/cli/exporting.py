"""`rehead export`."""

import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rehead.cli.app import Json, app, say, torch_dtype
from rehead.errors import UsageError


@app.command
def export(
    source: Annotated[Path, Parameter(help="a model or run folder")],
    destination: Annotated[Path, Parameter(help="a new folder for the result, or a .gguf file")],
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
            "smollm3",
            "phi3",
            "granite",
            "olmo2",
            "glm",
            "glm4",
            "gemma2",
            "gemma3_text",
            "gpt_neox",
            "qwen3_moe",
            "gguf",
        ],
        Parameter(
            help="the model family to write; auto takes the first that can represent the model, and gguf "
            "writes a file for llama.cpp, as does any destination that ends in .gguf"
        ),
    ] = "auto",
    engine: Annotated[
        Literal["transformers", "vllm", "sglang", "mlx", "llama.cpp"] | None,
        Parameter(
            name="--for",
            help="the engine that will load the result; what it would compute differently is refused "
            "[default: a result that all of them load, where possible]",
        ),
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "q8_0"] | None,
        Parameter(
            help="number format of the weights: bf16 or fp32 or, in a GGUF file, also fp16 or q8_0 (there of the "
            "matrices alone) [default: that of the source]"
        ),
    ] = None,
    push: Annotated[
        str | None,
        Parameter(
            help="upload the folder to the Hugging Face Hub as the model org/name, with the token from "
            "`hf auth login` or HF_TOKEN"
        ),
    ] = None,
    private: Annotated[
        bool, Parameter(negative="", help="with --push: a new model on the Hub is private")
    ] = False,
    replace: Annotated[
        bool,
        Parameter(
            negative="",
            help="with --push: replace the other files in the repository; its earlier commits keep them",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Write a model as a stock Hugging Face folder, or a GGUF file, that other software loads without rehead.

    MQA with rope and heads of 64, 32 or 16, and models without rope whose keys and
    values need at most 512 numbers a token, can be exported exactly as DeepSeek-V3's
    MLA, which vLLM and SGLang serve with their own kernels; with --for transformers,
    so can GQA and MHA with rope. What a class or the engine cannot represent is refused by name.
    --push uploads the folder once it is written. For example:

        rehead export out/llama out/stock
        rehead export out/llama out/deepseek --format deepseek_v3 --for transformers
        rehead export out/llama out/narrow --dtype bf16
        rehead export out/llama out/llama.gguf --format gguf --dtype q8_0
        rehead export out/llama out/pushed --push me/llama --private
    """
    from rehead.conversion.export.folder import export_folder
    from rehead.conversion.export.push import require_name
    from rehead.report.conversion import predictions, sizes
    from rehead.report.progress import Board

    if destination.suffix == ".gguf" and format != "gguf":
        if format != "auto":
            raise UsageError(
                f"{destination}: --format {format} writes a folder. Use another name, or --format gguf."
            )
        format = "gguf"
    if push is None and (private or replace):
        raise UsageError(f"--{'private' if private else 'replace'} is about an upload: give --push org/name.")
    if push is not None:
        require_name(push)
        if format == "gguf":
            raise UsageError(
                f"--push {push}: a .gguf file has no card to go with it. Upload it yourself: hf upload {push} FILE."
            )
    if format == "gguf":
        _export_gguf(source, destination, engine, dtype, json)
        return
    if dtype == "fp16" or dtype == "q8_0":
        raise UsageError(f"--dtype {dtype}: a folder is written in bf16 or fp32. Use it with --format gguf.")
    held = None if dtype is None else torch_dtype(dtype)
    with Board(f"exporting {source}"):
        architecture, certificate = export_folder(source, destination, format, engine, push, held)
    error = None if certificate is None else certificate.logits["relative_error"]
    facts = {"architecture": architecture, "folder": str(destination), "relative_error": error}
    text = f"{architecture} in {destination}"
    if certificate is not None:
        text += f"\n{sizes(certificate)}\n{predictions(certificate)}"
    if push is not None:
        pushed = _push(destination, push, private, replace, json)
        facts |= pushed
        text += f"\nuploaded to {pushed['url']} at commit {pushed['commit']}"
    say(facts, text, json)


def _push(folder: Path, name: str, private: bool, replace: bool, json: bool) -> dict[str, str]:
    """Upload an export; return its page and its commit."""
    from rehead.conversion.export.push import Push
    from rehead.report.progress import Board

    bars = sys.stderr.isatty() and not json
    with nullcontext() if bars else Board(f"uploading {folder}"):
        push = Push(folder=folder, name=name, private=private, replace=replace)
        return asdict(push.run(progress=bars))


def _export_gguf(source: Path, file: Path, engine: str | None, dtype: str | None, json: bool) -> None:
    """Write a GGUF file, and say what is in it."""
    from rehead.conversion.export.gguf import export_gguf
    from rehead.report.conversion import predictions
    from rehead.report.progress import Board

    if engine not in (None, "llama.cpp"):
        raise UsageError(f"--for {engine} with --format gguf: such files are llama.cpp's. Leave out --for.")
    with Board(f"exporting {source}"):
        written = export_gguf(source, file, dtype)
    error = None if written.certificate is None else written.certificate.logits["relative_error"]
    facts = {"architecture": written.architecture, "file": str(file), "types": written.types}
    kinds = ", ".join(f"{count} {name}" for name, count in written.types.items())
    text = f"{written.architecture} in {file}, in tensors of {kinds}"
    if written.certificate is not None:
        text += f"\n{predictions(written.certificate)}"
    say({**facts, "relative_error": error}, text, json)
