"""Methods with error feedback: DiceSGD and its joint noise."""
