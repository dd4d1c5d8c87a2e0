"""What is checked and measured before the first step, and the training that is prepared from it."""
