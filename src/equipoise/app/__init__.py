"""What the command line does: settings, models, recipes, and runs made of them."""
