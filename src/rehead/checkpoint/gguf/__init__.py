"""GGUF files of llama.cpp, read into Hugging Face's folders."""

from rehead.checkpoint.gguf.folder import Imported, import_file

__all__ = ["Imported", "import_file"]
