"""Captions that contain a text, found in milliseconds among millions: an inverted index of their words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them
MANY_WORDS = 256  # from here on one pass over all places is faster than one for each word


def needles(text: str) -> list[str]:
    """What a user looks for, in small letters: words, and "several words" in quotes as one."""
    found = [quoted or word for quoted, word in re.findall(r'"([^"]*)"|([^\s"]+)', text)]
    return [lower for one in found if (lower := pc.utf8_lower(one).as_py()).strip()]


def contains_all(text: str, wanted: Sequence[str]) -> bool:
    """Whether a text contains each of some ``needles``."""
    lower = pc.utf8_lower(text).as_py()
    return all(one in lower for one in wanted)


class WordIndex:
    """Which texts contain a substring, whatever the case.

    A substring without white space lies within one word. So the distinct words are searched, few beside the texts, and
    each of them names the texts that have it.

    Args:
      texts: (N,) strings; 5 s of one core for a million captions of ten words, and 8 bytes a word.
    """

    def __init__(self, texts: pa.ChunkedArray) -> None:
        self._texts = texts
        words = pc.utf8_split_whitespace(pc.utf8_lower(texts))
        counts = pc.list_value_length(words).to_numpy()
        coded = pc.dictionary_encode(pc.list_flatten(words)).unify_dictionaries()
        self._words = coded.chunk(0).dictionary if coded.num_chunks else pa.array([], pa.string())
        codes = np.concatenate([np.empty(0, np.int32), *(chunk.indices.to_numpy() for chunk in coded.chunks)])
        self._texts_of = np.repeat(np.arange(len(texts), dtype=np.int32), counts)[np.argsort(codes, kind="stable")]
        self._counts = np.bincount(codes, minlength=len(self._words))
        self._ends = np.cumsum(self._counts)

    def find(self, wanted: Sequence[str]) -> np.ndarray:
        """(N,) whether each text contains all of some ``needles``."""
        found = np.ones(len(self._texts), bool)
        for needle in wanted:
            for word in needle.split():
                found &= self._containing(word)
        for phrase in (needle for needle in wanted if len(needle.split()) > 1 or needle != needle.strip()):
            places = np.flatnonzero(found)
            found[places] = contains(pc.utf8_lower(self._texts.take(places)), phrase)
        return found

    def _containing(self, word: str) -> np.ndarray:
        mask = np.zeros(len(self._texts), bool)
        of_words = contains(self._words, word)
        hits = np.flatnonzero(of_words)
        if len(hits) > MANY_WORDS:
            mask[self._texts_of[np.repeat(of_words, self._counts)]] = True
        else:
            for hit in hits.tolist():
                mask[self._texts_of[self._ends[hit] - self._counts[hit] : self._ends[hit]]] = True
        return mask


def contains(texts: pa.Array | pa.ChunkedArray, part: str) -> np.ndarray:
    """(N,) whether each text contains a part; a null does not."""
    return pc.fill_null(pc.match_substring(texts, part), False).to_numpy(zero_copy_only=False)


class LetterPairs:
    """The pairs of neighbouring bytes in many texts, which tell at once that a part is in none of them.

    Names of files have few of them: the words of captions are mostly not in there.

    Args:
      texts: (N,) strings in small letters.
    """

    def __init__(self, texts: pa.ChunkedArray) -> None:
        self._is_known = np.zeros((256, 256), bool)
        for chunk in texts.chunks:
            content = chunk.buffers()[2]  # of all texts of the chunk, one after the other
            letters = np.frombuffer(content, np.uint8) if content else np.empty(0, np.uint8)
            self._is_known[letters[:-1], letters[1:]] = True

    def may_hold(self, part: str) -> bool:
        """Whether all pairs of a part are there."""
        letters = np.frombuffer(part.encode(), np.uint8)
        return bool(self._is_known[letters[:-1], letters[1:]].all())
