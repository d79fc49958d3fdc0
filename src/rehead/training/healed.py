"""The certificate of a healed model: that of its conversion, measured again."""

import warnings
from dataclasses import asdict, replace
from pathlib import Path

from rehead.checkpoint import read_at, read_config, resolve
from rehead.checkpoint.hub import pinned
from rehead.config import RunOptions
from rehead.conversion.blocks import TEST_TOKENS, blocks_of
from rehead.conversion.certificate import CERTIFICATE, Certificate, Text
from rehead.conversion.events import Healing
from rehead.conversion.history import conversion_of, has_its_weights, is_source
from rehead.conversion.page import PAGE, page
from rehead.conversion.texts import Passage
from rehead.data import Ids, read_ids, shown, split
from rehead.errors import InvalidInput
from rehead.measure import kv_bytes_per_token
from rehead.measure.environment import environment
from rehead.measure.fidelity import compare
from rehead.model import LanguageModel
from rehead.system.torchrun import of_torchrun
from rehead.tokenizer import Tokenizer, load_tokenizer
from rehead.training.folder import RunFolder
from rehead.training.seen import already_seen, warn_unless_held_out


def certificate_of(options: RunOptions) -> Certificate | None:
    """Return the certificate of the model to heal; None if it was not converted from the teacher.

    Also None, with a warning, if that is unknown or there is no validation text. Raises InvalidInput if the healed
    model could not be measured as the certificate was.
    """
    if options.model.folder is None or options.trainer.teacher is None:
        return None
    path, teacher = Path(options.model.folder), Path(options.trainer.teacher)
    try:
        resolve(path)
    except InvalidInput:  # a run may be resumed after the folder it began with is gone
        warnings.warn(
            f"{path} is gone, and with it what was measured if it was converted: the result gets no {CERTIFICATE}",
            stacklevel=2,
        )
        return None
    certificate = read_at(path, conversion_of)
    if certificate is None:
        return None
    if not (is_source(read_at(teacher, read_config), certificate) and has_its_weights(teacher, certificate)):
        warnings.warn(
            f"{teacher} is not the model that {path} was converted from, by its config and the sha256 of its weights: "
            f"the trained model gets no {CERTIFICATE}",
            stacklevel=2,
        )
        return None
    if not options.data.val_fraction:
        warnings.warn(
            f"data.val_fraction=0 leaves no text to measure the healed model on: it gets no {CERTIFICATE}. Use 0.1 for "
            "one",
            stacklevel=2,
        )
        return None
    limit = read_at(path, read_config).block_size
    if not 1 <= certificate.length <= limit:
        raise InvalidInput(
            f"{path}: its {CERTIFICATE} was measured on texts of length={certificate.length}, the model reads 1 to "
            f"{limit} tokens. Convert the model again."
        )
    job = of_torchrun()
    if job is None or job.rank == 0:  # who gives the tokens their final name
        _warn_of_fitted(certificate, options, load_tokenizer(options.model.folder))
    return certificate


def _warn_of_fitted(certificate: Certificate, options: RunOptions, tokenizer: Tokenizer) -> None:
    """Warn of a run about to begin if its validation text is not held out of the conversion."""
    ids = read_ids(RunFolder(Path(options.system.work_dir)).read_tokens, tokenizer)
    parts = split(ids, options.data.block_size, options.data.val_fraction)
    warn_unless_held_out(certificate, ids, parts.val)


def measured_again(
    certificate: Certificate,
    teacher: LanguageModel,
    model: LanguageModel,
    text: Ids,
    part: Passage,
    tokenizer: Tokenizer,
) -> Certificate:
    """Return a certificate with the losses and logits of a trained model against its teacher.

    It is measured on `part`, the end of a text of which the rest is trained on; its name says so if the model has
    seen it before. The sizes are those in the number format of the trained model.
    """
    seen = already_seen(certificate, text, part.ids)
    if seen:
        part = replace(part, name=f"{part.name}, which {seen}")
    blocks = blocks_of(model, part.ids, TEST_TOKENS, certificate.length, part.bos)
    logits = asdict(compare(teacher, model, shown(blocks, "comparing with the teacher")))
    loss = list(logits.pop("losses"))
    test = Text.of(part, TEST_TOKENS, certificate.length).decoded(part.ids, tokenizer)
    dtype = model.head.weight.dtype
    return replace(
        certificate,
        logits=logits,
        loss=loss,
        kv_bytes_per_token=[kv_bytes_per_token(one.config, dtype) for one in (teacher, model)],
        dtype=str(dtype).removeprefix("torch."),
        test=test,
        held_out=not seen,
        exact=False,
        compared_on="text",
        environment=environment(model.device),
    )


def healed_files(
    before: Certificate,
    options: RunOptions,
    model: LanguageModel,
    teacher: LanguageModel,
    step: int,
    held_out: Ids,
    tokenizer: Tokenizer,
) -> dict[str, str]:
    """Return the certificate `before`, measured again against the teacher, as files by name."""
    text = read_ids(RunFolder(Path(options.system.work_dir)).tokens, tokenizer)
    part = Passage(name="the validation part of the run's text", ids=held_out, bos=tokenizer.bos)
    after = measured_again(before, teacher, model, text, part, tokenizer)
    assert after.test is not None
    assert after.loss is not None
    alike = before.test is not None and before.test.sha256 == after.test.sha256
    place = str(options.trainer.teacher)
    entry = Healing(
        steps=step,
        teacher=place if pinned(place) else Path(place).absolute().name,
        distillation=options.trainer.distillation,
        train=options.trainer.train,
        learning_rate=options.trainer.learning_rate,
        batch_tokens=options.trainer.batch_size * options.trainer.grad_accumulation * options.data.block_size,
        kl=[before.logits["kl"] if alike else None, after.logits["kl"]],
        loss=[before.loss[1] if alike and before.loss else None, after.loss[1]],
    )
    after = replace(after, healing=[*before.healing, entry])
    return {CERTIFICATE: after.to_json(), PAGE: page(after)}
