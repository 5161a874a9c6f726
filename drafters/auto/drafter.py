"""`auto`: one tree from all sources, each node ranked by its calibrated chance.

Sources: the sequence's own text, the task's corpus at any match length, the outputs of the
corpus' examples nearest to this prompt, the client's prediction, what the model's own logits held
likely (drafters.auto.likely), and a head on its last state (drafters.auto.prior). Their next tokens
are gathered (drafters.auto.gather), blended (drafters.auto.blend) and grown into a tree
(drafters.auto.tree_builder). How far each kind of context is trusted is learned per task from every
emitted token (drafters.auto.trust).

The first tokens of an answer can be drafted: the corpus indexes output starts, and a prediction's
first token follows START as those of other outputs do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from drafters.arrays import Float32, Float64, Int32, Int64, UInt8
from drafters.auto.automaton import Automaton, automaton_step
from drafters.auto.blend import NO_PLAIN, PlainFields, advance
from drafters.auto.cells import PREDICTION, RETRIEVED, SOURCES
from drafters.auto.copying import NO_COPY, NOWHERE, Pieces, no_entries
from drafters.auto.corpus_fit import Rivals
from drafters.auto.likely import NO_ROWS, NUM_LIKELY, LikelyTable, RowsFields
from drafters.auto.prior import (
    MOST_FOLLOWED,
    NO_HIDDEN,
    NO_PRIOR,
    WIDTH,
    Prior,
    PriorScratch,
)  # fmt: skip
from drafters.auto.retrieval import NUM_RETRIEVED, Seen, retrieve
from drafters.auto.template import forms_of, in_a_row
from drafters.auto.text_index import TextIndex
from drafters.auto.tree_builder import Workspace
from drafters.auto.trust import UPDATE_EVERY, Trust
from drafters.auto.views import (
    ANY_SURVIVAL,
    NO_CORPUS,
    NO_ECHO,
    NO_HINTS,
    NO_LIKELY,
    NO_MARKS,
    NO_TEXT,
    Context,
    CorpusView,
    Limits,
)
from drafters.catalog import AutoOptions
from drafters.corpus_file import START
from drafters.options import check_options
from drafters.session import TextSession
from drafters.tree import DraftTree

if TYPE_CHECKING:
    from drafters.corpus import Corpus

RESYNC_TOKENS = 12  # tokens of a prediction that are searched for where the output goes on
NEAR_TOKENS = 48  # places this near to where the output stands count fully, others less
FAR_WEIGHT = 0.1
TEMPLATE_WEIGHT = 0.15  # weight of a prompt position whose text stands in every prompt
COMPARE_ALL = 1500  # so many first tokens are all compared with their chances without the corpus
COMPARE_EVERY = 4  # ... and then one in so many
COMPARE_ALL_STEPS = 400  # steps whose trees are all grown with the corpus and without
COMPARE_STEP_EVERY = 8  # ... and then one in so many
MOST_AT_ONCE = 16  # tokens that are learned from before what they say is looked at


class AutoDrafter:
    """Makes AutoSessions.

    corpus: the task's, or None. learned: a layer over it (drafters.corpus.build_corpus), or None.
    trust: weights and their evidence, shared by the sessions; by default what the corpus' held-out
        examples said.
    min_survival: nodes whose path is accepted more rarely than this are not proposed.
    eos_token_ids: never proposed, as the bonus token brings an EOS; by default the corpus' own.
    learn: adapt the trust to the tokens that are emitted.
    num_likely: likeliest ids of a verified row that are kept and drafted from; 0 is off.
    pieces: of the vocabulary; None: nothing is copied by text.
    seen: what requests of this scope left behind, shared by its sessions; None: each session has
        its own table of likely ids, which ends with it.
    model_prior: the model's head, or None: its states are not read. prior_depth: ids behind such a
        state that are followed; 0 is off.
    """

    name = "auto"
    sources = SOURCES

    def __init__(
        self,
        *,
        corpus: Corpus | None = None,
        learned: Corpus | None = None,
        trust: Trust | None = None,
        min_survival: float = 0.003,
        eos_token_ids: Sequence[int] | None = None,
        learn: bool = True,
        num_likely: int = NUM_LIKELY,
        seen: Seen | None = None,
        pieces: Pieces | None = None,
        model_prior: Prior | None = None,
        prior_depth: int = MOST_FOLLOWED,
    ) -> None:
        if not 0.0 <= min_survival < 1.0:
            raise ValueError(f"min_survival must be in [0, 1), not {min_survival}")
        check_options(AutoOptions, {"num_likely": num_likely, "prior_depth": prior_depth})
        self.workspace = Workspace() if seen is None else seen.workspace
        self.prior: PriorScratch | None = None
        if model_prior is not None and prior_depth:
            self.prior = self.workspace.of_prior(model_prior)
            self.of_prior = self.prior.new_owner(), prior_depth
        self.corpus = corpus
        self.num_likely = num_likely
        self.seen = seen
        self.pieces = pieces
        # Those whose examples are retrieved: what was learned stands beside the corpus.
        self.layers = tuple(
            layer
            for layer in (corpus, learned)
            if layer is not None and layer.nearest.norms.shape[0]
        )
        newest = learned if learned is not None else corpus
        self.automaton = newest.automaton if newest is not None else Automaton.empty()
        if trust is None:
            trust = Trust()
            if corpus is not None and corpus.evidence.shape[1]:
                trust.start_from(corpus.evidence, corpus.outcomes)
        self.trust = trust
        self.min_survival = min_survival
        self.num_retrieved = NUM_RETRIEVED
        self.templates = True
        if eos_token_ids is None:
            eos_token_ids = () if corpus is None else corpus.end_ids()
        self.eos_token_ids = np.asarray(tuple(eos_token_ids), np.int32)
        self.end_ids = frozenset(self.eos_token_ids.tolist())
        self.learn = learn
        self.has_corpus = self.automaton.num_states > 0 or bool(self.layers)
        self.num_seen = 0
        self.num_steps = 0
        self.start_state = (0, 0)
        if self.automaton.num_states:
            self.start_state = automaton_step(
                self.automaton.states, self.automaton.edges, 0, 0, START
            )

    def compare(self, token_ids: Sequence[int], first: int, learns: UInt8) -> list[int]:
        """Of tokens from index `first` on: who learns from which, and from which both do, so that
        drafting with the corpus and without are compared. learns: as in `advance`, written to.

        Both ways of drafting learn from every token at first; later the one that is not in use does
        from one in COMPARE_EVERY, so that it is there when the task changes. Ends are known from a
        corpus and never drafted: no way is better at them.
        """
        fit, compared = self.trust.fit, []
        num_compared = fit.num_tokens
        for i in range(first, len(token_ids)):
            self.num_seen += 1
            both = num_compared < COMPARE_ALL or self.num_seen % COMPARE_EVERY == 0
            learns[0, i], learns[1, i] = both or fit.helps, both or not fit.helps
            if both and token_ids[i] not in self.end_ids:
                compared.append(i)
                num_compared += 1
        return compared

    @property
    def reads_states(self) -> bool:
        """Whether its sessions draft from the model's states."""
        return self.prior is not None

    @property
    def knows_starts(self) -> bool:
        """Whether it knows other outputs."""
        return self.has_corpus or (self.seen is not None and bool(self.seen.recent))

    def open(
        self, prompt_ids: Sequence[int], *, prediction_ids: Sequence[int] = (), **_: Any
    ) -> AutoSession:
        """A session over the whole prompt. prediction_ids: the output the client expects, tokenized
        after the prompt."""
        return AutoSession(self, prompt_ids, prediction_ids)


