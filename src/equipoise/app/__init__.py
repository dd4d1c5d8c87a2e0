"""What the command line does: settings, their defaults, models, and runs made of them."""
