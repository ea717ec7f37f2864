"""Texts in one schema, wherever they come from: files, the hub, the synthetic corpus."""
