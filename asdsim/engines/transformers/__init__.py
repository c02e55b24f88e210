"""Hugging Face Transformers as an engine."""
