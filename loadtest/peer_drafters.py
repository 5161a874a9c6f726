"""Other projects' drafters behind our protocol, for replays. Each needs its own package.

    python -m drafters.replay --drafter loadtest.peer_drafters:ArcticSuffix ...

ArcticSuffix: SuffixDecodingCache of `arctic-inference` (only its csrc/suffix_decoding part has to
be built). Aded: the datastore of `draftretriever`.
TransformersPromptLookup: PromptLookupCandidateGenerator of `transformers` (and torch).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafters.corpus import Corpus
from drafters.tree import DraftTree

PADDING = -2  # draftretriever's, behind paths shorter than the longest


class ArcticSuffix:
    """Suffix decoding as shipped: local tree of the request, global tree of cached responses.

    outputs (or corpus): responses put into the global tree. use_tree_spec, max_spec_factor: as in
    SuffixDecodingCache.speculate; the defaults are that method's own. remembers: keep the response
    of every request, as the cache does by itself; else it is evicted at the request's end.
    """

    name = "arctic"
    sources = ("arctic",)

    def __init__(
        self,
        *,
        outputs: Iterable[Sequence[int]] = (),
        corpus: Corpus | None = None,
        use_tree_spec: bool = False,
        max_spec_factor: float = 1.0,
        remembers: bool = False,
    ) -> None:
        from arctic_inference.suffix_decoding import (  # type: ignore[import-not-found]
            SuffixDecodingCache,
        )

        self.cache: Any = SuffixDecodingCache(max_tree_depth=64, max_cached_requests=-1)
        self.next_id = 0
        self.remembers = remembers
        self.options = {"use_tree_spec": use_tree_spec, "max_spec_factor": max_spec_factor}
        if corpus is not None:
            outputs = [corpus.output(i).tolist() for i in range(corpus.num_documents)]
        for output in outputs:
            request = self.take_id()
            self.cache.start_request(request, [])
            self.cache.add_active_response(request, list(output))
            self.cache.stop_request(request)

    def take_id(self) -> int:
        """A fresh request id."""
        self.next_id += 1
        return self.next_id

    def open(
        self,
        prompt_ids: Sequence[int],
        *,
        context_span: tuple[int, int] | None = None,
        prediction_ids: Sequence[int] = (),
    ) -> ArcticSession:
        """A session over the whole prompt."""
        return ArcticSession(self, prompt_ids)


class PeerSession:
    """What these sessions share: the request's ids, and that nothing can be taken back."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._ids = list(prompt_ids)
        self._num_prompt = len(self._ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._ids.extend(token_ids)

    def feedback(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Not used there."""

    def settle(self) -> None:
        """Nothing is deferred there."""

    def checkpoint(self) -> int:
        return len(self._ids) - self._num_prompt

    def rollback(self, mark: int) -> None:
        raise NotImplementedError(f"{type(self).__name__} cannot forget a part of a request")

    def close(self) -> None:
        """Nothing is held."""


class ArcticSession(PeerSession):
    """One request."""

    def __init__(self, drafter: ArcticSuffix, prompt_ids: Sequence[int]) -> None:
        super().__init__(prompt_ids)
        self._drafter = drafter
        self._request = drafter.take_id()
        drafter.cache.start_request(self._request, self._ids)

    def propose(self, budget: int, max_depth: int) -> DraftTree:
        draft = self._drafter.cache.speculate(
            self._request,
            self._ids[-64:],
            max_spec_tokens=min(budget, max_depth),
            **self._drafter.options,
        )
        parents = np.asarray(draft.parents, np.int32)
        survival = np.asarray(draft.probs, np.float32)
        sources = np.zeros(parents.shape[0], np.uint8)
        return DraftTree(np.asarray(draft.token_ids, np.int32), parents, survival, sources)

    def extend(self, token_ids: Sequence[int]) -> None:
        super().extend(token_ids)
        self._drafter.cache.add_active_response(self._request, list(token_ids))

    def close(self) -> None:
        self._drafter.cache.stop_request(self._request)
        if not self._drafter.remembers:
            self._drafter.cache.evict_cached_response(self._request)


class Aded:
    """`draftretriever` as PyPI has it (0.1.0, 0.1.1): not REST's suffix array but ADED's tri-grams
    with Monte Carlo tree search, under REST's interface.

    outputs (or corpus): what its table is made of. vocab_size: 16 bits an id, so at most 65,536.
    It learns from every query, so that each session reads the table anew: otherwise a second
    replay of an example would find its output there.
    """

    name = "aded"
    sources = ("aded",)

    def __init__(
        self,
        *,
        outputs: Iterable[Sequence[int]] = (),
        corpus: Corpus | None = None,
        vocab_size: int = 1 << 16,
    ) -> None:
        import draftretriever  # type: ignore[import-not-found]

        if corpus is not None:
            outputs = [corpus.output(i).tolist() for i in range(corpus.num_documents)]
        self._folder = tempfile.TemporaryDirectory(prefix="aded-")
        self._file = str(Path(self._folder.name) / "datastore.idx")
        self._reader: Any = draftretriever.Reader
        writer = draftretriever.Writer(file_path=self._file, vocab_size=vocab_size)
        for output in outputs:
            writer.add_entry(list(output))
        writer.finalize()

    def open(
        self,
        prompt_ids: Sequence[int],
        *,
        context_span: tuple[int, int] | None = None,
        prediction_ids: Sequence[int] = (),
    ) -> AdedSession:
        """A session over the whole prompt."""
        return AdedSession(self._reader(self._file), prompt_ids)


class AdedSession(PeerSession):
    """One request. Each query is what came since the last one, the whole prompt at first."""

    def __init__(self, reader: Any, prompt_ids: Sequence[int]) -> None:
        super().__init__(prompt_ids)
        self._reader = reader
        self._num_asked = 0

    def propose(self, budget: int, max_depth: int) -> DraftTree:
        if budget <= 0 or len(self._ids) < 2:
            return DraftTree.empty()  # the package aborts the process on a single token
        query = self._ids[max(0, self._num_asked - 2) :]
        self._num_asked = len(self._ids)
        paths = self._reader.search(query, choices=budget)[0]
        return tree_of_paths(paths, budget, max_depth)


def tree_of_paths(paths: Iterable[Sequence[int]], budget: int, max_depth: int) -> DraftTree:
    """The tree of paths that end in PADDING, at most `budget` nodes of it, no deeper."""
    nodes: dict[tuple[int, ...], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    for path in paths:
        for depth, token in enumerate(path, 1):
            prefix = tuple(path[:depth])
            if token == PADDING or depth > max_depth:
                break
            if prefix in nodes:
                continue
            if len(tokens) >= budget:
                break
            nodes[prefix] = len(tokens)
            tokens.append(token)
            parents.append(nodes.get(prefix[:-1], -1))
    num = len(tokens)
    return DraftTree(
        np.asarray(tokens, np.int32),
        np.asarray(parents, np.int32),
        np.ones(num, np.float32),  # it does not say
        np.zeros(num, np.uint8),
    )


class TransformersPromptLookup:
    """transformers' own candidate generator, its defaults, for checking ours against it."""

    name = "transformers_prompt"
    sources = ("prompt",)

    def __init__(self, *, num_output_tokens: int = 10, max_matching_ngram_size: int = 2) -> None:
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        self.num_output_tokens = num_output_tokens
        self.generator: Any = PromptLookupCandidateGenerator(
            num_output_tokens=num_output_tokens,
            max_matching_ngram_size=max_matching_ngram_size,
            max_length=1 << 30,
        )

    def candidates(self, ids: Sequence[int]) -> list[int]:
        """The draft after `ids`."""
        import torch

        found, _ = self.generator.get_candidates(torch.tensor([list(ids)]))
        return [int(token) for token in found[0, len(ids) :]]
