"""Builds cases from seeds: clusters of seeds that form two similar fragments.

Implements the clustering, validation, removal of overlaps and length filter of Sanchez-Perez, Gelbukh and Sidorov (CLEF
2014, "Extension" and "Filtering"). It uses units, their cosines and their extents, not the texts themselves.
"""

from __future__ import annotations

from typing import NamedTuple

from fedmem.detect.pan.seeding import Pair, Seed

NEARLY_EQUAL = (
    0.99  # of two overlapping cases that are both better than this, the longer one, then the better one stays
)


class Case(NamedTuple):
    """Units first_s..last_s of the suspicious text that are similar to units first_r..last_r of the source."""

    first_s: int
    last_s: int
    first_r: int
    last_r: int


def find_cases(pair: Pair, seeds: list[Seed], suspicious_gap: int, source_gap: int) -> list[Case]:
    """The cases of these seeds, in the order of the suspicious text, at least min_case_chars long on both sides.

    pair: the two texts with their settings. seeds: unit pairs (suspicious, source).
    suspicious_gap, source_gap: units without a seed that a cluster may bridge on each side, ≥ 0.
    """
    groups = cluster(pair, seeds, suspicious_gap, source_gap)
    cases = without_overlaps(pair, validated(pair, groups, suspicious_gap, source_gap))
    return [case for case in cases if _long_enough(pair, case)]


def cluster(pair: Pair, seeds: list[Seed], suspicious_gap: int, source_gap: int) -> list[list[Seed]]:
    """Split seeds into groups without a larger gap on either side, alternating the sides until nothing changes.

    pair: gives the smallest sizes of a group (suspicious_min_seeds, source_min_seeds). seeds: unit pairs.
    suspicious_gap, source_gap: units without a seed that a group may bridge on each side, ≥ 0.
    """
    gaps = (suspicious_gap, source_gap)
    sizes = (pair.settings.suspicious_min_seeds, pair.settings.source_min_seeds)
    groups, waiting = [], [(group, 1) for group in reversed(_split(seeds, 0, gaps[0], sizes[0]))]
    while waiting:  # a stack instead of recursion, whose depth would depend on the texts
        group, side = waiting.pop()
        parts = _split(group, side, gaps[side], sizes[side])
        if len(parts) > 1:
            waiting.extend((part, 1 - side) for part in reversed(parts))  # reversed: the first part is taken first
        else:
            groups.extend(parts)
    return groups


def validated(pair: Pair, groups: list[list[Seed]], suspicious_gap: int, source_gap: int) -> list[Case]:
    """The cases with similar fragments; a group that fails is clustered again with both gaps smaller by one.

    pair: the two texts; its case_cosine is the threshold, its *_gap_least the smallest gaps. groups: groups of seeds.
    suspicious_gap, source_gap: the gaps with which the groups were made.
    """
    least = pair.settings
    # both gaps shrink together, so the first to reach its least value stops the search on both sides
    shrinkable = source_gap > least.source_gap_least and suspicious_gap > least.suspicious_gap_least
    cases = []
    for group in groups:
        case = _bounds(group)
        if pair.fragment_cosine(*case) > pair.settings.case_cosine:
            cases.append(case)
        elif shrinkable:
            smaller = (suspicious_gap - 1, source_gap - 1)
            cases += validated(pair, cluster(pair, group, *smaller), *smaller)
    return cases


def without_overlaps(pair: Pair, cases: list[Case]) -> list[Case]:
    """The sorted cases after the removal of overlaps: none begins inside another on the suspicious side.

    Quirk Q9: the quality of a kept case is not recorded while it is compared, and a case that lost never returns, even
    if the case that beat it loses later.
    """
    cases = sorted(cases, key=lambda case: case.first_s)
    kept: list[Case] = []
    pending, i = False, 0
    while i < len(cases):
        current = kept[-1] if pending else cases[i]  # the winner of one overlap is compared with the cases after it
        rivals = _rivals(current, cases, i)
        if not rivals:
            if not pending:
                kept.append(current)
            pending = False
            i += 1
            continue
        winner = _winner(pair, current, rivals)
        if pending:
            kept[-1] = winner
        else:
            kept.append(winner)
        pending = True
        i += len(rivals)
    return kept


def _split(seeds: list[Seed], side: int, gap: int, min_seeds: int) -> list[list[Seed]]:
    groups: list[list[Seed]] = []
    # quirk Q12: the reference sorts its seeds in place; only the ends of a group matter, so a sorted copy is equivalent
    for seed in sorted(seeds, key=lambda seed: seed[side]):
        if groups and seed[side] - groups[-1][-1][side] - 1 <= gap:
            groups[-1].append(seed)
        else:
            groups.append([seed])
    return [group for group in groups if len(group) >= min_seeds]


def _bounds(group: list[Seed]) -> Case:
    suspicious, source = zip(*group, strict=True)
    return Case(min(suspicious), max(suspicious), min(source), max(source))


def _rivals(current: Case, cases: list[Case], i: int) -> list[Case]:
    """The cases after the i-th that begin before `current` ends."""
    return [case for case in cases[i + 1 :] if case.first_s <= current.last_s]


def _winner(pair: Pair, current: Case, rivals: list[Case]) -> Case:
    winner, top = current, 0.0  # quirk Q9: 0 instead of the quality of `current`
    for rival in rivals:
        ours, theirs = _quality(pair, current, rival), _quality(pair, rival, current)
        if ours > NEARLY_EQUAL and theirs > NEARLY_EQUAL:
            longer = rival.last_s - rival.first_s > current.last_s - current.first_s
            best, quality = (rival, theirs) if longer else (current, ours)
            if quality > top:
                winner, top = best, quality
        elif theirs > ours and theirs > top:
            winner, top = rival, theirs
    return winner


def _quality(pair: Pair, case: Case, other: Case) -> float:
    """How well the case's suspicious units are found in its source units; the units shared with `other` dominate.

    It is o + (1 − o) · r, where o and r are the mean best cosines of the shared units and of the rest.
    """
    shared, shared_sum, rest, rest_sum = 0, 0.0, 0, 0.0
    for s in range(case.first_s, case.last_s + 1):
        best = max([0.0, *(pair.cosine(s, r) for r in range(case.first_r, case.last_r + 1))])
        if other.first_s <= s <= other.last_s:
            shared, shared_sum = shared + 1, shared_sum + best
        else:
            rest, rest_sum = rest + 1, rest_sum + best
    overlap = shared_sum / shared  # never 0 units: this is called for overlapping cases only
    return overlap + (1 - overlap) * rest_sum / rest if rest else overlap


def _long_enough(pair: Pair, case: Case) -> bool:
    suspicious = pair.suspicious.extent(case.first_s, case.last_s)
    source = pair.source.extent(case.first_r, case.last_r)
    return all(end - start >= pair.settings.min_case_chars for start, end in (suspicious, source))
