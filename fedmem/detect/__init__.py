"""Notebook 4: candidates by retrieval, the text-alignment detector, and the typing of paraphrases.

`align` judges one pair of texts, `type_candidates` types what may be a paraphrase; `find_candidates` and `find_matches`
do both for a whole run. Importing this loads no model and no torch.
"""

from fedmem.detect.candidates import find_candidates, retrieval_record
from fedmem.detect.detector import PanDetector
from fedmem.detect.matches import find_matches
from fedmem.detect.pan.alignment import Alignment, align
from fedmem.detect.pan.settings import AlignmentSettings
from fedmem.detect.pan.splitting import DetectorError
from fedmem.detect.paraphrase import type_candidates

__all__ = [
    "Alignment",
    "AlignmentSettings",
    "DetectorError",
    "PanDetector",
    "align",
    "find_candidates",
    "find_matches",
    "retrieval_record",
    "type_candidates",
]
