"""`rehead train` and `rehead study`."""

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from rehead.cli.app import LENGTH, Json, app, say, warn
from rehead.cli.options import OPTIONS
from rehead.errors import Interrupted, UsageError
from rehead.system.torchrun import of_torchrun

SAME_OPTIONS = "options of the run, as `rehead train --help` lists them"

if TYPE_CHECKING:
    from rehead.config import RunOptions
    from rehead.study import Job


@app.command
def train(
    *flags: Annotated[str, Parameter(group=OPTIONS)],
    config: Annotated[
        tuple[Path, ...],
        Parameter(negative="", help="a YAML file of options, which flags override; may be repeated"),
    ] = (),
    print_config: Annotated[
        bool, Parameter(negative="", help="print the options as YAML and stop, without training")
    ] = False,
    json: Json = False,
) -> None:
    """Train a GPT or an Elman RNN on a text.

    Flags are group.key=value, with or without leading dashes; the groups are
    system, data, model and trainer. With the defaults, training takes about 13
    minutes on 2 CPU cores. For example:

        rehead train data.path=input.txt model.n_kv_head=3 model.rope=True
    """
    from rehead.config import flags as reader

    options = reader.read(list(flags), config)
    resumed = Path(options.system.work_dir) / "config.yaml"
    if options.trainer.resume and resumed.is_file():
        options = reader.read(list(flags), (resumed, *config)).at(options.system.work_dir)
        options.refuse_unused(reader.read([], (resumed,)))
    else:
        options.refuse_unused()
    if print_config:
        say(asdict(options), reader.write(options).rstrip(), json)
        return
    last = _train(options)
    say(last, _ending(last), json)


