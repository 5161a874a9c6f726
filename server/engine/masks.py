"""The grammars' masks of one step: which ids each draw may give. Attention has no masks: the prefix
and path columns of a batch say what a row attends to (batch.py)."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf

import numpy as np

from server.engine.batch import UInt32
from server.engine.drafting import CheckedTree
from server.engine.grammar import GrammarState, fill_masks
from server.engine.plan import Scheduled

_log = logging.getLogger(__name__)


def step_masks(
    items: SequenceOf[Scheduled], trees: SequenceOf[CheckedTree | None]
) -> list[UInt32 | None] | None:
    """Per item uint32 [1 + nodes, words]: the root's mask, then each node's; None for an item
    without a grammar, and instead of the list when no item has one."""
    if not any(item.draws and item.sequence.grammar is not None for item in items):
        return None
    return [
        _masks_of(grammar, tree)
        if item.draws
        and (grammar := item.sequence.grammar) is not None
        and item.sequence.rules.max_output > 0
        else None
        for item, tree in zip(items, trees, strict=True)
    ]


def _masks_of(grammar: GrammarState, tree: CheckedTree | None) -> UInt32:
    try:
        return fill_masks(grammar, tree)
    except Exception as error:  # its draws fail, and so does its request alone
        _log.exception("a grammar failed", exc_info=error)
        grammar.problem = "an internal error"
        num_nodes = 0 if tree is None else len(tree.token_ids)
        return np.zeros((1 + num_nodes, grammar.num_words), np.uint32)
