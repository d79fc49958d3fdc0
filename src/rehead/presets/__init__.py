"""Studies that come with rehead."""
