"""Turns text of any length into the batches a model is trained and evaluated on."""

from rehead.data.batches import IGNORE, Batch, BatchSampler, evaluation_blocks, shown
from rehead.data.corpora import CORPORA
from rehead.data.text import CHUNK, Source, chunks, describe, named, source_of
from rehead.data.tokens import TOKENS, Ids, Split, Tokens, read_ids, require_vocabulary, split, tokenize

__all__ = [
    "CHUNK",
    "CORPORA",
    "IGNORE",
    "TOKENS",
    "Batch",
    "BatchSampler",
    "Ids",
    "Source",
    "Split",
    "Tokens",
    "chunks",
    "describe",
    "evaluation_blocks",
    "named",
    "read_ids",
    "require_vocabulary",
    "shown",
    "source_of",
    "split",
    "tokenize",
]
