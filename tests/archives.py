"""The arrays of an .npz file."""

from pathlib import Path

import numpy as np


def arrays(file: Path) -> dict[str, np.ndarray]:
    """All arrays of the file by their names; the file is closed again, which `np.load` leaves to its caller."""
    with np.load(file) as archive:
        return dict(archive)
