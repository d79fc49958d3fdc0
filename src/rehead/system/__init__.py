"""The machine: its devices, its memory, its processor, the user's cache folder."""
