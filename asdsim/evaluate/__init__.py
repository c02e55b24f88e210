"""Numbers from walks, each with its interval."""
