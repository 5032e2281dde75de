"""Room on the disk, asked for before it is needed."""

import os
import shutil
from pathlib import Path

from duetime.errors import SetupError

MIB = 1024 * 1024


def require_room(path: Path, mib: int) -> None:
    """Raise `SetupError` if the disk of `path`, which need not exist, has less than `mib` MiB."""
    free_mib = shutil.disk_usage(_nearest_existing(path)).free // MIB
    if free_mib < mib:
        raise SetupError(
            f"only {free_mib} MiB are free on the disk of {path}, and {mib} MiB are needed: "
            "make room there, or choose a directory on another disk"
        )


def require_directory(path: Path) -> None:
    """Create `path` where it is missing; raise `SetupError` if it cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise SetupError(
            f"{path} cannot be written to ({error.strerror}): "
            "change its owner, or choose another directory"
        ) from error


def data_home() -> Path:
    """Where duetime keeps what is this user's."""
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(home).expanduser() / "duetime"


def _nearest_existing(path: Path) -> Path:
    return next(place for place in (path, *path.absolute().parents) if place.exists())
