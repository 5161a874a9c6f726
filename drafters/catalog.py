"""The catalog: one DrafterSpec per drafter, from which everything else is derived.

A spec gives the drafter's section in task files and its field in requests (server/config), its
arguments in the server (server.wiring.drafter), what `tailor tasks tune` tries and the table in
docs/adding-a-drafter.md. A drafter of your own is one DrafterSpec under an entry point of the group
`tailor.drafters`:

    [project.entry-points."tailor.drafters"]
    echo = "my_package.echo:SPEC"

Importing this module imports neither numpy nor any drafter; `make_drafter` does.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from drafters.options import (
    NoOptions,
    Option,
    OptionError,
    OptionFile,
    check_options,
    option,
    options_of,
)

if TYPE_CHECKING:
    from drafters.base import Drafter

ENTRY_POINTS = "tailor.drafters"
"""The group of entry points that drafters of one's own are found by."""

RESERVED = frozenset(
    {
        *("off", "drafter", "max_draft_tokens", "allowed_drafters", "corpus", "allowed_corpora"),
        *("learn", "learn_max_tokens", "context"),
    }
)
"""Names that no drafter may have: "off", and the keys that stand beside the drafters' sections."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_log = logging.getLogger("tailor.drafters")


class Need(Enum):
    """What a drafter's class takes beside its options, by the keyword it takes it as.

    CORPUS: drafters.corpus.Corpus or None. LEARNED: a layer of learned outputs over it, or None.
    EOS: ids that the drafter never proposes. SEEN: what the scope's requests left behind
    (drafters.auto.retrieval.Seen), or None. PIECES: the bytes of the vocabulary's ids
    (drafters.auto.copying.Pieces), or None. PRIOR: the model's head (drafters.auto.prior.Prior), or
    None. PREDICTION: no argument; its sessions use `prediction_ids`, which other drafters ignore.
    """

    CORPUS = "corpus"
    LEARNED = "learned"
    EOS = "eos_token_ids"
    SEEN = "seen"
    PIECES = "pieces"
    PRIOR = "model_prior"
    PREDICTION = "prediction_ids"


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """One drafter.

    factory: "module:Class", called with the options by name and what it needs. summary: one line
    for people. options: a dataclass of drafters.options. without_corpus: whether tuning tries it
    without a corpus too. paper: where it was published, "" for nowhere.
    """

    name: str
    factory: str
    summary: str
    options: type = NoOptions
    needs: frozenset[Need] = frozenset()
    without_corpus: bool = True
    paper: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in RESERVED:
            raise ValueError(f"{self.name!r} cannot be a drafter's name")
        if not re.fullmatch(r"[\w.]+:\w+", self.factory):
            raise ValueError(f"{self.factory!r} is not module:Class")
        options_of(self.options)

    @property
    def fields(self) -> tuple[Option, ...]:
        """Its options, in their order."""
        return options_of(self.options)

    def option(self, key: str) -> Option:
        """The option that files call `key`. Raises KeyError."""
        return next(one for one in self.fields if one.key == key)

    def load(self) -> Any:
        """The drafter's class; its module is imported only now (numba)."""
        module, _, attribute = self.factory.partition(":")
        return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class AutoOptions:
    """The options of `auto`."""

    num_likely: int = option(
        8,
        ge=0,
        le=8,
        key="logits",
        help="likeliest ids of each verified row that are kept and drafted from; 0 is off",
    )
    prior_depth: int = option(
        4,
        ge=0,
        le=4,
        key="prior",
        help="ids that the model's prior follows by itself, of `tailor models prior`; 0 is off",
    )


@dataclass(frozen=True)
class TrieOptions:
    """N-Gram-Trie's parameters (EMNLP 2025)."""

    n: int = option(13, ge=2, le=64, help="length of the n-grams in tokens")
    prefix_length: int = option(3, ge=1, le=63, help="L_p: most generated tokens that are matched")
    num_draft: int = option(32, ge=1, le=256, counts_nodes=True, help="nodes kept of a sub-tree")

    def __post_init__(self) -> None:
        if self.prefix_length >= self.n:
            raise OptionError("prefix_length", "must be below n")


@dataclass(frozen=True)
class MixOptions:
    """TASC-spec's parameters (arXiv 2602.24174)."""

    n_max: int = option(5, ge=1, le=16, help="longest n-gram")
    horizon: int = option(10, ge=1, le=64, counts_nodes=True, help="tokens drafted ahead")
    mixing: float = option(0.75, ge=0, le=1, key="lambda", help="lambda: share of the corpus")


