"""Calibrations: how often drafts came true, per task, drafter, corpus and scope, kept on disk.

The drafters define the tables (drafters.auto.trust, drafters.calibration). task_store.py says which
scope a request belongs to, and learns finished outputs.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import time
from collections import OrderedDict, defaultdict, deque
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from drafters.arrays import Float64
from drafters.auto.retrieval import Seen
from drafters.auto.tree_builder import Workspace
from drafters.calibration import write_table
from drafters.json_text import parsed
from drafters.shared_counts import added, is_empty, since
from server.types import NO_SCOPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from drafters.auto.trust import Trust
    from drafters.base import Drafter
    from drafters.calibration import Calibration
    from drafters.shared_counts import Counts, TableId

    Table = Trust | Calibration
    TellCounts = Callable[[tuple[str, str], TableId, Counts], None]
    """((task, scope), table, what was counted)"""

TableKey = tuple[str, str, str, str]
"""(task, drafter's name, corpus id, scope)"""

_log = logging.getLogger(__name__)

MAX_TABLES = 512  # a quarter of a MB each
MAX_TABLE_FILES = 2048  # of 0.15 MB: corpora and adapters come and go, and each leaves one a tenant
MAX_TABLES_TOLD = 64  # calibration files of one task that a report reads
MAX_ROWS = 400  # of a calibration table in a report
MAX_SEEN = 64  # scopes whose likely ids (2.5 MB at most) and last outputs are kept
OF_SALT = "~"  # in the name of a file that a cache_salt left
TALLY_MEMORY = 20_000.0  # steps after which a tally is halved


class Calibrations:
    """One engine's calibrations. The engine's thread calls everything but `report`, which reads
    files and may be called in any thread; another thread writes files.

    folder: where they are kept, None for memory only. save_every_s: seconds between writes.
    write_later: runs a job that writes a file in the other thread. tell: gets what was counted
    here, except in scopes with a cache_salt; None for nobody.
    """

    def __init__(
        self,
        folder: Path | None,
        save_every_s: float,
        write_later: Callable[[Callable[[], None]], None],
        tell: TellCounts | None = None,
    ) -> None:
        self._folder = folder
        self._save_every_s = save_every_s
        self._write_later = write_later
        self._tell = tell
        self._told: dict[TableKey, Counts] = {}  # what others know of it, or have taught it
        self._totals: OrderedDict[tuple[str, str], Mapping[TableId, Counts]] = OrderedDict()
        self._tables: OrderedDict[TableKey, Table] = OrderedDict()
        self._seen: OrderedDict[tuple[str, str], Seen] = OrderedDict()  # (task, scope)
        self._workspace: Workspace | None = None  # of the engine's thread
        self._calibrated: set[tuple[str, str]] = set()  # (task, drafter's name)
        self._dirty: set[tuple[str, str, str]] = set()  # (task, drafter's name, scope)
        self._unwritten: deque[set[tuple[str, str, str]]] = deque()  # the other thread's news
        self._to_save: list[TableKey] = []
        self._next_save_s = time.monotonic() + save_every_s

    def calibrate(self, task: str, drafter: Drafter, corpus_id: str, scope: str) -> None:
        """Give a new drafter the table of its (task, name, corpus, scope). Called before it has
        sessions.

        corpus_id: names the corpus by content, "" for none.
        """
        attribute = "trust" if hasattr(drafter, "trust") else "calibration"
        own = cast("Table | None", getattr(drafter, attribute, None))
        if own is None:
            return
        key = (task, drafter.name, corpus_id, scope)
        table = self._tables.get(key)
        if table is None:
            table = own
            path = self._table_file(key)
            if path is not None and path.exists():
                try:
                    table.restore(path)
                except ValueError as error:
                    _log.warning("task %s: its calibration starts anew: %s", task, error)
            self._tables[key] = table
            if self._tell is not None:
                self._told[key] = table.counts()
                self._adopt(key, self._totals.get((task, scope), {}))
            if len(self._tables) > MAX_TABLES:
                old, dropped = self._tables.popitem(last=False)
                self._save_table(old, dropped)
                self._told.pop(old, None)
        self._tables.move_to_end(key)
        self._calibrated.add((task, drafter.name))
        setattr(drafter, attribute, table)

    def adopt(self, key: tuple[str, str], totals: Mapping[TableId, Counts]) -> None:
        """What all engines have counted of a (task, scope); what was counted here and not told yet
        comes on top."""
        self._totals[key] = totals
        self._totals.move_to_end(key)
        if len(self._totals) > MAX_SEEN:
            self._totals.popitem(last=False)
        for table_key in self._tables:
            if (table_key[0], table_key[3]) == key:
                self._adopt(table_key, totals)

    def _adopt(self, key: TableKey, totals: Mapping[TableId, Counts]) -> None:
        counts = totals.get((key[1], key[2]))
        if counts is None:
            return
        table = self._tables[key]
        own = since(table.counts(), self._told[key])
        try:
            table.set_counts(added([counts, own]))
        except (ValueError, KeyError) as error:
            _log.warning("task %s: what others counted is left out: %s", key[0], error)
            return
        self._told[key] = counts

    def seen(self, task: str, scope: str) -> Seen:
        """What a scope's requests of a task left behind. Its drafters write the likely ids."""
        seen = self._seen.get((task, scope))
        if seen is None:
            self._workspace = self._workspace or Workspace()
            seen = self._seen[task, scope] = Seen(workspace=self._workspace)
        self._seen.move_to_end((task, scope))
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return seen

    def forget_seen(self, task: str) -> None:
        """Drop what a task's requests left behind."""
        for key in [key for key in self._seen if key[0] == task]:
            del self._seen[key]

    def observe(self, task: str, drafter: str, scope: str, num_steps: int, num_tokens: int) -> None:
        """A choice finished with so many tokens in so many decode steps."""
        if (task, drafter) not in self._calibrated:
            return
        tally = self._tallies[task, drafter]
        tally += (num_steps, num_tokens)
        if tally[0] > TALLY_MEMORY:
            tally *= 0.5
        self._dirty.add((task, drafter, scope))

    def report(self, table: Table) -> dict[str, Any]:
        """A table and those of all other scopes, summed, as plain values.

        calibration: (source, min_match_length, predicted_share, offered, accepted) tuples, the most
        offered first, MAX_ROWS at most. corpus_steps: steps whose trees were grown with the corpus
        and without, in scopes that are in memory; tokens_with, tokens_without: what these made of
        the text that came (drafters.auto.corpus_fit).
        """
        every = list(self._tables.items())  # which the engine's thread changes meanwhile
        of = next((key[:3] for key, known in every if known is table), None)
        here = {key: known for key, known in every if key[:3] == of}
        tables = list(here.values()) or [table]
        fits = [fit for known in tables if (fit := getattr(known, "fit", None))]
        stem = None if of is None else self._table_file((*of, NO_SCOPE))
        if stem is not None:
            files = {stem, *stem.parent.glob(f"{stem.stem}-*{stem.suffix}")}
            for path in sorted(files - {self._table_file(key) for key in here})[:MAX_TABLES_TOLD]:
                kept = copy.deepcopy(table)
                with contextlib.suppress(ValueError):
                    kept.restore(path)
                    tables.append(kept)
        cells: dict[tuple[str, int, float], list[float]] = {}
        for row in (row for known in tables for row in known.table()):
            # Trust tells the lower edge of a claimed share, Calibration the middle of its bucket.
            share = row["min_share"] if "min_share" in row else row["predicted_share"]
            cell = cells.setdefault((row["source"], row["min_match_length"], share), [0.0, 0.0])
            cell[0] += row["offered"]
            cell[1] += row["accepted"]
        rows = [(*at, offered, accepted) for at, (offered, accepted) in cells.items()]
        rows.sort(key=lambda row: -row[3])
        return {
            "calibration": rows[:MAX_ROWS],
            "corpus_steps": sum(fit.num_steps for fit in fits),
            "tokens_with": sum(fit.tokens_with for fit in fits),
            "tokens_without": sum(fit.tokens_without for fit in fits),
        }

    def tally(self, task: str, drafter: str) -> tuple[float, float]:
        """Decayed (decode steps, emitted tokens) of finished requests of every scope."""
        num_steps, num_tokens = self._tallies[task, drafter].tolist()
        return num_steps, num_tokens

    # -- upkeep -----------------------------------------------------------------------------

    def poll(self) -> None:
        """Between steps: save one table that is due. Copying it takes a fraction of a
        millisecond."""
        while self._unwritten:
            self._dirty |= self._unwritten.popleft()
        if self._to_save:
            self._save_next()
        elif self._dirty and time.monotonic() >= self._next_save_s:
            self._plan_saves()

    def due_ms(self) -> int | None:
        """Milliseconds until poll() has something to do; None for nothing."""
        if self._to_save:
            return 0
        if not self._dirty:
            return None
        return max(0, int((self._next_save_s - time.monotonic()) * 1e3) + 1)

    def flush(self) -> None:
        """Save everything now."""
        self.poll()
        self._plan_saves()
        while self._to_save:
            self._save_next()

    def _save_next(self) -> None:
        key = self._to_save.pop()
        if key in self._tables:
            self._save_table(key, self._tables[key])

    # -- files ------------------------------------------------------------------------------

    def _table_file(self, key: TableKey) -> Path | None:
        """The file of a key. None for those of a cache_salt: clients invent salts, and files
        stay."""
        task, drafter, corpus_id, scope = key
        tenant, _, salt = scope.partition("\0")
        if self._folder is None or salt:
            return None
        whose = f"-{digest(tenant)}" if tenant else ""
        name = f"calibration-{digest(task)}-{digest(drafter, corpus_id)}{whose}.json"
        return self._folder / name

    def _save_table(self, key: TableKey, table: Table) -> None:
        path = self._table_file(key)
        if path is not None:
            # A copy: the engine goes on counting while the worker writes.
            snapshot = copy.deepcopy(table)
            used = {(key[0], key[1], key[3])}
            self._write_later(partial(self._write, partial(_save, snapshot, path), used))
            if self._tell is not None:
                now = table.counts()
                counted = since(now, self._told[key])
                self._told[key] = now
                if not is_empty(counted):
                    self._tell((key[0], key[3]), (key[1], key[2]), counted)

    def _plan_saves(self) -> None:
        dirty, self._dirty = self._dirty, set()
        self._next_save_s = time.monotonic() + self._save_every_s
        if self._folder is None or not dirty:
            return
        used = [key for key in self._tables if (*key[:2], key[3]) in dirty]
        for key in used:  # its drafter may have been made long ago
            self._tables.move_to_end(key)
        self._to_save += used
        rows = [[*key, *tally.tolist()] for key, tally in self._tallies.items()]
        path = self._folder / "tallies.json"
        write = partial(write_table, path, "tallies", 1, {"tallies": rows})
        self._write_later(partial(self._write, write, dirty))

    def _write(self, write: Callable[[], None], used: set[tuple[str, str, str]]) -> None:
        """In the other thread: write a file, or have it written with the next ones."""
        try:
            write()
        except OSError as error:
            _log.warning("calibration could not be written: %s", error.strerror)
            self._unwritten.append(used)

    @cached_property
    def _tallies(self) -> defaultdict[tuple[str, str], Float64]:
        """By task and drafter's name decayed (decode steps, emitted tokens) of finished requests;
        at first those of the file."""
        tallies: defaultdict[tuple[str, str], Float64] = defaultdict(lambda: np.zeros(2))
        if self._folder is None:
            return tallies
        try:
            body = parsed((self._folder / "tallies.json").read_text())
            for task, drafter, num_steps, num_tokens in body["tallies"]:
                # More steps than tokens, too: `exact` takes wrong tokens back.
                if not all(0 <= num < 1e12 for num in (num_steps, num_tokens)):
                    raise ValueError("impossible counts")
                tallies[str(task), str(drafter)][:] = num_steps, num_tokens
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("tokens per step are counted anew: %s", error)
        return tallies


def _save(table: Table, path: Path) -> None:
    is_new = not path.exists()
    table.save(path)
    if is_new:
        keep_some(path.parent.glob("calibration-*.json"), MAX_TABLE_FILES)


def keep_some(files: Iterable[Path], most: int) -> None:
    """Delete all but so many: those of salts go first, then those that were written longest ago.
    Raises OSError."""
    going = sorted(files, key=lambda path: (OF_SALT not in path.name, path.stat().st_mtime))
    for path in going[: max(0, len(going) - most)]:
        path.unlink(missing_ok=True)


def digest(*parts: str) -> str:
    """16 hex digits for a file's name: no name of a task or client can be a path."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
