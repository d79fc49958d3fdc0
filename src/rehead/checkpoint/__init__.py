"""Models on disk."""

from rehead.checkpoint.find import newest_step, read_at, resolve
from rehead.checkpoint.native import load, read_config, save
from rehead.checkpoint.publish import publish, verify

__all__ = ["load", "newest_step", "publish", "read_at", "read_config", "resolve", "save", "verify"]
