"""DC-DPSGD: two clipping thresholds, chosen by a released score."""
