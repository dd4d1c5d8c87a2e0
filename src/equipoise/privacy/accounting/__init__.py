"""Epsilon of events, calibration of noise to a budget, and searches that are charged."""
