"""Notebook 5: memorization ratios with controls and intervals, what they leave out, and what came back."""

from fedmem.analyze.ratios import memorization

__all__ = ["memorization"]
