"""Gradients filtered over the steps: a Kalman filter that looks ahead, and linear filters of releases."""
