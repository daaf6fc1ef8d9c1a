"""Tables of many runs in a few files, so that a server that starts anew reads these and not thousands of small ones.

    runs/.tables/records-1f00c2….parquet

A row group is a metric, its rows in the order of the runs; which runs, their stamps and how many rows each has stand in the
file's metadata. A run whose stamp is another one by now is not read from here, and a file that is damaged is none: before the
footer stand sums of each row group's bytes and of what follows them, since Parquet sums up its pages alone.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from workbench.errors import BadCheckpoint, WorkbenchError
from workbench.files import MAX_TABLE, digest, open_regular, replacing
from workbench.runs.catalogue import Entry
from workbench.runs.recent import Recent
from workbench.runs.records import COLUMNS, MARK, NEEDED, SUM, TEXT, WHOLE, checked, damage, table_sum

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

FOLDER, VERSION, ABOUT = ".tables", 1, b"workbench"
ANSWERED = ("run", "architecture")  # columns that an answer fills in
MAX_FILES, MAX_HELD, MAX_GROUPS = (
    8,
    96_000_000,
    4096,
)  # files before they become one; bytes in memory; metrics of a file

ByMetric = dict[str, list[Any]]
"""Arrow tables of each metric."""
Said = tuple[tuple[int, ...], dict[str, int]]
"""A run's stamp, and how many rows of each metric it has."""


@dataclass(frozen=True)
class Pack:
    """A file: its metrics in the order of its row groups, and of each run its stamp and its first and last row of each."""

    path: Path
    groups: tuple[tuple[int, bytes], ...]  # where each row group begins, and its sum; last, where they end
    metrics: tuple[str, ...]
    runs: dict[str, tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]

    def holds(self, entry: Entry, root: Path) -> bool:
        """Whether the run is here as it is now."""
        return self.runs.get(_name(entry, root), (None, ()))[0] == entry.stamp

    def of(self, entry: Entry, root: Path) -> dict[str, tuple[int, int]]:
        """First row and number of rows of each metric that a run has which is here."""
        places = self.runs[_name(entry, root)][1]
        return {metric: place for metric, place in zip(self.metrics, places, strict=True) if place[1]}

    def index(self, metric: str) -> int | None:
        """Which row group holds a metric."""
        return self.metrics.index(metric) if metric in self.metrics else None


