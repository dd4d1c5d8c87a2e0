"""The key of a run, and the streams of normal numbers that follow from it."""
