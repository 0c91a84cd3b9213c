"""Byte-pair merges learned from word counts (arXiv:1508.07909, Algorithm 1), the same in every process.

The most frequent pair is merged first; of equally frequent pairs, the first in text order. So the merges depend on the
captions alone. The `tokenizers` library breaks ties by token ids, which its trainer gives out in hash order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import pairwise

Pair = tuple[str, str]


def learn_merges(word_counts: Mapping[str, int], word_end: str) -> Iterator[Pair]:
    """Pairs of tokens in the order in which they are merged, until every word is one token.

    A word is split into its characters, the last of which carries the suffix `word_end`.
    """
    split_words = [[*word[:-1], word[-1] + word_end] for word in word_counts if word]
    weights = [count for word, count in word_counts.items() if word]
    pair_counts: dict[Pair, int] = defaultdict(int)
    words_with: dict[Pair, set[int]] = defaultdict(set)  # may name words that have lost the pair since
    for i, word in enumerate(split_words):
        for pair in pairwise(word):
            pair_counts[pair] += weights[i]
            words_with[pair].add(i)
    heap = [(-count, pair) for pair, count in pair_counts.items()]
    heapify(heap)
    while heap:
        count, best = heappop(heap)
        if pair_counts[best] != -count:  # an outdated entry: the count changed, and was pushed again
            continue
        yield best
        changed: set[Pair] = set()
        for i in words_with.pop(best):
            old, new = split_words[i], merge(split_words[i], best)
            if len(new) == len(old):
                continue
            for pair in pairwise(old):
                pair_counts[pair] -= weights[i]
                changed.add(pair)
            for pair in pairwise(new):
                pair_counts[pair] += weights[i]
                words_with[pair].add(i)
                changed.add(pair)
            split_words[i] = new
        for pair in changed:
            if pair_counts[pair]:
                heappush(heap, (-pair_counts[pair], pair))


def merge(tokens: list[str], pair: Pair) -> list[str]:
    """Join each occurrence of the pair, from left to right."""
    merged, i = [], 0
    while i < len(tokens):
        if i + 1 < len(tokens) and (tokens[i], tokens[i + 1]) == pair:
            merged.append(tokens[i] + tokens[i + 1])
            i += 2
        else:
            merged.append(tokens[i])
            i += 1
    return merged
