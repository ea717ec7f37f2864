"""All parameters of the text-alignment detector, with their ranges and sources.

The names in brackets are those of the original detector's settings (Sanchez-Perez, Gelbukh and Sidorov, CLEF 2014 and
2015).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

_FRACTIONS = ("seed_cosine", "seed_dice", "case_cosine")
_SWITCHES = ("drop_short_units", "tf_idf", "stem_stop_words", "find_verbatim", "find_summary")


@dataclass(frozen=True, slots=True)
class AlignmentSettings:
    """Settings of one alignment; the defaults are those of the federated-learning study (Udsa et al., ACL 2026).

    Fractions are in 0..1, all other numbers are whole and at least 0. `suspicious` is the training suffix, `source` the
    continuation. Raises ValueError, which names the field, for any other value.
    """

    seed_cosine: float = 0.3  # a seed's tf-idf cosine must be above this (th1)
    seed_dice: float = 0.33  # and its Dice coefficient above this (th2)
    case_cosine: float = 0.34  # a case's fragment cosine must be above this (th3)
    suspicious_gap: int = 4  # units without a seed that a cluster may bridge (susp_gap)
    source_gap: int = 4  # (src_gap)
    suspicious_gap_least: int = 0  # smallest gap to which a failed case's gap is reduced (susp_gap_least)
    source_gap_least: int = 0  # (src_gap_least)
    suspicious_min_seeds: int = 1  # smallest cluster, in seeds (susp_size)
    source_min_seeds: int = 1  # (src_size)
    min_unit_words: int = 3  # units with fewer counted words are merged forward (min_sentlen)
    drop_short_units: bool = False  # delete such units instead (rssent)
    tf_idf: bool = True  # weight stems by tf-idf instead of by their counts (tf_idf_p)
    stem_stop_words: bool = True  # False leaves stop words unstemmed (rem_sw, quirk Q4)
    find_verbatim: bool = True  # the verbatim detector (verbatim)
    find_summary: bool = True  # the summary detector (summary)
    summary_gap: int = 24  # gap on both sides in the summary pass (src_gap_summary, quirk Q5)
    min_case_chars: int = 50  # a case's extent on each side must reach this (min_plaglen)
    min_verbatim_chars: int = 50  # a common run must be longer than this (verbatim_minlen)

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _FRACTIONS:
                allowed, fits = "a number in 0..1", _is_number(value) and 0 <= value <= 1
            elif field.name in _SWITCHES:
                allowed, fits = "True or False", isinstance(value, bool)
            else:
                allowed, fits = "a whole number, at least 0", type(value) is int and value >= 0
            if not fits:
                raise ValueError(f"AlignmentSettings.{field.name} = {value!r}: expected {allowed}")

    @classmethod
    def original(cls, **changes) -> AlignmentSettings:
        """The settings of the detector's authors (PAN 2015): cases of 150 characters or more, runs of more than 256."""
        return cls(**{"min_case_chars": 150, "min_verbatim_chars": 256, **changes})


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
