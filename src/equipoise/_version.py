"""The version, below everything: whatever needs it imports it from here."""

__version__ = "0.1.0"