@app.command
def heal(
    folder: Annotated[Path, Parameter(help="the converted model")],
    *flags: Annotated[str, Parameter(help=SAME_OPTIONS)],
    teacher: Annotated[Path, Parameter(help="the model it was converted from")],
    length: Annotated[int | None, Parameter(help=f"tokens per block, as data.block_size {LENGTH}")] = None,
    teach: Annotated[
        int | None,
        Parameter(
            help="first teach each attention that is not exact to reproduce the outputs of the source's, one "
            "layer at a time, in this many passes over at most 49,152 tokens of the text; the result is "
            "FOLDER-taught, or WORK_DIR-taught if system.work_dir is given"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Train a converted model to predict as its source did, and update its certificate.

    The run is written to FOLDER-healed and trains on the text that the source was
    trained on, unless flags change that; with trainer.distillation=0 the model
    learns from the text alone. For example:

        rehead heal out/mla --teacher out/run --teach 2 trainer.max_iters=300
    """
    from rehead.checkpoint import resolve
    from rehead.conversion.history import conversion_of
    from rehead.report.conversion import present_certificate
    from rehead.report.progress import Board
    from rehead.training.heal import heal_options

    options = heal_options(folder, teacher, list(flags), length)
    if not options.trainer.resume:
        options.refuse_unused()
    if teach is not None:
        from rehead.training.lessons import taught_first

        with Board(f"teaching {folder}"):
            options = taught_first(folder, options, teach)
    last = _train(options)
    with Board(f"checking {options.system.work_dir}"):
        healed = resolve(Path(options.system.work_dir))
    certificate = conversion_of(healed)
    # A certificate has a loss of its own, of the whole held-out text.
    ending = _ending(last) if certificate is None else f"done: {last['step']} steps"
    say(last | {"certificate": None if certificate is None else asdict(certificate)}, ending, json)
    if not json and certificate is not None:
        present_certificate(certificate, healed)


@app.command
def study(
    *flags: Annotated[str, Parameter(help=SAME_OPTIONS)],
    preset: Annotated[
        str,
        Parameter(
            help="demo, checkpoint, variants, homework, frontier, grid, or a YAML file like them (docs/study.md)"
        ),
    ] = "demo",
    jobs: Annotated[int, Parameter(help="runs in parallel, each with its share of the threads")] = 1,
    fraction: Annotated[
        float, Parameter(help="share of every run's iterations to train; the report shows it")
    ] = 1.0,
    only: Annotated[
        str | None, Parameter(help="make only the run in this folder, such as mha/seed-0, and no report")
    ] = None,
    launcher: Annotated[
        Literal["local", "slurm"],
        Parameter(
            help="where the runs are made: here, or each in a batch job of a Slurm cluster (docs/scale.md)"
        ),
    ] = "local",
    slurm: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            help="an option for all batch jobs, such as partition=gpu, time=4:00:00, gpus_per_node=1, "
            "cpus_per_task=8 or mem=32G; may be repeated",
        ),
    ] = (),
    dry_run: Annotated[
        bool, Parameter(negative="", help="print the scripts of the batch jobs, and submit nothing")
    ] = False,
    json: Json = False,
) -> None:
    """Train variants of one model, or convert and heal them, and compare them in a report.

    A flag applies to every variant. A flag with several values makes a variant
    of each; several values of system.seed repeat all variants. The results are
    written to system.work_dir (runs/PRESET): report.html, images, results.json
    and CSV. Finished variants are not trained again. On a CPU, demo takes about
    3 minutes and frontier 33; homework takes 35 with trainer.batch_size=8
    trainer.eval_batches=16, and hours without. For example:

        rehead study --preset grid 'model.n_kv_head=[1,2,3,6]' 'system.seed=[0,1]'
    """
    from rehead.report.progress import Board
    from rehead.report.story import Story
    from rehead.report.study import present, require_packages, write
    from rehead.study import Preset, maps, one_source, study_one
    from rehead.study import jobs as jobs_of
    from rehead.study import study as run

    require_packages()
    if jobs < 1:
        raise UsageError(f"--jobs {jobs}: the number of parallel runs. Use 1 or more.")
    if launcher == "local" and (slurm or dry_run):
        raise UsageError(f"{'--slurm' if slurm else '--dry-run'} describes batch jobs: add --launcher slurm.")
    if launcher == "slurm" and (jobs > 1 or only):
        raise UsageError(
            f"{'--only' if only else '--jobs'} is for --launcher local: Slurm runs what it has room for."
        )
    if launcher == "slurm" and find_spec("submitit") is None:
        raise UsageError('--launcher slurm needs submitit: pip install "rehead[slurm]".')
    chosen = Preset.read(preset)
    planned = jobs_of(chosen, list(flags), fraction)
    command = ["rehead", "study", "--preset", preset, *flags]
    command += [] if fraction == 1 else ["--fraction", str(fraction)]
    if launcher == "slurm":
        from rehead.study.slurm import run_on_slurm, scripts

        if dry_run:
            texts = scripts(chosen, planned, command, slurm)
            say({"scripts": texts}, "\n".join(texts.values()), json)
            return
    several = len({job.seed for job in planned}) > 1
    with Board() as board:
        story = None if one_source(planned) is None else Story(planned, board)

        def watch(job: "Job", record: dict[str, Any]) -> None:
            title = f"{job.variant}, seed {job.seed}" if several else job.variant
            if record.get("event") == "stage":
                board.stage(record["stage"], title)
            elif record.get("event") in ("begin", "measured", "failed", "costs", "formats"):
                board.forget(title)
                if story is not None:
                    story.show(job, record)
            else:
                board.show(record, job.options.trainer.max_iters, title)

        if only is not None:
            found = study_one(chosen, planned, only, watch)
            say(found, f"done: {planned[0].place / only}", json)
            return
        if launcher == "slurm":
            run_on_slurm(chosen, planned, command, slurm)
        document = run(chosen, planned, watch, command=command, n_process=jobs, fraction=fraction)
    place = planned[0].place
    write(document, maps(planned), place)
    if json:
        say(document, "", json)
    else:
        present(document, place)


def _train(options: "RunOptions") -> dict[str, Any]:
    """Train to the end with progress on stderr; return the last record.

    Of several processes the first shows the progress; the others end here.
    """
    from rehead.report.progress import watch
    from rehead.training import train as run

    last: dict[str, Any] = {}
    job = of_torchrun()
    follows = options.trainer.parallel != "none" and job is not None and job.rank != 0
    records = run(options) if follows else watch(run(options), options.trainer.max_iters)
    try:
        for record in records:
            last = record if record.get("event") == "end" else last
            if record.get("event") == "start" and options.trainer.resume and not follows:
                _tell_finished(options, record["step"])
    except Interrupted as error:
        if follows:
            raise SystemExit(error.exit_code) from error
        raise
    if follows:
        raise SystemExit(0)
    return last


def _tell_finished(options: "RunOptions", step: int) -> None:
    """Warn of a run that is resumed after its last step."""
    if step == options.trainer.max_iters:
        warn(
            f"{options.system.work_dir} has reached trainer.max_iters={step}: no step is left to train. Give more to "
            "go on."
        )


def _ending(last: dict[str, Any]) -> str:
    kind = "validation" if "val_loss" in last else "training"
    return f"done: {kind} loss {last.get('val_loss', last['train_loss']):.4f} nats per token"
