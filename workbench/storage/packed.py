"""Packed studies: all runs of a study in a few files, read through an unpacked copy in the cache.

    data/evidence/sinks/    sinks.toml, provenance.json
                            runs.json            what `run.json` holds, one run per line
                            records.parquet      measured records of all runs
                            samples.parquet      one loss per document
                            telemetry.parquet    what training logged

The copy is made once for each content of the files, in a few seconds; only indexes are written to it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.environment import mirrors_folder
from workbench.errors import BadCheckpoint, WorkbenchError
from workbench.file_io import MAX_TABLE, digest, digest_of, read_bytes, read_json
from workbench.places import SHIPPED

if TYPE_CHECKING:
    import pyarrow as pa

RUN, RUNS, PACKED, VERDICTS = "run.json", "runs.json", ".packed.json", ".verdicts.json"
TABLES = {
    "records": "records/all.parquet",
    "samples": "records/all.samples.parquet",
    "telemetry": "telemetry/{:06d}-{:06d}.parquet",
}
"""Tables of a study, and where the rows of a run lie in its folder (telemetry: first and last step)."""

UNUSED_S = 30 * 24 * 3600  # after which a copy is deleted


def unpacked(path: str | Path) -> Path:
    """Return the unpacked copy of a folder of packed studies, or of a path in it; any other path unchanged."""
    path = Path(path)
    try:
        if path.is_dir():
            if (path / RUNS).is_file():
                return _copy(path.parent) / path.name
            with os.scandir(path) as children:
                folders = [child.path for child in children if child.is_dir()]
            packed = any(os.path.isfile(f"{child}/{RUNS}") for child in folders)  # noqa: PTH113 - a thousand times a second
            return path if not packed or any(os.path.exists(f"{child}/{RUN}") for child in folders) else _copy(path)  # noqa: PTH110
        for parent in path.parents:
            if parent.is_dir() and (parent / RUNS).is_file():
                return _copy(parent.parent) / parent.name / path.relative_to(parent)
        if path.name == str(path) and not os.path.lexists(path):  # a run that ships, by its name alone
            for file in sorted((SHIPPED / "evidence").glob(f"*/{RUNS}")):
                with contextlib.suppress(BadCheckpoint):
                    if path.name in _runs(file.parent):
                        return _copy(file.parents[1]) / file.parent.name / path.name
    except (OSError, ValueError):  # too long a name, no permission: whoever opens it says so
        pass
    return path


def origin(path: Path) -> Path:
    """Return the packed path that a path in an unpacked copy represents; any other path unchanged."""
    for parent in (path, *path.parents):
        if (parent / PACKED).is_file() and "root" in (about := read_json(parent / PACKED)):
            return Path(about["root"]) / path.relative_to(parent)
    return path


def checksum(run: Path) -> str | None:
    """Return the checksum of the packed study that a run came from; None for an unpacked run."""
    about = run.parent / PACKED
    return str(read_json(about)["digest"]) if about.is_file() else None


def pack(study: Path, infos: Mapping[str, Mapping[str, Any]], tables: Mapping[str, pa.Table]) -> None:
    """Write the packed files of a study: `run.json` by run, and the `TABLES`, the rows of a run together and in the same order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    study.mkdir(parents=True, exist_ok=True)
    for kind, table in tables.items():
        file = study / f"{kind}.parquet"
        if not len(table):
            file.unlink(missing_ok=True)
            continue
        numbers = [field.name for field in table.schema if pa.types.is_floating(field.type)]
        texts = [name for name in table.column_names if name not in numbers]
        part = file.with_name(f".{uuid.uuid4().hex}.part")
        pq.write_table(
            table.replace_schema_metadata(None), part, compression="zstd", compression_level=19, write_statistics=False,
            store_schema=False, use_dictionary=texts, use_byte_stream_split=numbers, row_group_size=len(table),
            dictionary_pagesize_limit=1 << 28, data_page_size=1 << 24, write_page_checksum=True,
        )  # fmt: skip
        part.replace(file)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(info, separators=(',', ':'))}" for name, info in infos.items())
    (study / RUNS).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")  # last: it makes the study a packed one


def _files(root: Path) -> list[Path]:
    inside = (file for runs in sorted(root.glob(f"*/{RUNS}")) for file in sorted(runs.parent.iterdir()))
    kinds = (".json", ".toml", ".parquet")
    return [*root.glob(VERDICTS), *(f for f in inside if f.suffix in kinds and f.name[0] != "." and f.is_file())]


