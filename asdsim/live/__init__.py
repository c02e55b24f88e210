"""Where the walk meets the model."""
