"""Hugging Face's families: each is a table of names and fields."""
