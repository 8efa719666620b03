"""Drafts that come with the package (`sparkinfer/drafts`), and the models they were trained for."""

from dataclasses import dataclass
from pathlib import Path

from sparkinfer.gguf import GGUFFile

FOLDER = Path(__file__).parents[1] / "drafts"


@dataclass(frozen=True, slots=True)
class ShippedDraft:
    """A file of `FOLDER`, and what the metadata of its target says in any quantisation."""

    filename: str
    architecture: str
    names: frozenset[str]  # general.name, which quantising leaves alone
    n_layers: int
    n_embd: int


SHIPPED = (
    ShippedDraft(
        "smollm2-135m-dflash.gguf",
        architecture="llama",
        names=frozenset({"Smollm2 135M 8k Lc100K Mix1 Ep2", "SmolLM2 135M Instruct"}),
        n_layers=30,
        n_embd=576,
    ),
)


def shipped_draft(file: GGUFFile) -> Path | None:
    """The draft that was trained for this model, None where there is none."""
    arch = file.architecture
    for draft in SHIPPED:
        if (
            draft.architecture == arch
            and file.get("general.name", str, "") in draft.names
            and file.get(f"{arch}.block_count", int, 0) == draft.n_layers
            and file.get(f"{arch}.embedding_length", int, 0) == draft.n_embd
        ):
            return FOLDER / draft.filename
    return None
