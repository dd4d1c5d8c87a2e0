"""Sums whose sensitivity is known: how records are clipped, counted and selected."""
