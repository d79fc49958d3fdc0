"""`rehead import`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rehead.cli.app import Json, app, say


@app.command(name="import")
def import_(
    file: Annotated[Path, Parameter(help="a GGUF file of llama.cpp")],
    folder: Annotated[Path, Parameter(help="where the model folder is to be")],
    *,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"],
        Parameter(help="of the weights; fp32 keeps every number that the file stands for, the others round"),
    ] = "fp32",
    json: Json = False,
) -> None:
    """Turn a GGUF file into a Hugging Face folder, tokenizer and all.

    Quantised weights become the numbers they stand for. Architectures are llama,
    qwen2 and qwen3; what rehead does not know is refused by name. Needs
    pip install "rehead[gguf]". For example:

        rehead import SmolLM2-135M-Instruct.Q4_1.gguf smollm2
    """
    import torch

    from rehead.checkpoint.gguf import import_file
    from rehead.report.progress import Board

    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    with Board(f"importing {file}"):
        found = import_file(file, folder, types[dtype])
    kinds = ", ".join(f"{count} {name}" for name, count in found.types.items())
    lines = (
        f"{found.architecture} in {folder}",
        f"weights    {found.parameters:,} numbers in {dtype}, from tensors of {kinds}",
        f"tokenizer  {found.vocab_size:,} tokens{', a chat template' if found.chat_template else ''}",
    )
    say({"folder": str(folder), "dtype": dtype, **asdict(found)}, "\n".join(lines), json)
