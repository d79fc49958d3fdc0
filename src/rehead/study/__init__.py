"""Studies: variants that are trained, or made from each other, then measured alike and compared."""

from rehead.study.attention_maps import Maps, maps
from rehead.study.grid import jobs
from rehead.study.job import Job, one_source
from rehead.study.preset import Preset
from rehead.study.run import study, study_one

__all__ = ["Job", "Maps", "Preset", "jobs", "maps", "one_source", "study", "study_one"]
