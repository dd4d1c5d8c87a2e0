"""What happens while the loss runs once: the operations that use parameters, and how their record axes lie."""
