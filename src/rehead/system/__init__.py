"""The machine: its devices, memory and processor, and the user's cache folder."""
