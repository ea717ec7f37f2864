"""The text-alignment detector, and the stage that runs it over all candidate pairs."""

from fedmem.detect.alignment import Alignment, align
from fedmem.detect.settings import AlignmentSettings

__all__ = ["Alignment", "AlignmentSettings", "align"]