class Packs:
    """The packed tables of a kind under a folder of runs; nothing is kept where `root` is None or cannot be written."""

    def __init__(self, root: Path | None, kind: str) -> None:
        self.root, self.kind = root, kind
        self.files: list[Pack] | None = None
        self.held = Recent[tuple[Path, str], "pa.Table"](MAX_HELD, lambda table: int(table.nbytes))

    def metrics(self, entry: Entry) -> list[str] | None:
        """The metrics of a run; None where it is not packed as it is now."""
        found = self._find(entry)
        return None if found is None else list(found[1])

    def tables(self, entry: Entry, metrics: Sequence[str] | None) -> list[pa.Table]:
        """Tables of a packed run; raises `BadCheckpoint` where its file is gone or damaged, and nothing is packed any more."""
        found = self._find(entry)
        assert found is not None
        pack, places = found
        wanted = [m for m in places if metrics is None or m in metrics]
        return [self._metric(pack, m).slice(*places[m]) for m in wanted]

    def may_hold(self, entry: Entry) -> bool:
        """Whether a run that was read may be written down here: it is of this folder, and nothing writes it."""
        inside = self.root is not None and self.root in Path(entry.path).parents
        return inside and entry.settled and not entry.being_written

    def add(self, runs: Sequence[tuple[Entry, ByMetric]]) -> bool:
        """Write a file of these runs, and one in place of all files where they are many; False where that cannot be."""
        if self.root is None:
            return False
        try:
            files, said, tables = self._listed(), dict[str, Said](), dict[str, ByMetric]()
            for entry, of_run in runs:
                name = _name(entry, self.root)
                said[name], tables[name] = (entry.stamp, {m: sum(map(len, t)) for m, t in of_run.items()}), of_run
            files.append(self._write(said, lambda metric: [t for of in tables.values() for t in of.get(metric, ())]))
            if len(files) > MAX_FILES:
                self._merge()
        except (WorkbenchError, OSError):  # read-only, full
            self.root = None
            return False
        return True

    def _find(self, entry: Entry) -> tuple[Pack, dict[str, tuple[int, int]]] | None:
        if self.root is None:
            return None
        pack = next((p for p in reversed(self._listed()) if p.holds(entry, self.root)), None)
        return None if pack is None else (pack, pack.of(entry, self.root))

    def holds(self, entry: Entry) -> bool:
        """Whether a run is packed as it is now."""
        root = self.root
        return root is not None and any(pack.holds(entry, root) for pack in self._listed())

    def _listed(self) -> list[Pack]:
        if self.files is None:
            assert self.root is not None
            self.files = []
            for path in sorted((self.root / FOLDER).glob(f"{self.kind}-*.parquet"), key=_changed):
                with contextlib.suppress(BadCheckpoint):  # its runs are read from their own files
                    self.files.append(_opened(path))
        return self.files

    def _metric(self, pack: Pack, metric: str) -> pa.Table:
        try:
            return self.held.get((pack.path, metric), lambda: _row_group(pack, pack.metrics.index(metric)))
        except BadCheckpoint:
            self.root = None  # what was written cannot be read: each run has its own files
            raise

    def _write(self, runs: Mapping[str, Said], tables: Callable[[str], list[pa.Table]]) -> Pack:
        """A file of runs, metric by metric; `tables` gives those of a metric in the order of the runs."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        assert self.root is not None
        metrics = sorted({metric for _, rows in runs.values() for metric in rows})
        about = {
            "version": VERSION,
            "metrics": metrics,
            "runs": {n: [stamp, [rows.get(m, 0) for m in metrics]] for n, (stamp, rows) in runs.items()},
        }
        # a provenance is long: written out for each row it would take all the memory
        text = pa.dictionary(pa.int32(), pa.string())
        kinds = [
            (c, text if c in TEXT else pa.int64() if c in WHOLE else pa.float64()) for c in COLUMNS if c not in ANSWERED
        ]
        schema = pa.schema(kinds, {ABOUT: json.dumps(about).encode()})
        path = self.root / FOLDER / f"{self.kind}-{digest(about)}.parquet"
        with (
            replacing(path) as part,
            pq.ParquetWriter(part, schema, compression="zstd", write_page_checksum=True) as file,
        ):
            for metric in metrics:
                table = pa.concat_tables(tables(metric), promote_options="permissive").unify_dictionaries()
                known = table.column_names
                columns = [table[c].cast(k) if c in known else pa.nulls(len(table), k) for c, k in kinds]
                file.write_table(pa.table(columns, schema=schema), row_group_size=max(1, len(table)))
            file.close()
            _seal(part)
        return _opened(path)

    def _merge(self) -> None:
        """One file in place of all: of each run what the newest file says."""
        files = self._listed()
        newest = {name: pack for pack in files for name in pack.runs}
        said = {
            name: (pack.runs[name][0], {m: n for m, (_, n) in zip(pack.metrics, pack.runs[name][1], strict=True) if n})
            for name, pack in newest.items()
        }

        def tables(metric: str) -> list[pa.Table]:
            groups = {p.path: (_row_group(p, i), i) for p in files for i in [p.index(metric)] if i is not None}
            found = ((groups[pack.path], pack.runs[name][1]) for name, pack in newest.items() if pack.path in groups)
            return [table.slice(*places[i]) for (table, i), places in found]

        self.files = [self._write(said, tables)]
        self.held.clear()
        for pack in files:
            if pack.path != self.files[0].path:
                pack.path.unlink(missing_ok=True)


def compact(rows: pa.Table) -> pa.Table:
    """Without the columns that say nothing; whole numbers in half the bytes, texts as numbers into a list of texts."""
    import pyarrow as pa

    kept = [c for c in rows.column_names if c not in ANSWERED and rows[c].null_count < len(rows)]
    rows = rows.select(kept)
    for i, column in enumerate(kept):
        if column in WHOLE:
            with contextlib.suppress(pa.ArrowInvalid):  # a number too large for it stays as it is
                rows = rows.set_column(i, column, rows[column].cast(pa.int32()))
        elif column in TEXT and not pa.types.is_dictionary(rows[column].type):
            rows = rows.set_column(i, column, rows[column].cast("string").dictionary_encode())
    return rows.combine_chunks()


def filled(file: pq.ParquetFile, always: Sequence[str] = (), groups: Sequence[int] | None = None) -> list[str]:
    """The columns of an open file, or of some of its row groups, that are not null all through, and those that are `always` read."""
    found = dict.fromkeys(always)
    for index in range(file.metadata.num_row_groups) if groups is None else groups:
        group = file.metadata.row_group(index)
        for column in map(group.column, range(group.num_columns)):
            if column.statistics is None or column.statistics.null_count < group.num_rows:
                found[column.path_in_schema] = None
    return list(found)


def _name(entry: Entry, root: Path) -> str:
    return entry.path.removeprefix(f"{root}/")


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _seal(path: Path) -> None:
    """Put the row groups' places and sums before a file's footer, and a sum of these and the footer before them."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    columns = [[group.column(i) for i in range(group.num_columns)] for group in groups]
    starts = [
        min(o for c in of for o in (c.dictionary_page_offset, c.data_page_offset) if o is not None) for of in columns
    ]
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        end = file.tell() - int.from_bytes(file.read(4), "little")
        file.seek(end)
        footer, places = file.read(), [*starts, end]
        sums = [table_sum(_between(file, a, b)) for a, b in pairwise(places)]
        said = b"".join(at.to_bytes(8, "little") + one for at, one in zip(places, [*sums, bytes(SUM)], strict=True))
        file.seek(end)
        file.write(MARK + table_sum(said + footer) + said + footer)


