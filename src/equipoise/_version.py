"""The version, below everything: whatever needs it imports it from here."""

__version__ = "0.2.0"

#: A run of another number is not resumed: its steps would get other bits from the same records and noise.
#: Raise it with every change of what a step computes. Files before number 2 hold none.
ENGINE = 7
