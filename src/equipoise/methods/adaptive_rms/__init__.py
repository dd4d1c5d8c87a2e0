"""RMS-adaptive clipping and its radius."""
