"""The first phase of healing: converted attentions learn from the source's, layer by layer."""

from dataclasses import replace
from pathlib import Path

from rehead.checkpoint import newest_step, own, publish, read_at
from rehead.checkpoint.hub import CARD
from rehead.config import RunOptions
from rehead.conversion.arguments import require_apart
from rehead.conversion.blocks import CALIBRATION_TOKENS, TEST_TOKENS, blocks_of
from rehead.conversion.certificate import CERTIFICATE, Certificate, Text, output_errors
from rehead.conversion.fit.teaching import teach
from rehead.conversion.history import has_its_weights
from rehead.conversion.origin import carried
from rehead.conversion.page import PAGE, page
from rehead.conversion.source import Source
from rehead.conversion.texts import Passage
from rehead.conversion.unfinished import SUFFIX, fingerprint, note_result, place_of, unfinished
from rehead.data import source_of, split, tokenize
from rehead.data.files import write_whole
from rehead.errors import ConfigError, InvalidInput, UsageError
from rehead.measure.environment import environment
from rehead.model import GPT
from rehead.system.allocator import return_freed_memory
from rehead.tokenizer import open_model
from rehead.training.heal import (
    healed_folder,
    require_its_tokenizer,
    require_same_tokens,
    require_same_vocabulary,
)
from rehead.training.healed import measured_again
from rehead.training.seen import warn_unless_held_out

PASSES = "passes"
"""The file, in the folder of an unfinished teaching, that has the number of its passes."""


def taught_first(folder: Path, options: RunOptions, passes: int) -> RunOptions:
    """Teach the model in `folder`, and return the options of the run that heals the taught model.

    The taught model is written to FOLDER-taught or, with another work_dir than FOLDER-healed, to WORK_DIR-taught: its
    attentions that lost something learn in `passes` over the training part of the run's text. `trainer.resume`
    resumes an interrupted teaching and does not repeat a finished one. Raises UsageError for fewer than one pass, no
    validation text or a run in FOLDER-taught, ConfigError where nothing was lost or a resumed teaching has other passes
    or is of another conversion, and InvalidInput if the folder exists or the work folder holds a run.
    """
    if passes < 1:
        raise UsageError(
            f"--teach {passes}: the number of passes over the text. Use 1 or more, or leave it out."
        )
    place = _place_of_taught(folder, options)
    if options.trainer.parallel != "none":
        raise UsageError(
            f"--teach with trainer.parallel={options.trainer.parallel}: one process teaches. Run it without torchrun "
            f"and trainer.max_iters=0 first, then heal {place}."
        )
    if not options.data.val_fraction:
        raise UsageError(
            "--teach with data.val_fraction=0: a taught model is measured on the validation part of the text. Use 0.1."
        )
    work_dir = Path(options.system.work_dir)
    require_apart(Path(f"{folder}-taught"), work_dir)
    resume, begun = options.trainer.resume, (work_dir / "config.yaml").is_file()
    kept = place.with_name(place.name + SUFFIX)
    if place.is_dir() and not resume:
        raise InvalidInput(
            f"{place} exists: continue with trainer.resume=True, or give another system.work_dir to teach again."
        )
    if resume and place.is_dir():
        before, done = (read_at(one, Certificate.read) for one in (folder, place))
        _require_same(passes, done.teach, place)
        if _conversion(before) != _conversion(done):
            raise ConfigError(
                f"{place} was taught from another conversion than {folder}: remove it, or start again with another "
                "system.work_dir and without trainer.resume."
            )
    elif resume and begun:
        raise ConfigError(
            f"the run in {options.system.work_dir} was begun without --teach, or {place} has been removed. Leave "
            "--teach out, or start again with another system.work_dir and without trainer.resume."
        )
    elif resume and not kept.is_dir():
        raise UsageError(f"there is neither {place} nor a run to resume. Leave trainer.resume out.")
    elif newest_step(work_dir) is not None:
        raise InvalidInput(
            f"{options.system.work_dir} already holds a run: continue it with trainer.resume=True, or choose another "
            "system.work_dir."
        )
    else:
        asked = unfinished(
            place, resume=resume, flag="trainer.resume=True", work="teaching", choose="system.work_dir"
        )
        with asked as scratch, publish(place) as aside:
            if (scratch / PASSES).is_file():
                _require_same(passes, int((scratch / PASSES).read_text()), kept)
            write_whole(scratch / PASSES, [str(passes).encode()])
            _teach(folder, aside, scratch, options, passes)
    trainer = replace(options.trainer, resume=resume and begun)
    return replace(options, model=replace(options.model, folder=str(place)), trainer=trainer)


