"""Measurements of speed, memory and accuracy, and the accuracy of every method."""
