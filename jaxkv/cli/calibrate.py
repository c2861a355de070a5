"""`jaxkv calibrate`: measure on a model what some policies need to know of it."""

import dataclasses
from pathlib import Path

from tyro.conf import Positional

from jaxkv.cli.options import DEFAULT_MODEL
from jaxkv.cli.terminal import Meter


@dataclasses.dataclass(frozen=True)
class Calibrate:
    """Measure on a model what some policies need to know of it, and save it where `load` finds it."""

    model: Positional[str] = DEFAULT_MODEL
    dtype: str | None = None
    length: int = 512
    """Tokens of each stretch of text."""
    windows: int = 12
    """Stretches of text."""
    needles: int = 8
    """Hidden facts, to tell which heads retrieve."""
    seed: int = 0
    predictors: bool = False
    """Also what predicts a layer's keys and values from the layer below (aquakv): 3 matrices a layer, as wide as all of
    its KV heads."""
    text: str | None = None
    """File with the text that is measured on, instead of the one that jaxkv carries."""
    out: str | None = None
    """Folder of the file: by default the model's own, or jaxkv's cache folder for a model known by name."""

    def __call__(self) -> int:
        import jaxkv
        from jaxkv.configs import config_files
        from jaxkv.evaluation.runner import text_of
        from jaxkv.folders import cache_folder, check_place
        from jaxkv.weights import learned

        text = None if self.text is None else text_of(self.text)
        params = jaxkv.load(self.model, dtype=self.dtype)
        own = Path(self.model).expanduser()
        known = self.model in config_files("models") or not own.exists()
        beside = cache_folder() if known else own if own.is_dir() else own.parent
        path = Path(self.out or beside) / learned.file_name(params.fingerprint)
        check_place(path)  # measuring takes minutes
        there = learned.checked(learned.read(path), params.config, path) if path.exists() else {}
        with Meter(quiet=False) as meter:
            measured = jaxkv.calibrate(
                params, length=self.length, windows=self.windows, needles=self.needles, seed=self.seed,
                predictors=self.predictors, text=text, progress=meter.update,
            )  # fmt: skip
        learned.write({name: there[name] for name in learned.ASKED_FOR if name in there} | measured, path)
        print(path)
        return 0
