"""Notebook 1: rows to clients, splits, copies, and how different the clients are."""
