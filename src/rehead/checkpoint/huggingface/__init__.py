"""Hugging Face's families: a table of names and fields each."""
