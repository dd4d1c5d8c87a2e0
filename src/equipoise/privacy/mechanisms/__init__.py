"""The noise of one release, and what it costs: a file per mechanism."""