def _conversion(certificate: Certificate) -> tuple[object, ...]:
    """Return the parts of a certificate that tell one conversion from another and that teaching does not change."""
    return certificate.result, *((layer.methods, layer.lost_energy) for layer in certificate.layers)


def _place_of_taught(folder: Path, options: RunOptions) -> Path:
    """Return FOLDER-taught, or WORK_DIR-taught for a run with a folder of its own, to teach again beside others."""
    work_dir = Path(options.system.work_dir)
    return Path(f"{folder if work_dir == healed_folder(folder) else work_dir}-taught")


def _require_same(passes: int, done: int, place: Path) -> None:
    """Raise ConfigError if a teaching in `place` has another number of passes."""
    if passes != done:
        raise ConfigError(
            f"--teach {passes} does not match the {done} {'pass' if done == 1 else 'passes'} of {place}: give "
            f"--teach {done}, or start again with another system.work_dir and without trainer.resume."
        )


def _teach(folder: Path, aside: Path, scratch: Path, options: RunOptions, passes: int) -> None:
    """Write the taught model into the folder `aside`, with a certificate measured on the validation part."""
    assert options.trainer.teacher is not None
    return_freed_memory()
    device = options.trainer.device
    teacher = open_model(options.trainer.teacher, device=device, in_memory=False)
    opened = open_model(folder, device=device, in_memory=False)
    source, result, length = teacher.model, opened.model, options.data.block_size
    require_same_vocabulary(result, source, options.trainer.teacher)
    require_its_tokenizer(opened.require_tokenizer(), options.data, str(folder))
    require_same_tokens(opened.require_tokenizer(), options.trainer.teacher)
    assert isinstance(source, GPT)
    assert isinstance(result, GPT)
    before = Certificate.read(opened.folder)
    lossy = [index for index, layer in enumerate(before.layers) if layer.methods]
    if not lossy:
        raise ConfigError(
            f"--teach: {folder} was converted exactly, so there is nothing to learn. Leave it out."
        )
    if not has_its_weights(Path(options.trainer.teacher), before):
        raise ConfigError(
            f"--teach: {options.trainer.teacher} has other weights than the model that {folder} was converted from, "
            f"whose sha256 is in its {PAGE}. Give that one, or leave --teach out."
        )
    files = {CARD: carried(folder, opened.folder), **opened.texts()}
    read_from = [fingerprint(one.folder) for one in (teacher, opened)]
    for model in (teacher, opened):
        model.require_standing()
    both = [Source(one.model, one.folder) for one in (teacher, opened)]
    text = tokenize(source_of(options.data), opened.require_tokenizer(), scratch / "text")
    parts = split(text.ids, length, options.data.val_fraction)
    warn_unless_held_out(before, text.ids, parts.val)
    bos = opened.require_tokenizer().bos
    fitted = Passage(name="the training part of the healing text", ids=parts.train, bos=bos)
    work = place_of(
        scratch,
        folders=read_from,
        weights=[list(one.digests.values()) for one in both],
        text=text.sha256,
        part=len(parts.train),
        length=length,
        passes=passes,
        seed=options.system.seed,
        environment=environment(result.device),
    )
    blocks = blocks_of(result, parts.train, CALIBRATION_TOKENS, length, bos)
    errors = teach(source, result, lossy, blocks, work, passes=passes, seed=options.system.seed)
    taught = [
        replace(layer, taught=[errors[index].before, errors[index].after]) if index in errors else layer
        for index, layer in enumerate(before.layers)
    ]
    held_out = Passage(name="the validation part of the healing text", ids=parts.val, bos=bos)
    test_blocks = blocks_of(result, held_out.ids, TEST_TOKENS, before.length, bos)
    output = output_errors(source, result, test_blocks[:1])
    after = replace(
        measured_again(before, source, result, text.ids, held_out, opened.require_tokenizer()),
        layers=[replace(layer, output_error=error) for layer, error in zip(taught, output, strict=True)],
        teach=passes,
        calibration=[
            *before.calibration,
            replace(Text.of(fitted, CALIBRATION_TOKENS, length), length=length),
        ],
    )
    files |= {CERTIFICATE: after.to_json(), PAGE: page(after)}
    own.write(result, aside, files)
    for one in both:
        one.require_unchanged()
    note_result(scratch, files[CERTIFICATE])
