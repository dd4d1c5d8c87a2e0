"""Gradients in units of their own size per entry: before they are clipped, or after they are released."""
