"""Studies: variants of one run, trained or made from each other, measured alike and set side by side."""

from rehead.study.attention_maps import Maps, maps
from rehead.study.grid import jobs
from rehead.study.job import Job, one_source
from rehead.study.preset import Preset
from rehead.study.run import study

__all__ = ["Job", "Maps", "Preset", "jobs", "maps", "one_source", "study"]
