"""`rehead inspect`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rehead.cli.app import Json, app, say


@app.command
def inspect(
    model: Path,
    *,
    text: str,
    compare: Annotated[
        str | None, Parameter(help="another text; the rows of the beginning both share should not change")
    ] = None,
    layer: int = 0,
    head: int = 0,
    html: Annotated[Path | None, Parameter(help="write a page with all layers and heads")] = None,
    max_tokens: Annotated[int, Parameter(help="look at no more tokens of a text")] = 256,
    json: Json = False,
) -> None:
    """Show who attends to whom in a text: the map of one head, and how widely each head looks.

    Computed in float32. For example, with a GPT-2 folder:

    rehead inspect gpt2 --text "Hope is a waking dream" --compare "Hope is a waking dream and"
    """
    from rehead.checkpoint import load, read_at
    from rehead.data.files import write_whole
    from rehead.measure import inspection
    from rehead.report.inspection import html as make_page
    from rehead.report.inspection import present
    from rehead.tokenizer import Tokenizer

    read, tokenizer = read_at(model, lambda place: (load(place).float(), Tokenizer.load(place)))
    texts = [text] if compare is None else [text, compare]
    seen = [inspection.inspect(read, tokenizer, one, max_tokens) for one in texts]
    change = None if compare is None else inspection.compare(*seen)
    document = seen[0].document(layer, head)
    if change is not None:
        document["compared"] = seen[1].document(layer, head) | {
            "shared_tokens": change.n_token,
            "largest_change_per_layer": change.layers,
            "unchanged": change.unchanged,
        }
    if html is not None:
        write_whole(html, [make_page(f"Attention of {model.name}", seen, change, layer, head).encode()])
        document["html"] = str(html)
    if json:
        say(document, "", json)
    else:
        present(seen, change, layer, head)
        if html is not None:
            print(f"page     {html}")
