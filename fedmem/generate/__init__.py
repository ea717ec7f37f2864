"""Notebook 3: prefixes and suffixes, and the continuations that the model writes."""
