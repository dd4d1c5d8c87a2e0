"""Every method on whole data sets at one budget, tuned alike on training records."""
