"""The text-alignment detector, and the stage that runs it over all candidate pairs.

`align` judges one pair of texts, `type_candidates` types what may be a paraphrase; `find_candidates` and `find_matches`
do both for a whole run. Importing this loads no model and no torch.
"""

from fedmem.detect.alignment import Alignment, align
from fedmem.detect.candidates import find_candidates, retrieval_record
from fedmem.detect.paraphrase import type_candidates
from fedmem.detect.settings import AlignmentSettings
from fedmem.detect.splitting import DetectorError
from fedmem.detect.stage import find_matches

__all__ = [
    "Alignment",
    "AlignmentSettings",
    "DetectorError",
    "align",
    "find_candidates",
    "find_matches",
    "retrieval_record",
    "type_candidates",
]
