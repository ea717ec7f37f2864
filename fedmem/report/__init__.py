"""Notebook 6: what the runs of a study say together, beside the published figures, and its shareable copy."""
