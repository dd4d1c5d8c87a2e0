"""Feature extractors that learn nothing from private records."""
