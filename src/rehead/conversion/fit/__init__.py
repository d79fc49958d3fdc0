"""What an approximation is fitted to and by: moments of a text, pairs, factors, alignments."""