def _copy(root: Path) -> Path:
    root = root.resolve()
    stats = [(str(file), stat.st_mtime_ns, stat.st_size) for file in _files(root) for stat in [file.stat()]]
    key = (*stats, *_others(root))
    if not (place := _copy_of(root, key)).is_dir():
        _copy_of.cache_clear()
        place = _copy_of(root, key)
    return place


def _others(root: Path) -> list[str]:
    """Folders beside the packed studies; the copy links to them."""
    return sorted(p.name for p in root.iterdir() if p.is_dir() and p.name[0] != "." and not (p / RUNS).is_file())


@functools.lru_cache(maxsize=64)
def _copy_of(root: Path, _: tuple[object, ...]) -> Path:
    contents = (part for file in _files(root) for part in (str(file.relative_to(root)), read_bytes(file, MAX_TABLE)))
    place = mirrors_folder().parent / "unpacked" / f"{digest_of(contents)}-{digest(str(root), _others(root))}"
    if (place / PACKED).is_file():
        os.utime(place)
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=place.parent))
    except OSError:  # no cache to write to: for this process alone
        place = part = Path(tempfile.mkdtemp(prefix="workbench-"))
        atexit.register(shutil.rmtree, place, ignore_errors=True)
    try:
        for file in _files(root):
            study = part if file.parent == root else part / file.parent.name
            study.mkdir(exist_ok=True)
            if file.suffix != ".parquet" and file.name != RUNS:
                shutil.copyfile(file, study / file.name)
            elif file.name == RUNS:
                _unpack_study(file.parent, study)
        for name in _others(root):
            (part / name).symlink_to(root / name)
        (part / PACKED).write_text(json.dumps({"root": str(root)}), encoding="utf-8")
        if part != place:
            part.rename(place)
            for other in place.parent.iterdir():
                if time.time() - other.stat().st_mtime > UNUSED_S:
                    shutil.rmtree(other, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        if not (place / PACKED).is_file():  # else another process was faster
            raise WorkbenchError(f"cannot unpack {root} to {place}: {error.strerror or error}") from error
    return place


def _unpack_study(study: Path, place: Path) -> None:
    """Write the run folders of a study; damaged files become damaged files of its runs, which readers report."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        infos = _runs(study)
    except BadCheckpoint:
        (place / study.name).mkdir()
        shutil.copyfile(study / RUNS, place / study.name / RUN)
        return
    for name, info in infos.items():
        (place / name).mkdir()
        (place / name / RUN).write_text(json.dumps(info), encoding="utf-8")
    for kind, inside in TABLES.items():
        if not (file := study / f"{kind}.parquet").is_file():
            continue
        try:
            table = pq.read_table(file, page_checksum_verification=True, partitioning=None)
            runs = table["run"].combine_chunks()
            begins = [0, *(pc.indices_nonzero(pc.not_equal(runs[1:], runs[:-1])).to_numpy() + 1), len(table)]
            parts = {runs[int(a)].as_py(): table.slice(a, b - a) for a, b in pairwise(begins) if b > a}
        except (OSError, KeyError, TypeError, UnicodeDecodeError, pa.ArrowException):
            parts = dict.fromkeys(infos)
        for name in (name for name in infos if name in parts):
            recipe, rows = infos[name].get("train"), parts[name]
            last = int(recipe.get("steps", 0)) if isinstance(recipe, dict) else 0
            (path := place / name / inside.format(0, last)).parent.mkdir(exist_ok=True)
            if rows is None:
                path.write_bytes(b"damaged")
                continue
            written = [column for column in rows.column_names if rows[column].null_count < len(rows)]
            pq.write_table(rows.select(written), path, compression="zstd", write_page_checksum=True)
    own = (file for file in _files(study.parent) if file.parent == study)
    files = (part for file in own for part in (file.name, read_bytes(file, MAX_TABLE)))
    (place / PACKED).write_text(json.dumps({"digest": digest_of(files)}), encoding="utf-8")


def _runs(study: Path) -> dict[str, dict[str, Any]]:
    """Contents of `run.json` by run; raises `BadCheckpoint` for a damaged file or an unsafe name."""
    infos = read_json(study / RUNS)
    for name, info in infos.items():
        if not name or Path(name).name != name or name.startswith(".") or not isinstance(info, dict):
            raise BadCheckpoint(f"{study / RUNS}: {name!r} is no run; copy the file again")
    return infos
