"""Figures from results: plain tables and arrays in, matplotlib figures out."""