def _sealed(path: Path) -> tuple[tuple[int, bytes], ...]:
    """Where each row group begins and its sum, and where they end; raises `BadCheckpoint` where this is not what was written."""
    with open_regular(path, MAX_TABLE) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(-8, os.SEEK_END)
        footer = int.from_bytes(file.read(4), "little") + 8
        one = 8 + SUM
        tail = _between(file, max(0, size - footer - MAX_GROUPS * one), size)
    at = tail.rfind(MARK)
    said = tail[at + len(MARK) + SUM :]
    if at < 0 or footer > len(said) or table_sum(said) != tail[at + len(MARK) : at + len(MARK) + SUM]:
        raise BadCheckpoint(f"{path} is not as it was written")
    entries = [said[i : i + one] for i in range(0, len(said) - footer, one)]
    return tuple((int.from_bytes(entry[:8], "little"), entry[8:]) for entry in entries)


def _between(file: BinaryIO, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)


def _opened(path: Path) -> Pack:
    """What a file says of itself; raises `BadCheckpoint` where it is not as it was written."""
    import pyarrow.parquet as pq

    try:
        sealed = _sealed(path)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            says, lengths = json.loads(file.schema_arrow.metadata[ABOUT]), file.metadata
            metrics, counts = tuple(map(str, says["metrics"])), [rows for _, rows in says["runs"].values()]
            ends = [list(accumulate(column)) for column in zip(*counts, strict=True)]
            if says["version"] != VERSION or [lengths.row_group(i).num_rows for i in range(len(metrics))] != [
                e[-1] for e in ends
            ]:
                raise BadCheckpoint(f"{path} is not as it was written")
            places = [
                tuple((end[i] - n, n) for end, n in zip(ends, rows, strict=True)) for i, rows in enumerate(counts)
            ]
            runs = {n: (tuple(said[0]), at) for (n, said), at in zip(says["runs"].items(), places, strict=True)}
            return Pack(path, sealed, metrics, runs)
    except _broken() as error:
        raise BadCheckpoint(f"cannot read {path}: {error}") from error


def _broken() -> tuple[type[Exception], ...]:
    """What a file that is not as it was written raises."""
    return *damage(), ValueError, TypeError, IndexError


def _row_group(pack: Pack, index: int) -> pa.Table:
    import pyarrow.parquet as pq

    try:
        (begin, told), (end, _) = pack.groups[index : index + 2]
        with open_regular(pack.path, MAX_TABLE) as file:
            if table_sum(_between(file, begin, end)) != told:
                raise BadCheckpoint(f"{pack.path} is not as it was written")
        with pq.ParquetFile(
            pack.path, read_dictionary=[c for c in TEXT if c not in ANSWERED], page_checksum_verification=True
        ) as file:
            columns = filled(file, groups=[index])
            return compact(checked(file.read_row_group(index, columns=columns), pack.path, NEEDED))
    except _broken() as error:
        raise BadCheckpoint(f"cannot read {pack.path}: {error}") from error
