"""Readers of file formats, and the sets that they make."""
