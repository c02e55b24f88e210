"""Decoding real models step by step, and recording what each step saw. Everything that needs torch lives here."""
