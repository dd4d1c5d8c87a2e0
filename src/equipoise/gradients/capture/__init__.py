"""What happens while the loss runs once: operations that use parameters, and where their records lie."""
