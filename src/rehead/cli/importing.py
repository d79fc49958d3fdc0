"""`rehead import`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rehead.cli.app import Dtype, Json, app, say, torch_dtype


@app.command(name="import")
def import_(
    file: Annotated[Path, Parameter(help="a GGUF file of llama.cpp")],
    folder: Annotated[Path, Parameter(help="the model folder to write")],
    *,
    dtype: Annotated[
        Dtype,
        Parameter(help="number format of the weights; fp32 keeps every value of the file, the others round"),
    ] = "fp32",
    json: Json = False,
) -> None:
    """Convert a GGUF file to a Hugging Face folder, including the tokenizer.

    Quantised weights are dequantised. Supported architectures are llama, qwen2
    and qwen3; others are refused by name. Needs pip install "rehead[gguf]".
    For example:

        rehead import SmolLM2-135M-Instruct.Q4_1.gguf smollm2
    """
    from rehead.checkpoint.gguf import import_file
    from rehead.report.progress import Board

    with Board(f"importing {file}"):
        imported = import_file(file, folder, torch_dtype(dtype))
    kinds = ", ".join(f"{count} {name}" for name, count in imported.types.items())
    lines = (
        f"{imported.architecture} in {folder}",
        f"weights    {imported.parameters:,} numbers in {dtype}, from tensors of {kinds}",
        f"tokenizer  {imported.vocab_size:,} tokens{', a chat template' if imported.chat_template else ''}",
    )
    say({"folder": str(folder), "dtype": dtype, **asdict(imported)}, "\n".join(lines), json)
