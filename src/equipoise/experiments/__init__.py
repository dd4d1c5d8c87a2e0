"""Models, recipes and runs that the command line offers."""
