"""Every touch point with an inference engine."""
