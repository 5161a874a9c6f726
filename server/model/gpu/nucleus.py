"""Top-k, then top-p, of many rows of logits at once, without a sort of the vocabulary.

How many ids stay depends on the sorted *values* alone, and which of several equal values stay on
their ids. So the SELECTED largest values of a row are sorted, and the ids at the threshold are
counted in id order. Under top-p alone the mass of the whole row is one sum more. A row whose cut
the selection does not show goes another way (`beyond`): its ids hold less than top_p, or more than
SELECTED stay by top-k, or the running sum comes so near to its goal that the order of summing
could tell. That way is a sort (`by_sort`, for tensors in CPU memory, where it costs only the rows
that need it) or a search for the threshold (nucleus_kernels.py), because on CUDA the host must
not wait to learn which rows need it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from server.model.gpu.draw_plan import DrawPlan

SELECTED = 1024
"""Largest values of a row that are sorted; more take as long as a sort of the row."""


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Where m rows of float64 logits are cut. num_left: int64 [m], finite ids that top-k leaves.
    top_p: float64 [m]. threshold: float64 [m]; kept: int64 [m]: ids above the threshold stay, and
    as many of the lowest ids at it as make `kept`."""

    num_left: torch.Tensor
    top_p: torch.Tensor
    threshold: torch.Tensor
    kept: torch.Tensor


Beyond = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Cut], None]
"""(x float64 [m, V], their shares exp(x - max), bool [m], cut): sets threshold and kept of the rows
that are true."""


def keep_nucleus(
    x: torch.Tensor, plan: DrawPlan, arrays: Mapping[str, torch.Tensor], beyond: Beyond
) -> torch.Tensor:
    """x float64 [m, V] with -inf where top-k or top-p leaves an id out.

    Every comparison, order and tie is the reference sampler's (engine/reference_sampler.py).
    """
    cut = _find(x, plan, arrays, beyond)
    threshold = cut.threshold[:, None]
    above = x > threshold
    equal = x == threshold
    room = cut.kept - above.sum(dim=1)
    stays = above | (equal & (torch.cumsum(equal, dim=1) <= room[:, None]))
    return x.masked_fill(~stays, float("-inf"))


def _find(
    x: torch.Tensor, plan: DrawPlan, arrays: Mapping[str, torch.Tensor], beyond: Beyond
) -> Cut:
    size = x.shape[1]
    host_k, host_p = plan.arrays["top_k"], plan.arrays["top_p"]
    width = min(size, SELECTED, int(host_k[host_k < size].max(initial=1)))
    if ((host_k == size) & (host_p < 1.0)).any():
        width = min(size, SELECTED)
    finite = torch.isfinite(x).sum(dim=1)
    num_left, top_p = torch.minimum(arrays["top_k"], finite), arrays["top_p"]
    values = torch.topk(x, width, dim=1).values
    running = _running(values, num_left)
    if not ((host_k > width) & ((host_p < 1.0) | (host_k < size))).any():
        # What the selection does not hold belongs to rows that keep everything.
        return _cut(values, running, _goal(running, num_left, top_p), num_left, top_p, finite)
    shares = torch.exp(x - values[:, :1])
    is_whole = num_left <= width
    goal = torch.where(is_whole, _goal(running, num_left, top_p), top_p * shares.sum(dim=1))
    cut = _cut(values, running, goal, num_left, top_p, finite)
    slack = (size + 8) * torch.finfo(torch.float64).eps * goal / top_p
    near = ((running - goal[:, None]).abs() <= slack[:, None]).any(dim=1)
    shown = (top_p < 1.0) & (num_left == finite) & (running[:, -1] > goal) & ~near
    keeps_all = (top_p >= 1.0) & (num_left == finite)
    beyond(x, shares, ~(is_whole | shown | keeps_all), cut)
    return cut


def _running(values: torch.Tensor, num_left: torch.Tensor) -> torch.Tensor:
    """Running sums of the shares of sorted values, those behind num_left without a share."""
    rank = torch.arange(values.shape[1], device=values.device)
    share = torch.exp(values - values[:, :1])
    return torch.cumsum(torch.where(rank[None, :] < num_left[:, None], share, 0.0), dim=1)


def _goal(running: torch.Tensor, num_left: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """top_p of the mass of num_left ids, for rows of which `running` shows all of them."""
    last = (num_left.clamp(min=1, max=running.shape[1]) - 1)[:, None]
    return top_p * running.gather(1, last).squeeze(1)


def _cut(
    values: torch.Tensor,
    running: torch.Tensor,
    goal: torch.Tensor,
    num_left: torch.Tensor,
    top_p: torch.Tensor,
    finite: torch.Tensor,
) -> Cut:
    """What sorted values show; rows that keep all their ids have the threshold -inf."""
    rank = torch.arange(values.shape[1], device=values.device)
    # The smallest prefix whose share reaches top_p, the id that crosses it included.
    below = ((running < goal[:, None]) & (rank[None, :] < num_left[:, None])).sum(dim=1) + 1
    kept = torch.where(top_p < 1.0, torch.minimum(num_left, below), num_left)
    at = (kept.clamp(min=1, max=values.shape[1]) - 1)[:, None]
    threshold = values.gather(1, at).squeeze(1)
    threshold = torch.where(kept == finite, float("-inf"), threshold)
    return Cut(num_left, top_p, threshold, kept)


def by_sort(x: torch.Tensor, shares: torch.Tensor, rows: torch.Tensor, cut: Cut) -> None:
    """Beyond, by sorting the rows. The host waits for `rows`."""
    del shares
    which = rows.nonzero().squeeze(1)
    if not which.shape[0]:
        return
    num_left, top_p = cut.num_left[which], cut.top_p[which]
    own = x[which]
    values = torch.sort(own, dim=1, descending=True).values
    running = _running(values, num_left)
    goal = _goal(running, num_left, top_p)
    found = _cut(values, running, goal, num_left, top_p, torch.isfinite(own).sum(dim=1))
    cut.threshold[which] = found.threshold
    cut.kept[which] = found.kept