@dataclass(frozen=True)
class GrammysOptions:
    """N-Grammys' parameters (arXiv 2411.03786)."""

    table: Any = option(
        None,
        file=OptionFile(
            "drafters.published.grammys:BigramTable", "bigrams", "tailor corpus bigrams", of="model"
        ),
        help="the model's bigrams, a file of `tailor corpus bigrams`",
    )
    strategy: Literal["bigram", "mixed"] = option(
        "mixed",
        in_requests=False,
        help="the table alone, or behind the request's own text (mixed)",
    )

    def __post_init__(self) -> None:
        if self.strategy == "bigram" and self.table is None:
            raise OptionError("strategy", "bigram needs a table")


OURS = (
    DrafterSpec(
        "auto",
        "drafters.auto.drafter:AutoDrafter",
        "all sources in one tree, by the calibrated chance of every node",
        options=AutoOptions,
        needs=frozenset(Need),
    ),
    DrafterSpec(
        "suffix",
        "drafters.published.suffix:SuffixDrafter",
        "prompt and own output at all match lengths",
        needs=frozenset({Need.EOS}),
    ),
    DrafterSpec(
        "prompt",
        "drafters.published.prompt:PromptDrafter",
        "prompt lookup, the baseline",
        needs=frozenset({Need.EOS}),
        paper="transformers' prompt lookup",
    ),
    DrafterSpec(
        "trie",
        "drafters.published.trie:TrieDrafter",
        "a trie built from the prompt's context, drafted as a tree",
        options=TrieOptions,
        paper="N-Gram-Trie, EMNLP 2025",
    ),
    DrafterSpec(
        "mix",
        "drafters.published.mix:MixDrafter",
        "n-grams of a corpus mixed with the request's own",
        options=MixOptions,
        needs=frozenset({Need.CORPUS, Need.LEARNED}),
        without_corpus=False,
        paper="TASC-spec, arXiv 2602.24174",
    ),
    DrafterSpec(
        "grammys",
        "drafters.published.grammys:GrammysDrafter",
        "the model's own bigrams behind the request's text",
        options=GrammysOptions,
        paper="N-Grammys, arXiv 2411.03786",
    ),
)
"""The drafters of the package, in the order in which they are listed and tried."""


@functools.cache
def catalog() -> Mapping[str, DrafterSpec]:
    """Every drafter by name: ours first, then those found through entry points, by name.

    An entry point that cannot be loaded, is no DrafterSpec or takes a used name is left out, and
    a warning is logged.
    """
    from importlib.metadata import entry_points

    found = {spec.name: spec for spec in OURS}
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        try:
            spec = point.load()
            if not isinstance(spec, DrafterSpec):
                raise TypeError(f"{point.value} is no DrafterSpec")
            if spec.name in found:
                raise ValueError(f"there is a drafter {spec.name!r} already")
        except Exception as error:
            _log.error("the drafter %s is left out: %s", point.name, error)
            continue
        found[spec.name] = spec
    return found


def drafter_names() -> tuple[str, ...]:
    """What a task may name: "off", which makes no drafter, then the drafters by name."""
    return ("off", *sorted(catalog()))


def spec_of(name: str) -> DrafterSpec:
    """The spec of a name. Raises ValueError for an unknown one, and for "off", which has none."""
    if name == "off":
        raise ValueError("'off' has no drafter: run the plain decode path instead")
    spec = catalog().get(name)
    if spec is None:
        raise ValueError(f"unknown drafter {name!r}; known: {', '.join(drafter_names())}")
    return spec


def that_use(need: Need) -> tuple[str, ...]:
    """Names of the drafters that have this need, in the order of the catalog."""
    return tuple(name for name, spec in catalog().items() if need in spec.needs)


@functools.cache
def _parameters(factory: Callable[..., Drafter]) -> tuple[str, ...]:
    """Their names. Each scope has drafters of its own, and its first request waits for them."""
    return tuple(inspect.signature(factory).parameters)


def make_drafter(name: str, **given: Any) -> Drafter:
    """The drafter called `name` with its options (by parameter or by key) and what it needs.

    Raises ValueError for a name that is not known, for "off" (which has no drafter: the caller
    runs the plain path), for an option the drafter does not have, and for a value out of range.
    """
    spec = spec_of(name)
    factory = spec.load()
    known = _parameters(factory)
    by_key = {one.key: one.name for one in spec.fields}
    values: dict[str, Any] = {}
    for key, value in given.items():
        parameter = by_key.get(key, key)
        if parameter not in known:
            raise ValueError(
                f"drafter {name!r} has no option {key!r}; it has: {', '.join(by_key) or 'none'}"
            )
        values[parameter] = value
    own = {one.name for one in spec.fields}
    check_options(spec.options, {k: v for k, v in values.items() if k in own})
    drafter: Drafter = factory(**values)
    return drafter
