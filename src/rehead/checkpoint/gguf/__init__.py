"""Converts GGUF files of llama.cpp to Hugging Face folders."""

from rehead.checkpoint.gguf.folder import Imported, import_file

__all__ = ["Imported", "import_file"]