class AutoSession(TextSession):
    """One Sequence's own text, retrieved outputs and prediction, and its place in the corpus."""

    def __init__(
        self, drafter: AutoDrafter, prompt_ids: Sequence[int], prediction_ids: Sequence[int]
    ) -> None:
        super().__init__(prompt_ids)
        self._drafter = drafter
        self._prediction = tuple(prediction_ids)
        self._retrieved: TextIndex | None = None
        self._marks: Float32 = NO_MARKS
        self._forms = NO_TEXT
        self._prompt_marks: Float32 = NO_MARKS
        self._settled = False
        self._num_learned = 0
        self.least: Float64 = ANY_SURVIVAL
        self.num_likely = drafter.num_likely
        self._likely: LikelyTable | None = None
        if drafter.num_likely:
            self._likely = LikelyTable() if drafter.seen is None else drafter.seen.likely
        # Rows of the last step, to be added once its tokens were learned from: what the model held
        # likely at a token is no evidence for how well it was foreseen.
        self._noted: RowsFields = NO_ROWS
        self._echo = NO_ECHO
        # The model's state that the prior begins at, the place of the token drawn from it, and the
        # prior's own behind that; the model's of the last step, until its tokens are appended.
        self.wants_state = drafter.prior is not None
        self._state = NO_HIDDEN, 0, NO_HIDDEN
        self._noted_state: Float32 | None = None
        # A compared step's trees, with the corpus and without, until one is verified; then those
        # that still hold the text.
        self._grown: tuple[DraftTree, ...] = ()
        self._rivals: list[Rivals] = []
        # For each emitted token (and before any): the place in the retrieved index of the last
        # token that followed the prediction, and how many have not followed it since.
        self._anchors: list[tuple[int, int]] = []
        # int64 [room, 7]: after each number of emitted tokens the state of the corpus' automaton,
        # the length of its match, and the fields of the Cursor.
        self._places: Int64 = np.empty((64, 7), np.int64)
        self._copy, cursor = NO_COPY, NOWHERE
        if drafter.pieces is not None:
            entered = no_entries() if drafter.seen is None else drafter.seen.entered
            self._copy, cursor = drafter.pieces.index(
                self._index.text[0, : self.num_prompt], entered
            )
        self._places[0] = (*drafter.start_state, *cursor)

    def settle_once(self) -> None:
        """Retrieve the nearest examples, if that has not been done."""
        self._check_open()
        if not self._settled:
            self._retrieve(self._drafter)

    def settle(self) -> None:
        """settle_once(), and fold what was learned into the trust now and then."""
        if self._closed:
            raise self._closed_error()
        drafter = self._drafter
        if not self._settled:
            self._retrieve(drafter)
        if drafter.learn:
            trust = drafter.trust
            if trust.num_news >= UPDATE_EVERY:
                trust.update()
            if drafter.has_corpus and trust.without.num_news >= UPDATE_EVERY:
                trust.without.update()

    def _retrieve(self, drafter: AutoDrafter) -> None:
        self._settled = True
        prompt = self._index.text[0, : self.num_prompt]
        if drafter.layers:
            self._prompt_marks = drafter.layers[0].nearest.template_weights(prompt, TEMPLATE_WEIGHT)
        recent = () if drafter.seen is None else drafter.seen.recent
        found = retrieve(drafter.layers, prompt, drafter.num_retrieved, recent)
        weights, documents = [weight for weight, _ in found], [output for _, output in found]
        sources = [RETRIEVED] * len(found)
        if drafter.templates and len(documents) > 1:
            self._forms = forms_of(documents, weights, drafter.pieces)
        if self._prediction:
            documents.append(np.asarray(self._prediction, np.int32))
            weights.append(1.0)
            sources.append(PREDICTION)
        if not documents:
            return
        ids, self._marks = in_a_row(documents, weights, sources)
        self._retrieved = TextIndex(ids.shape[0])
        self._retrieved.append(ids)
        if self._prediction:
            self._anchors = [(ids.shape[0] - len(self._prediction) - 1, 0)]
            for token in self._index.text[0, self.num_prompt : self._index.size].tolist():
                self._align(token)
            self._weigh_near()

    def _align(self, token: int) -> None:
        """Follow the prediction by one emitted token, or note that it was left."""
        docs = self._retrieved
        assert docs is not None
        anchor, off = self._anchors[-1]
        changed, end = anchor + 1 + off, min(anchor + 1 + off + RESYNC_TOKENS, docs.size)
        found = anchor + 1 + np.flatnonzero(docs.text[0, anchor + 1 : end] == token)
        if found.shape[0]:
            # A changed token first, then an inserted one, then what a deletion skips.
            self._anchors.append((changed if changed in found else int(found[0]), 0))
        else:
            self._anchors.append((anchor, off + 1))

    def _weigh_near(self) -> None:
        """Let the prediction's positions near the anchor count fully."""
        docs = self._retrieved
        assert docs is not None
        anchor, _ = self._anchors[-1]
        first = docs.size - len(self._prediction) - 1
        self._marks[0, first : docs.size] = FAR_WEIGHT
        self._marks[0, max(first, anchor - NEAR_TOKENS) : anchor + NEAR_TOKENS] = 1.0

    def _hints(self) -> npt.NDArray[np.int32]:
        """Places of the prediction that may come next after it was left; none while it holds."""
        anchor, off = self._anchors[-1]
        docs = self._retrieved
        assert docs is not None
        if off == 0 or off > RESYNC_TOKENS:
            return NO_HINTS
        # After as many changes (the likeliest: named thrice), or after insertions.
        places = (*(anchor + 1 + off,) * 3, anchor + 1)
        return np.asarray([place for place in places if place < docs.size], np.int32)

    def _draft(self, budget: int, max_depth: int) -> DraftTree:
        """Survival is the estimated chance, cut at min_survival."""
        drafter = self._drafter
        if not self._settled:
            self._retrieve(drafter)
        limits: Limits = (  # type: ignore[assignment]
            budget, max_depth, drafter.min_survival, self.least
        )  # fmt: skip
        # Where the model does not answer as its corpus does, drafting without that is better.
        follows = not drafter.has_corpus or drafter.trust.fit.helps
        tree = self._grow(drafter, limits, follows)
        self._grown = ()
        if drafter.has_corpus and drafter.learn:
            fit = drafter.trust.fit
            drafter.num_steps += 1
            if fit.num_steps < COMPARE_ALL_STEPS or drafter.num_steps % COMPARE_STEP_EVERY == 0:
                other = self._grow(drafter, limits, not follows)
                self._grown = (tree, other) if follows else (other, tree)
        return tree

    def _grow(self, drafter: AutoDrafter, limits: Limits, follows: bool) -> DraftTree:
        """A tree; follows: from the corpus too."""
        trust = drafter.trust if follows else drafter.trust.without
        return drafter.workspace.grow(limits, self._context(drafter, follows), trust.fields)

    @property
    def wants_feedback(self) -> bool:
        """See DraftSession: only where two trees were grown."""
        return bool(self._grown)

    def feedback(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """From here on the step's two trees are followed, with as many nodes as were verified."""
        self._check_open()
        if self._grown:
            self._rivals.append(Rivals(self._grown, len(tree)))
            self._grown = ()

    def _context(self, drafter: AutoDrafter, follows: bool = True) -> Context:
        """What the next token is guessed from; follows: with the corpus, what it says of prompts,
        and its retrieved outputs. These stay where there is a prediction: they lie in one index."""
        index, docs, likely = self._index, self._retrieved, self._likely
        num_output = index.size - self.num_prompt
        place = self._places[num_output].tolist()
        if follows:
            marks, texts = self._prompt_marks, NO_TEXT if docs is None else docs.view(self._marks)
            corpus: CorpusView = (*drafter.automaton, *place[:2])  # type: ignore[assignment]
            forms = self._forms
        else:
            (marks, texts, corpus), forms = self._plain_fields(), NO_TEXT
        return (
            (index.text, index.table, marks, index.size),
            num_output,
            texts,
            self._hints() if self._anchors else NO_HINTS,
            corpus,
            drafter.eos_token_ids,
            NO_LIKELY if likely is None else (*likely.arrays, *self._echo),
            self._copy,
            tuple(place[2:]),
            NO_PRIOR
            if drafter.prior is None
            else drafter.prior.view(drafter.of_prior, *self._state),
            forms,
        )  # type: ignore[return-value]

    def _plain_fields(self) -> PlainFields:
        """What the context without the corpus has in place of what comes from it."""
        docs = self._retrieved
        if self._prediction and docs is not None:
            return NO_MARKS, docs.view(self._marks), NO_CORPUS
        return NO_PLAIN

    def _advance(
        self,
        drafter: AutoDrafter,
        token_ids: Sequence[int],
        told: RowsFields = NO_ROWS,
        root: int = 0,
        *,
        learns: bool = True,
    ) -> tuple[Int32, Float32]:
        """Append tokens, and learn from each how far its contexts could be trusted, and whether the
        corpus helps. told, root: see blend.advance, whose echo is returned."""
        index, num = self._index, len(token_ids)
        num_output = index.size - self.num_prompt
        # A token drawn again after a rollback is not evidence twice.
        first = max(0, self._num_learned - num_output)
        if not (learns and drafter.learn and self._settled):
            first = num
        who, chances = np.zeros((2, num), np.uint8), np.empty((2, num))
        who[0, first:] = 1
        without, plain = drafter.trust, NO_PLAIN
        compared: list[int] = []
        if first < num:
            self._num_learned = num_output + num
            if drafter.has_corpus:
                compared = drafter.compare(token_ids, first, who)
                if who[1].any():
                    without, plain = drafter.trust.without, self._plain_fields()
        if num > index.room:
            index.make_room(num)
        if num_output + num >= self._places.shape[0]:
            self._places = np.concatenate((self._places, np.empty_like(self._places)))
        echo, num_rows = NO_ECHO, told[1].shape[0]
        if num_rows:
            assert self._likely is not None
            self._likely.make_room(num_rows)
            echo = np.empty(NUM_LIKELY, np.int32), np.empty(NUM_LIKELY, np.float32)
        asked, asked_without, num_echo = advance(
            np.array(token_ids, np.int32), self._context(drafter), plain, who,
            drafter.trust.learned_fields, without.learned_fields, drafter.workspace.gathered,
            chances, self._places, told, root, echo,
        )  # fmt: skip
        drafter.trust.num_news += asked
        without.num_news += asked_without
        index.size += num
        index.room -= num
        for i in compared:
            drafter.trust.fit.compare(float(chances[0, i]), float(chances[1, i]))
        return echo[0][:num_echo], echo[1][:num_echo]

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """See ResumedSession."""
        self._forget_step()
        self.extend(token_ids, learns=False)

    def extend(self, token_ids: Sequence[int], *, learns: bool = True) -> None:
        """Append emitted tokens, and learn from each how far its contexts could be trusted."""
        if self._closed:
            raise self._closed_error()
        drafter, root = self._drafter, self._index.size
        # Where it stands in the prediction changes with each token.
        at_once, echo = 1 if self._anchors and learns else MOST_AT_ONCE, self._echo
        for first in range(0, len(token_ids), at_once):
            some, told = token_ids[first : first + at_once], NO_ROWS
            if first + at_once >= len(token_ids):
                told, self._noted = self._noted, NO_ROWS
            echo = self._advance(drafter, some, told, root, learns=learns)
            if self._anchors:
                for token in some:
                    self._align(token)
        self._echo = echo
        if self._anchors:
            self._weigh_near()
        if self._noted_state is not None:
            start = np.empty(WIDTH, np.float32)
            start[0] = np.nan
            self._state = self._noted_state, self._index.size - 1, start
            self._noted_state = None
        rivals, self._rivals = self._rivals, []
        for trees in rivals:
            if trees.follow(token_ids):
                self._rivals.append(trees)
            else:
                drafter.trust.fit.compare_steps(*trees.accepted)

    def _forget_step(self) -> None:
        """Discard the last step's rows and trees."""
        self._noted, self._noted_state, self._echo = NO_ROWS, None, NO_ECHO
        self._grown, self._rivals = (), []

    def note_likely(
        self, token_ids: Sequence[int], parents: Sequence[int], ids: Int32, chances: Float32
    ) -> None:
        """See LikelySession; kept when the step's tokens are appended, and read till then."""
        if self._closed:
            raise self._closed_error()
        if self._likely is not None:
            num = self.num_likely
            nodes = np.array((token_ids, parents), np.int32)
            if num < ids.shape[1]:  # a session of another drafter wants more
                ids, chances = ids[:, :num].copy(), chances[:, :num].copy()
            self._noted = nodes, ids, chances

    def note_state(self, state: Float32) -> None:
        """See StateSession; read when the step's tokens are appended."""
        self._check_open()
        prior = self._drafter.prior
        if prior is not None:
            if state.shape != (prior.prior.hidden_size,):
                raise ValueError(f"the prior is not of a model with states of {state.shape[0]}")
            self._noted_state = state

    def rollback(self, mark: int) -> None:
        """Forget all but the first `mark` tokens seen since open(). What was learned stays."""
        super().rollback(mark)
        if self._state[1] >= self._index.size:
            self._state = NO_HIDDEN, 0, NO_HIDDEN
        self._forget_step()
        if self._anchors:
            del self._anchors[mark + 1 :]
            self._weigh_near()

    def close(self) -> None:
        """Release the indexes. Idempotent."""
        super().close()
        self._forget_step()
        self._retrieved = None
        self._marks = NO_MARKS
        self._forms = NO_TEXT
        self._anchors = []
