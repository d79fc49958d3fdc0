"""`rehead plan` and `rehead convert`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rehead.cli.app import DEVICE, LENGTH, Dtype, Json, KVFormat, app, say, torch_dtype, warn
from rehead.errors import UsageError


@app.command
def plan(
    model: Annotated[Path, Parameter(help="a model or run folder, a config.json, or a YAML of options")],
    *,
    context: Annotated[
        int | None, Parameter(help="tokens in the cache [default: the model's block_size]")
    ] = None,
    batch: Annotated[int, Parameter(help="sequences decoded at once")] = 1,
    dtype: Annotated[
        Dtype | None,
        Parameter(help="number format of the weights and the cache [default: the folder's own, or fp32]"),
    ] = None,
    kv_dtype: Annotated[
        KVFormat | None, Parameter(help="number format of the cache alone, scales counted [default: --dtype]")
    ] = None,
    tp: Annotated[
        int,
        Parameter(
            help="GPUs that split the heads of every layer (tensor parallelism); cache sizes are then per GPU"
        ),
    ] = 1,
    parts: Annotated[
        bool, Parameter(negative="", help="also show the parameters and FLOPs of one layer's attention")
    ] = False,
    json: Json = False,
) -> None:
    """Show what each variant of a model would cost, and whether converting to it is exact.

    FLOPs and bytes are those of one decoded token per sequence. A conversion is exact, approximate,
    impossible, or pointless where it would not shrink the cache. For example:

        rehead plan out/run --context 8192 --dtype bf16
        rehead plan out/run --context 8192 --dtype bf16 --kv-dtype fp8
    """
    from rehead.conversion.folder import plannable_dtype, read_plannable
    from rehead.conversion.plan import plan as make
    from rehead.report.conversion import present_parts, present_plan

    config = read_plannable(model)
    context = config.block_size if context is None else context
    counted = plannable_dtype(model) if dtype is None else torch_dtype(dtype)
    found = make(config, context, batch, counted, tp, kv_dtype)
    if json:
        say(asdict(found), "", json)
    else:
        present_plan(found)
        if parts:
            present_parts(found)


@app.command
def convert(
    source: Annotated[Path, Parameter(help="a model or run folder")],
    destination: Annotated[Path, Parameter(help="a new folder for the result")],
    *,
    to: Annotated[
        Literal["mha", "gqa", "mqa", "mla", "reduced"] | None,
        Parameter(help="the attention to convert to [default: the kind it is]"),
    ] = None,
    n_kv_head: Annotated[int | None, Parameter(help="number of KV heads, with --to gqa or mla")] = None,
    target: Annotated[
        Literal["canonical", "uneven", "rebuilt"] | None,
        Parameter(
            help="how to handle rotary keys, with --to mla. rebuilt: rebuild and rotate them at every step; "
            "uneven: keep a small rotary part with the frequencies that matter most; canonical: the same "
            "with DeepSeek's frequencies, for vLLM [default: rebuilt]"
        ),
    ] = None,
    rope_dim: Annotated[
        int | None,
        Parameter(
            help="width of the rotary part, with --target uneven [default: "
            "all that rotates; with --kv-fraction or --kv-rank about a quarter of the cache]"
        ),
    ] = None,
    kv_rank: Annotated[
        int | None,
        Parameter(
            help="width of the latent, with --to mla or reduced [default: what is needed to be exact; "
            "with --target canonical 512 or 256]"
        ),
    ] = None,
    kv_fraction: Annotated[
        float | None,
        Parameter(help="the new cache as a share of the present one, instead of --kv-rank"),
    ] = None,
    max_loss: Annotated[
        float | None,
        Parameter(
            help="with --to mla: the smallest latents that cost at most this many nats per token; "
            "accepts that loss, so --allow-loss is not needed"
        ),
    ] = None,
    measured_ranks: Annotated[
        bool,
        Parameter(
            negative="",
            help="with --kv-fraction: measure which layers need a wider latent or, with --target uneven, how "
            "many numbers should rotate",
        ),
    ] = False,
    method: Annotated[
        Literal["weighted", "whitened", "svd", "procrustes", "mean", "first"] | None,
        Parameter(help="how to approximate [default: the best that the text at hand allows]"),
    ] = None,
    head_map: Annotated[
        Literal["contiguous", "modular"] | None,
        Parameter(help="which query heads share a KV head [default: unchanged]"),
    ] = None,
    rope_layout: Annotated[
        Literal["half-split", "interleaved"] | None,
        Parameter(help="which two numbers of a head form a rotated pair [default: unchanged]"),
    ] = None,
    calibration: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            help="text to fit to, a corpus (python-docs, shakespeare), or self: sampled from the model; "
            "may be repeated: several are mixed. Without --test a text's last tenth is held out "
            "[default: a run's own text; of other models self]",
        ),
    ] = (),
    teach: Annotated[
        int,
        Parameter(
            help="passes over the calibration text in which each attention that is not exact learns, one "
            "layer at a time, to reproduce the outputs of the source's; 3 or 4 lose less but take longer"
        ),
    ] = 0,
    test: Annotated[Path | None, Parameter(help="text to measure on")] = None,
    length: Annotated[
        int | None, Parameter(help=f"tokens per window of the calibration and test texts {LENGTH}")
    ] = None,
    allow_loss: Annotated[
        bool,
        Parameter(
            negative="",
            help="write the result even if it is not exact; without this, a loss is only measured and reported",
        ),
    ] = False,
    jobs: Annotated[
        int, Parameter(help="layers converted in parallel, each in a process of its own with one thread")
    ] = 1,
    device: Annotated[
        str,
        Parameter(
            help=f"where the models read texts (one layer at a time) and sample self (as a whole): {DEVICE}"
        ),
    ] = "cpu",
    resume: Annotated[
        bool, Parameter(negative="", help="go on with an interrupted conversion to this destination")
    ] = False,
    seed: Annotated[
        int,
        Parameter(
            help="seed of the text sampled for self, the labels drawn for --method weighted, the order of "
            "--teach, and the random tokens compared on where there is no text"
        ),
    ] = 0,
    json: Json = False,
) -> None:
    """Turn a model's attention into another kind, with a certificate of what was kept and lost.

    The result is a model folder with conversion.json and CONVERSION.md in it. Fitting a model of 135 million
    parameters to 24,576 tokens takes about 6 minutes on one CPU core; sampling self takes 2 or 3 more. Twice as
    many are read by default.
    For example:

        rehead convert out/run out/mla --to mla --kv-fraction 0.5 --allow-loss
    """
    from rehead.conversion import Target
    from rehead.conversion.folder import convert_folder
    from rehead.report.conversion import present_certificate
    from rehead.report.progress import Board

    if jobs < 1:
        raise UsageError(f"--jobs {jobs}: the number of layers converted in parallel. Use 1 or more.")
    wanted = Target(
        to=to,
        target=target,
        rope_dim=rope_dim,
        n_kv_head=n_kv_head,
        kv_rank=kv_rank,
        kv_fraction=kv_fraction,
        head_map=head_map,
        rope_layout=rope_layout,
    )
    with Board(f"converting {source}"):
        certificate = convert_folder(
            source,
            destination,
            wanted,
            method=method,
            calibration=calibration,
            test=test,
            length=length,
            measured_ranks=measured_ranks,
            max_loss=max_loss,
            allow_loss=allow_loss,
            teach=teach,
            resume=resume,
            seed=seed,
            n_process=jobs,
            device=device,
        )
    if not any(layer.steps for layer in certificate.layers):
        warn(f"{source} already is what is asked for: {destination} is a copy in rehead's format.")
    if certificate.test is None:
        warn("compared on random tokens, which say little about text: --test TEXT measures the loss on one.")
    if json:
        say(asdict(certificate), "", json)
    else:
        ranked = measured_ranks and target != "uneven"  # which measures how many numbers rotate
        present_certificate(certificate, destination, kv_fraction, measured=ranked)
        by_rule = target == "uneven" and kv_fraction is not None and rope_dim is None and not measured_ranks
        if by_rule and not certificate.exact:
            print(
                "hint          how many numbers rotate was not measured: --measured-ranks looks for a better width"
            )
