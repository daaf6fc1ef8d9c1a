"""The complete shipped data for an installed wheel, which holds a part of it."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from workbench.errors import BadCheckpoint
from workbench.places import README, SHIPPED, complete_data


def add_data(source: Path) -> Path:
    """Copy the complete shipped data into the cache, where later processes find it, and return the folder.

    Args:
        source: A clone, its folder `data`, or the source distribution (`.tar.gz`) of this version.

    Raises:
        BadCheckpoint: The source cannot be read, or has the data of another version.
    """
    place = complete_data()
    place.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=place.parent))
    try:
        if source.is_dir():
            inside = source / "data" if (source / "data").is_dir() else source
            shutil.copytree(inside, part, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".index*", ".pins*"))
        else:
            with tarfile.open(source) as file:
                for member in file:
                    parts = PurePosixPath(member.name).parts
                    content = file.extractfile(member) if parts[1:2] == ("data",) and member.isreg() else None
                    if content is not None and ".." not in parts:
                        (copy := part.joinpath(*parts[2:])).parent.mkdir(parents=True, exist_ok=True)
                        with content, copy.open("wb") as out:
                            shutil.copyfileobj(content, out)
        readme = part / README
        if not readme.is_file() or readme.read_bytes() != (SHIPPED / README).read_bytes():
            cure = "give a clone or the .tar.gz of the same version"
            raise BadCheckpoint(f"{source} has no shipped data of this version: {cure}")
        shutil.rmtree(place, ignore_errors=True)
        part.rename(place)
    except (OSError, tarfile.TarError) as error:
        raise BadCheckpoint(f"{source} cannot be read as a clone or a .tar.gz of the project: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return place
